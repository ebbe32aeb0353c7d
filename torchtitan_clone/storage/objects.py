"""Requests to an object store: bounded retries, errors on one line, and no credential in any of them."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, TypeVar
from urllib.parse import urlsplit

from torchtitan_clone.config.messages import ConfigError, install
from torchtitan_clone.config.urls import split_url
from torchtitan_clone.documents import DocumentError, shorten

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Backend

logger = logging.getLogger("torchtitan_clone")
T = TypeVar("T")

REQUEST_BYTES = 8 << 20
"""Bytes of one request: parts of an upload, unless there would be too many, and ranges that are read."""
MOST_PARTS = 9000  # S3 allows 10,000
CONCURRENCY = 8
CHECK_SECONDS = 8.0
"""Time after which a store that does not answer is an error of the configuration."""
_MAX_MESSAGE = 400
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.25, 5.0
_SECRETS = re.compile(r".*(SECRET|TOKEN|PASSWORD|CREDENTIAL|ACCESS_KEY|ACCOUNT_KEY|SAS_KEY|SERVICE_ACCOUNT)")
_CONFLICT, _IDLE = "ConditionalRequestConflict", "RequestTimeout"
"""Codes of S3 for requests that it refuses now, and accepts later."""
_ADDRESSES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT",),
    "gs": ("GOOGLE_BASE_URL",),
}
"""Environment variables that name the server, by the scheme of a URL."""
_MEMORY: "dict[str, Backend]" = {}
"""Stores of memory:// by bucket, so that all parts of a process see the same one."""


class StoreError(OSError):
    """A request failed for good; the message names the rank, the object and the reason."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object as a listing shows it: its name below the prefix of the store, its size, and when it was put."""

    name: str
    bytes: int
    modified: datetime
    tag: str
    """Another one if the content is another."""


