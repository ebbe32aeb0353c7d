"""URLs of object stores as options name them: `s3://BUCKET/PREFIX`. `file://` is a local folder."""

import re
from collections.abc import Iterator

from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import Checkpoint

SCHEMES = {
    "s3": "Amazon S3 and what speaks its protocol",
    "gs": "Google Cloud Storage",
    "az": "Azure Blob Storage",
    "memory": "memory of this process, for tests",
    "file": "a local or mounted folder",
}
"""What each scheme of a URL names."""
_URL = re.compile(r"(?P<scheme>[^:/]+)://(?P<bucket>[^/]*)(?P<path>.*)", re.DOTALL)


def local_path(text: str) -> str | None:
    """Returns the path that an option names, also as `file://`; None if it is the URL of an object store."""
    match = _URL.fullmatch(text)
    if match is None:
        return text
    return match["path"] if match["scheme"] == "file" else None


def store_url(checkpoint: Checkpoint) -> str | None:
    """Returns the URL of the object store that checkpoints go to; None if they stay in a folder."""
    return checkpoint.folder if local_path(checkpoint.folder) is None else None


def data_url(path: str | None) -> str | None:
    """Returns the URL of an object store that names data; None for a local path, or none."""
    return path if path is not None and local_path(path) is None else None


def split_url(url: str) -> tuple[str, str, str]:
    """Returns scheme, bucket and prefix of a URL without errors; the prefix has no slash at its ends."""
    match = _URL.fullmatch(url)
    assert match is not None, url
    return match["scheme"], match["bucket"], match["path"].strip("/")


def find_url_errors(option: str, value: str) -> Iterator[str]:
    """Yields one message if an option looks like a URL and cannot be one of a store; never what may be a credential."""
    match = _URL.fullmatch(value)
    if match is None:
        return
    scheme, bucket, path = match["scheme"], match["bucket"], match["path"]
    start = f'{option} = "{scheme}://..."'
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}:// ({what})" for each, what in SCHEMES.items())
        yield f"{option} = {shown(f'{scheme}://...')}: unknown scheme; known: {known}."
    elif re.search(r"[@:]", bucket) or re.search(r"[?#]", value):  # a secret may hold a slash
        rule = "a URL must not hold credentials or parameters, which would be written to config.toml"
        yield f"{start}: {rule}; set them as environment variables, and here SCHEME://BUCKET/PREFIX alone."
    elif scheme == "file" and (bucket or not path.strip("/")):
        yield f"{option} = {shown(value)}: must name an absolute path, as file:///data/checkpoints."
    elif scheme != "file" and (not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,254}", bucket) or "//" in path or ".." in path):
        rule = "must be SCHEME://BUCKET/PREFIX, without empty parts"
        yield f"{option} = {shown(value)}: {rule}; for example s3://my-bucket/runs/first."


def find_tier_errors(checkpoint: Checkpoint, *, init_timeout_seconds: float) -> Iterator[str]:
    """Yields one message for each rule between the store and the local folder that is broken."""
    defaults = Checkpoint()
    if store_url(checkpoint) is None:
        names = ("local_folder", "local_interval", "local_keep_latest_k", "local_peer_copy", "upload_mib_per_second")
        for name in names:
            if (value := getattr(checkpoint, name)) != getattr(defaults, name):
                rule = "is for checkpoints in an object store, and checkpoint.folder is a local one"
                yield f"checkpoint.{name} = {shown(value)}: {rule}; set the URL of a store there, or remove this."
        return
    local = checkpoint.local_interval
    if local is not None and checkpoint.interval % local:
        rule = f"must divide checkpoint.interval {checkpoint.interval}, so that steps of the store are local ones"
        yield f"checkpoint.local_interval = {local}: {rule}; choose a divisor."
    if (seconds := checkpoint.store_timeout_seconds) >= init_timeout_seconds:
        rule = f"must be less than comm.init_timeout_seconds {init_timeout_seconds:g}, for which other ranks wait"
        yield f"checkpoint.store_timeout_seconds = {seconds:g}: {rule}; decrease it, or increase that."
