"""Data in object stores: token stores, which are read in place by blocks, and files, which are fetched to be prepared.

URL/token_store.json        exists: the URL is a token store, and complete; it is put last
    token_store.digests     digests of the blocks of its files, in the order of the manifest
    meta.json, *.tokens, *.offsets, *.marks    the files of a local token store

<cache>/remote/blocks/              blocks of all token stores, see storage/blocks.py
               <digest>/<key>/      of one token store: files apart from tokens and marks, and rows packed from it
               files-<digest>/      of another URL: its files, which are deleted if others need the room
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, get_args

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data.best_fit import packing_name
from torchtitan_clone.data.formats import TOKEN_SUFFIXES
from torchtitan_clone.data.reports import skipped_rows
from torchtitan_clone.data.slices import map_bytes
from torchtitan_clone.data.token_store import (
    META_FILE,
    Split,
    TokenStore,
    build_once,
    cache_folder,
    digest_of,
    key_of,
    locked,
    open_store,
    read_meta,
)
from torchtitan_clone.data.tokenizer import Tokenizer
from torchtitan_clone.documents import DocumentError, is_plain_name, parse_json, shorten
from torchtitan_clone.files import format_bytes, write_atomically
from torchtitan_clone.storage import objects as stores
from torchtitan_clone.storage.blocks import BLOCK_BYTES, READ_SECONDS, BlockFiles, blocks_of, digest_of_block
from torchtitan_clone.storage.objects import CONCURRENCY, REQUEST_BYTES, ObjectStore, StoredObject, StoreError

logger = logging.getLogger("torchtitan_clone")

MANIFEST_FILE, DIGESTS_FILE = "token_store.json", "token_store.digests"
OPTION = "training.dataset_path"
_IN_PLACE = (".tokens", ".marks")
_MAX_MANIFEST = 1 << 20
_SMALLEST_BLOCK = 1 << 8
_RANGES_AT_ONCE = 4
_in_use: list[BinaryIO] = []
"""Files whose locks keep what this process reads from being deleted, until it ends."""


@contextmanager
def _explained(url: str, *, option: str = OPTION) -> Iterator[None]:
    """Raises ConfigError for errors of the store and of the cache folder."""
    try:
        yield
    except (StoreError, FileNotFoundError, DocumentError) as error:
        remedy = "check the URL, the credentials in the environment and the network"
        raise ConfigError(f"{option} = {toml_like(url)}: {error}; {remedy}.") from None
    except OSError as error:
        remedy = "set it to a folder that can be written, with enough space"
        raise ConfigError(f"data.cache_folder: caching {url} there failed: {error}; {remedy}.") from error


# ---------------------------------------------------------------------- token stores


@dataclass(frozen=True, kw_only=True)
class _StoreManifest:
    """Content of token_store.json."""

    format: int
    name: str
    """Folder of the local store, which those that are compared with it for duplicates know it by."""
    block_bytes: int
    digests: str
    """Digest of the object with the digests of all blocks."""
    files: Mapping[str, int]
    """Bytes of each file."""


def _file_names(*, has_marks: bool) -> list[str]:
    suffixes = ["offsets", "tokens", *(["marks"] if has_marks else [])]
    return [META_FILE, *(f"{split}.{suffix}" for suffix in suffixes for split in get_args(Split))]


def put_token_store(store: TokenStore, url: str, *, block_bytes: int = BLOCK_BYTES) -> None:
    """Puts a local token store below a URL, from which runs can read it. ConfigError if there is one.

    `block_bytes`, a power of two, are what runs read at once.
    """
    option = "--to"
    with _explained(url, option=option):
        objects = stores.open_store(url, timeout_seconds=READ_SECONDS, option=option)
        taken = f"{option} = {toml_like(url)}: there is a token store; choose another prefix, or delete it first"
        if objects.size(MANIFEST_FILE) is not None:
            raise ConfigError(taken)
        sizes: dict[str, int] = {}
        digests: list[bytes] = []
        for name in _file_names(has_marks=bool(store.meta.marks)):
            sizes[name], of_file = _put_file(objects, name, store=store, block_bytes=block_bytes)
            digests += of_file
        objects.put(DIGESTS_FILE, content := b"".join(digests))
        digest = digest_of_block(content).hex()
        manifest = _StoreManifest(
            format=1, name=store.folder.name, block_bytes=block_bytes, digests=digest, files=sizes
        )
        if not objects.put_new(MANIFEST_FILE, json.dumps(asdict(manifest), indent=2).encode()):
            raise ConfigError(taken)


def _put_file(objects: ObjectStore, name: str, *, store: TokenStore, block_bytes: int) -> tuple[int, list[bytes]]:
    """Puts a file of a store, or the tokens that it reads in place; returns its bytes and the digests of its blocks."""
    split, _, suffix = name.partition(".")
    if store.segments and suffix == "tokens":
        numbers, dtype = store.tokens("train" if split == "train" else "validation"), np.dtype(store.dtype)
    else:
        numbers, dtype = map_bytes(store.folder / name, follow_links=False), np.dtype(np.uint8)
    step = block_bytes // dtype.itemsize
    digests: list[bytes] = []

    def blocks() -> Iterator[bytes]:
        digests.clear()
        for start in range(0, len(numbers), step):
            block = numbers[start : start + step].astype(dtype, copy=False).tobytes()
            digests.append(digest_of_block(block))
            yield block

    if size := len(numbers) * dtype.itemsize:
        objects.put_stream(name, blocks, size=size)
    else:
        objects.put(name, b"")
    return size, digests


def open_remote_store(url: str, *, training: Training, data: Data, tokenizer: Tokenizer) -> TokenStore | None:
    """Opens the token store at a URL; None if there is none, but perhaps files. ConfigError if it is one of other data.

    Its files apart from tokens are fetched first, if they are not in the cache folder.
    """
    with _explained(url):
        if (content := _read_manifest_file(url)) is None:
            return None
        manifest = _read_manifest(content)
        root = cache_folder(data) / "remote"
        folder = root / digest_of_block(content).hex() / manifest.name
        remote = BlockFiles(
            url=url, sizes=manifest.files, digests=folder / DIGESTS_FILE, block_bytes=manifest.block_bytes,
            cache=root / "blocks", limit_bytes=_limit(data),
        )  # fmt: skip
        build_once(folder, name=url, build=partial(_fetch_store, remote=remote, manifest=manifest))
        meta = read_meta(folder / META_FILE)
        if meta.marks and f"{get_args(Split)[0]}.marks" not in manifest.files:
            raise DocumentError(f"{MANIFEST_FILE}: the marks of its chats are missing")
    key = key_of(meta.source_fingerprint, tokenizer=tokenizer, held_out_fraction=data.held_out_fraction)
    for name in (name for name, value in asdict(key).items() if getattr(meta, name) != value):
        before = f"data.held_out_fraction = {meta.held_out_fraction}" if name == "held_out_fraction" else ""
        options = before or "another tokenizer (model.hf_assets_path, data.add_bos)"
        raise ConfigError(f"{OPTION} = {toml_like(url)}: was prepared with {options}; set that, or prepare it again.")
    if (training.format == "chat") != bool(meta.marks):
        holds = "chat" if meta.marks else "text"
        raise ConfigError(f'training.format = "{training.format}": {url} was prepared with "{holds}"; set that.')
    skipped_rows(meta, limit=data.max_bad_rows).check()
    packing = packing_name(data.packing, long_chats=training.long_chats)
    return open_store(folder, key=key, packing=packing, remote=remote)


def _read_manifest_file(url: str) -> bytes | None:
    """Returns the content of token_store.json; None if there is none. The only place that says what a URL holds."""
    objects = stores.open_store(url, timeout_seconds=stores.CHECK_SECONDS, option=OPTION)
    try:
        return objects.get(MANIFEST_FILE, max_bytes=_MAX_MANIFEST)
    except FileNotFoundError:
        return None


def _read_manifest(content: bytes) -> _StoreManifest:
    table = parse_json(content, where=MANIFEST_FILE).table("format", "name", "block_bytes", "digests", "files")
    has_marks = f"{get_args(Split)[0]}.marks" in table["files"].plain_entries()
    sizes = table["files"].table(*_file_names(has_marks=has_marks))
    block_bytes = table["block_bytes"].integer(low=_SMALLEST_BLOCK, high=BLOCK_BYTES)
    if block_bytes & (block_bytes - 1):
        table["block_bytes"].refuse("must be a power of two")
    return _StoreManifest(
        format=table["format"].integer(low=1, high=1),
        name=table["name"].text(pattern="[0-9a-f]{16}"),
        block_bytes=block_bytes,
        digests=table["digests"].text(pattern="[0-9a-f]{32}"),
        files={name: size.integer() for name, size in sizes.items()},
    )


def _fetch_store(folder: Path, *, remote: BlockFiles, manifest: _StoreManifest) -> None:
    """Writes the files of a token store that are not read in place, after comparing them with their digests."""
    count = sum(blocks_of(size, block_bytes=remote.block_bytes) for size in remote.sizes.values())
    objects = stores.open_store(remote.url, timeout_seconds=READ_SECONDS, option=OPTION)
    digests = objects.get(DIGESTS_FILE, max_bytes=count * len(bytes.fromhex(manifest.digests)))
    if digest_of_block(digests).hex() != manifest.digests:
        raise DocumentError(f"{DIGESTS_FILE} is not the one that {MANIFEST_FILE} names; put the store there again")
    write_atomically(folder / DIGESTS_FILE, digests)
    files = replace(remote, digests=folder / DIGESTS_FILE)
    for name in (name for name in remote.sizes if not name.endswith(_IN_PLACE)):
        content = files.array(name, dtype="uint8")
        with (folder / name).open("xb") as file:
            for start in range(0, len(content), CONCURRENCY * BLOCK_BYTES):
                file.write(content[start : start + CONCURRENCY * BLOCK_BYTES].data)
            file.flush()
            os.fsync(file.fileno())


# ---------------------------------------------------------------------- files


def describe_remote(url: str) -> str:
    """Returns in words what a URL holds; ConfigError if there is nothing."""
    with _explained(url):
        if _read_manifest_file(url) is not None:
            return f"{url}, a token store"
        files = _find_files(url)[1]
        return f"{url}, {len(files):,} files of {format_bytes(sum(each.bytes for each in files))}"


def fetch_files(url: str, *, data: Data) -> Path | None:
    """Fetches the files below a URL, or the one at it, that are not in the cache folder; returns where they are.

    None if there is a token store. ConfigError if there are no files, or more than data.cache_gib.
    """
    with _explained(url):
        if _read_manifest_file(url) is not None:
            return None
        objects, files = _find_files(url)
        folder = cache_folder(data) / "remote" / f"files-{digest_of(url)[:16]}"
        with locked(folder / "lock", name=url):
            _use(folder)
            _make_room(folder, files, url=url, limit=_limit(data))
            _fetch(folder, files, objects=objects)
    root = folder / "files"
    return root / files[0].name if objects.url != url.rstrip("/") else root


def _limit(data: Data) -> int:
    return int(data.cache_gib * 2**30)


def _find_files(url: str) -> tuple[ObjectStore, list[StoredObject]]:
    """Returns the objects below a URL, or the one at it, and the store in which they have their names."""
    open_at = partial(stores.open_store, timeout_seconds=stores.CHECK_SECONDS, option=OPTION)
    objects = open_at(url)
    found = objects.find()
    if not found:
        parent, _, name = url.rstrip("/").rpartition("/")
        if parent.count("/") >= 2 and (single := (objects := open_at(parent)).head(name)) is not None:
            if name.endswith(TOKEN_SUFFIXES):
                raise ConfigError(f"{OPTION} = {toml_like(url)}: token ids may have an index; set it to {parent}.")
            found = [single]
    folders = {str(folder) for each in found for folder in Path(each.name).parents}
    files = [each for each in found if each.bytes or each.name not in folders]  # markers of folders
    files = [each for each in files if not any(part.startswith(".") for part in each.name.split("/"))]
    if not files:
        rule = "no objects there whose names do not begin with a dot"
        raise ConfigError(f"{OPTION} = {toml_like(url)}: {rule}; check the URL, or put files there.")
    for each in files:
        if each.name in folders or not all(map(is_plain_name, each.name.split("/"))):
            raise ConfigError(f"{OPTION}: {shorten(each.name)} in {url} cannot be the name of a file; rename it.")
    return objects, files


def _use(folder: Path) -> None:
    file = (folder / "in_use").open("ab")
    fcntl.flock(file, fcntl.LOCK_SH)
    _in_use.append(file)


def _make_room(folder: Path, files: Sequence[StoredObject], *, url: str, limit: int) -> None:
    """Deletes files of other URLs that no process uses until all have room, first those used least recently."""
    wanted = sum(each.bytes for each in files)
    others = sorted((each for each in folder.parent.glob("files-*/in_use")), key=lambda each: each.stat().st_mtime_ns)
    sizes = {each: _size_of(each.parent) for each in others if each.parent != folder}
    for each in [*sizes]:
        if wanted + sum(sizes.values()) <= limit:
            break
        with each.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(each.parent / "files", ignore_errors=True)
            sizes[each] = 0
    if wanted + sum(sizes.values()) > limit:
        used = f"{format_bytes(wanted)} beside {format_bytes(sum(sizes.values()))} that other runs use"
        rule = f"data.cache_gib = {limit / 2**30:g}: {url} takes {used} until it is tokenized"
        raise ConfigError(f"{rule}; increase it, or put a token store there with prepare_data --to.")
    os.utime(folder / "in_use")


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _fetch(folder: Path, files: Sequence[StoredObject], *, objects: ObjectStore) -> None:
    """Makes the files in a folder those that are in the store."""
    root, partial_folder = folder / "files", folder / "partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir()
    names = {each.name for each in files}
    for path in [path for path in root.rglob("*") if path.is_file()]:
        if path.relative_to(root).as_posix() not in names:
            path.unlink()
    missing = [each for each in files if not _is_current(root / each.name, each)]
    if not missing:
        return
    size = format_bytes(sum(each.bytes for each in missing))
    logger.info("fetching %s of %s files, %s, from %s", f"{len(missing):,}", f"{len(files):,}", size, objects.url)
    patient = stores.open_store(objects.url, timeout_seconds=READ_SECONDS, option=OPTION)
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        fetched = threads.map(
            lambda numbered: _fetch_file(numbered[1], partial_folder / str(numbered[0]), objects=patient),
            enumerate(missing),
        )
        for each, path in zip(missing, fetched, strict=True):
            (root / each.name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(root / each.name)


def _fetch_file(each: StoredObject, path: Path, *, objects: ObjectStore) -> Path:
    step = _RANGES_AT_ONCE * REQUEST_BYTES
    with path.open("xb") as file:
        for start in range(0, each.bytes, step):
            begins = range(start, min(start + step, each.bytes), REQUEST_BYTES)
            ranges = [(begin, min(begin + REQUEST_BYTES, each.bytes)) for begin in begins]
            for content in objects.get_ranges(each.name, ranges):
                file.write(content)
        file.flush()
        os.fsync(file.fileno())
    now = objects.head(each.name)
    if now is None or (now.tag, now.bytes) != (each.tag, path.stat().st_size):
        raise StoreError(f"{objects.url}/{each.name} changed while it was fetched")
    os.utime(path, (_stamp(each), _stamp(each)))
    return path


def _is_current(path: Path, each: StoredObject) -> bool:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (status.st_size, int(status.st_mtime)) == (each.bytes, _stamp(each))


def _stamp(each: StoredObject) -> int:
    """Returns what a fetched file has as time of last modification, in seconds: a hash of the tag of its object.

    What is prepared from files knows them by names, sizes and times, which are thereby the same on every machine.
    """
    return int.from_bytes(blake2b(each.tag.encode(), digest_size=4).digest(), "big") >> 1