class ObjectStore:
    """The objects below one URL. Methods raise FileNotFoundError for a missing object, StoreError for other errors.

    A request that may succeed later is repeated for `timeout_seconds`. Safe to use from several threads.
    """

    def __init__(self, backend: "Backend", *, url: str, timeout_seconds: float) -> None:
        import obstore

        self.url = url.rstrip("/")
        self.bytes_read = 0
        self._requests = obstore
        self._backend = backend
        self._prefix = f"{split_url(url)[2]}/".lstrip("/")
        self._timeout_seconds = timeout_seconds

    def put(self, name: str, content: bytes) -> None:
        self._repeat("write", name, lambda key: self._requests.put(self._backend, key, content, use_multipart=False))

    def put_new(self, name: str, content: bytes) -> bool:
        """Puts an object if there is none of this name; returns False if there is, maybe from a lost answer."""
        try:
            self._repeat("write", name, lambda key: self._requests.put(self._backend, key, content, mode="create"))
        except self._requests.exceptions.AlreadyExistsError:
            return False
        return True

    def put_stream(self, name: str, chunks: Callable[[], Iterator[bytes]], *, size: int) -> None:
        """Puts an object of `size` bytes in parts; `chunks` is called again for each attempt.

        An exception from it aborts the upload, so that no object appears, and is raised.
        """
        part = max(REQUEST_BYTES, -(-size // MOST_PARTS))

        def put(key: str) -> None:
            self._requests.put(self._backend, key, chunks(), chunk_size=part, max_concurrency=CONCURRENCY)

        self._repeat("write", name, put)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Returns the content of an object; DocumentError if it is larger than `max_bytes`."""

        def get(key: str) -> bytes | None:
            result = self._requests.get(self._backend, key)
            return bytes(result.bytes()) if result.meta["size"] <= max_bytes else None

        content = self._repeat("read", name, get)
        if content is None:
            raise DocumentError(f"{self.url}/{name}: has more than {max_bytes:,} bytes, which are accepted")
        self.bytes_read += len(content)
        return content

    def get_range(self, name: str, *, begin: int, end: int) -> bytes:
        """Returns bytes [begin, end) of an object, fewer if it is shorter."""
        content = self._repeat(
            "read", name, lambda key: bytes(self._requests.get_range(self._backend, key, start=begin, end=end))
        )
        self.bytes_read += len(content)
        return content

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns bytes [begin, end) of an object for each range, by several requests at once."""
        begins, ends = ([each[place] for each in ranges] for place in (0, 1))

        def get(key: str) -> list[bytes]:
            found = self._requests.get_ranges(self._backend, key, starts=begins, ends=ends, coalesce=0)
            return [bytes(content) for content in found]

        contents = self._repeat("read", name, get)
        self.bytes_read += sum(map(len, contents))
        return contents

    def head(self, name: str) -> StoredObject | None:
        """Returns what a listing shows of an object; None if there is none."""
        try:
            return self._repeat("find", name, lambda key: self._stored(self._requests.head(self._backend, key)))
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """Returns the bytes of an object; None if there is none."""
        return found.bytes if (found := self.head(name)) else None

    def find(self, folder: str = "") -> list[StoredObject]:
        """Returns the objects whose names begin with a folder, as `step-5/`, by default all."""

        def find_all(key: str) -> list[StoredObject]:
            found = self._requests.list(self._backend, key.rstrip("/") or None)
            return [self._stored(each) for chunk in found for each in chunk]

        return self._repeat("list", folder, find_all)

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; one that is missing is no error."""
        for start in range(0, len(names), 1000):  # as many as a request of S3 can name
            keys = [self._prefix + name for name in names[start : start + 1000]]
            with contextlib.suppress(FileNotFoundError):
                self._repeat("delete", names[start], lambda _, keys=keys: self._requests.delete(self._backend, keys))

    def _stored(self, meta: "ObjectMeta") -> StoredObject:
        modified = meta["last_modified"]
        tag = meta["e_tag"] or modified.isoformat()
        return StoredObject(
            name=meta["path"].removeprefix(self._prefix), bytes=meta["size"], modified=modified, tag=tag
        )

    def _repeat(self, verb: str, name: str, request: Callable[[str], T]) -> T:
        known = self._requests.exceptions
        deadline, pause = time.monotonic() + self._timeout_seconds, _FIRST_PAUSE_SECONDS
        while True:
            try:
                return request(self._prefix + name)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    self._fail(verb, name, error)
                raise FileNotFoundError(f"{self.url}/{name} does not exist") from None
            except known.BaseError as error:
                if isinstance(error, known.AlreadyExistsError) and _CONFLICT not in str(error):
                    raise
                if not _may_pass(error, known=known) or time.monotonic() + pause > deadline:
                    self._fail(verb, name, error)
                if pause == _FIRST_PAUSE_SECONDS:
                    text = "%s; trying again for up to %.0f s"
                    logger.info(text, self._describe(verb, name, _reason(error)), self._timeout_seconds)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _fail(self, verb: str, name: str, error: Exception) -> NoReturn:
        raise StoreError(self._describe(verb, name, _reason(error))) from None

    def _describe(self, verb: str, name: str, reason: str) -> str:
        return f"rank {os.environ.get('RANK', '0')} cannot {verb} {self.url}/{name}: {reason}"


def open_store(url: str, *, timeout_seconds: float, option: str = "checkpoint.folder") -> ObjectStore:
    """Returns the store of a URL, without a request to it; its settings and credentials come from the environment.

    ConfigError if obstore is not installed, or lacks a setting, or the environment names what is no address.
    """
    try:
        import obstore
        from obstore.store import MemoryStore, from_url
    except ImportError:
        what = f"{option} = {url}: object stores need the package obstore"
        raise ConfigError(f"{what}; {install('obstore')}, or set a local or mounted folder") from None
    scheme, bucket, _ = split_url(url)
    _check_addresses(scheme, what=f"{option} = {url}")
    seconds = min(60.0, max(1.0, timeout_seconds / 4))
    try:
        backend = (
            _MEMORY.setdefault(bucket, MemoryStore())
            if scheme == "memory"
            else from_url(
                f"{scheme}://{bucket}",
                client_options={
                    "timeout": f"{seconds:g}s",
                    "connect_timeout": f"{min(5.0, seconds):g}s",
                    "allow_http": _allows_http(),
                },
                retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=seconds)},
            )
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        remedy = "set what is missing as an environment variable, as docs/object_stores.md lists them"
        raise ConfigError(f"{option} = {url}: {_reason(error)}; {remedy}") from None
    return ObjectStore(backend, url=url, timeout_seconds=timeout_seconds)


def _check_addresses(scheme: str, *, what: str) -> None:
    """ConfigError for an address that the library would panic at, or that holds credentials, which it would show."""
    for name in _ADDRESSES.get(scheme, ()):
        address = os.environ.get(name)
        if address is not None and not _is_address(address):
            rule = "must be http://HOST:PORT or https://HOST:PORT, without credentials or parameters"
            raise ConfigError(f"{what}: the environment variable {name} {rule}; correct it, or unset it")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and parts.port != 0  # raises ValueError if it is no number of a port
    except ValueError:
        return False
    return has_host and parts.scheme in ("http", "https") and re.search(r"[\s@?#]", text) is None


def _allows_http() -> bool:
    """Whether the environment names an address of http://, as of a server in the same network."""
    return any(os.environ.get(name, "").startswith("http://") for names in _ADDRESSES.values() for name in names)


def _may_pass(error: Exception, *, known: ModuleType) -> bool:
    """Whether a request that failed so may succeed later: not if the server has understood and refused it."""
    if isinstance(error, (known.PermissionDeniedError, known.UnauthenticatedError, known.NotSupportedError)):
        return False
    if any(code in str(error) for code in (_CONFLICT, _IDLE)):
        return True
    status = re.search(r"status code: (\d{3})", str(error))
    return status is None or status[1] in ("408", "409", "425", "429") or status[1][0] == "5"


def _reason(error: Exception) -> str:
    """Returns what a library says, on one line: without its debug output, XML and values of secret variables."""
    text = str(error).partition("\n\nDebug source")[0]
    elements = re.findall(r"<(?:Code|Message)>([^<]*)</", text)
    text = "; ".join([re.sub(r"(: )?<\?xml.*|<\w.*", "", text, flags=re.DOTALL), *elements])
    for name, value in os.environ.items():
        if len(value) >= 4 and _SECRETS.fullmatch(name.upper()):
            text = text.replace(value, f"${name}")
    return shorten(" ".join(text.split()), max_chars=_MAX_MESSAGE)
