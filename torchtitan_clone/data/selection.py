"""Selects the files of a folder that are read: what is left out is said, and is an error if it is much."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.kinds import Kind, kind_of
from torchtitan_clone.documents import DocumentError, shorten

SMALL_SHARE = 0.01
"""More of the bytes of a folder in files that are not read are an error."""
_METADATA_BYTES = 1 << 20
"""A larger file of metadata counts as one that is not read."""
_METADATA = re.compile(r"_success|_(committed|started)_.*|_(common_)?metadata", re.IGNORECASE)
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|citation|md5sums?|sha256sums?)(\.\w+)?", re.IGNORECASE)


def select_readable(files: Sequence[Path], *, root: Path, text_key: str, option: str) -> tuple[tuple[Path, ...], str]:
    """Returns the files that are read, and in words which others the root has.

    ConfigError for data in a format that is not read, and if more than a small share of the bytes is in other files.
    """
    kinds = _kinds_of(files, text_key=text_key)
    foreign = defaultdict[str, list[Path]](list)
    for file, kind in kinds.items():
        if kind.content == "foreign":
            foreign[kind.problem].append(file)
    if foreign:
        raise ConfigError([f"{option}: {_first(found)} {problem}." for problem, found in foreign.items()])
    contents = {kind.content for kind in kinds.values()}
    if contents == {"tokens"}:
        return tuple(files), ""
    is_table = bool(contents & {"rows", "parquet"})
    unreadable = {"binary", "tokens"} if is_table or "text" in contents else {"binary", "tokens", "json"}
    metadata = {file: kind for file, kind in kinds.items() if _is_metadata(file, kind, beside_rows=is_table)}
    unread = {file: kind for file, kind in kinds.items() if kind.content in unreadable and file not in metadata}
    _check_share([*unread, *(file for file in metadata if file.stat().st_size > _METADATA_BYTES)], kinds, option=option)
    kept = tuple(file for file in files if file not in unread and file not in metadata)
    left_out = [f"{list_names([*unread], root=root)} (not text)"] if unread else []
    left_out += [f"{list_names([*metadata], root=root)} (metadata)"] if metadata else []
    notes = [f"left out of {shorten(str(root))}: {'; '.join(left_out)}"] if left_out else []
    if is_table and (texts := [file for file in kept if kinds[file].content == "text"]):
        notes.append(f"read as plain text, beside files of rows: {list_names(texts, root=root)}")
    return kept, "; ".join(notes)


def _kinds_of(files: Sequence[Path], *, text_key: str) -> dict[Path, Kind]:
    def find(file: Path) -> Kind:
        try:
            return kind_of(file, text_key=text_key)
        except (DocumentError, OSError) as error:
            raise ConfigError(f"{file} cannot be read ({error}); remove it, or correct its permissions.") from error

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(zip(files, threads.map(find, files), strict=True))


def _is_metadata(path: Path, kind: Kind, *, beside_rows: bool) -> bool:
    """Returns whether a file is metadata: of Spark and Parquet, and beside rows also JSON, a README or a licence."""
    named = _METADATA.fullmatch(path.name) or (beside_rows and kind.content == "text" and _ABOUT.fullmatch(path.name))
    return bool(named) or (beside_rows and kind.content == "json")


def _check_share(unread: Sequence[Path], kinds: Mapping[Path, Kind], *, option: str) -> None:
    if not unread:
        return  # without asking for the size of each file
    sizes = {file: file.stat().st_size for file in kinds}
    lost, total = sum(sizes[file] for file in unread), sum(sizes.values())
    if lost <= SMALL_SHARE * total:
        return
    largest = max(unread, key=lambda file: sizes[file])
    content = kinds[largest].content
    what = {"json": "JSON, of which brackets and keys would be trained on", "tokens": "token ids or an array"}
    described = kinds[largest].problem or what.get(content, "not text")
    remedy = {
        "json": "rename it to .jsonl if each of its lines is a record with text, or to .txt to train on all of it",
        "tokens": "move it to a folder of its own, which may have nothing but token ids and their metadata",
    }
    share = f", and {lost / total:.0%} of the bytes would be left out" if len(kinds) > 1 else ""
    names = _first([largest, *(file for file in unread if file != largest)])
    remedied = remedy.get(content, "convert it to .jsonl or .parquet, or move it away")
    raise ConfigError(f"{option}: {names} is {described}{share}; {remedied}.")


def _first(files: Sequence[Path]) -> str:
    """Returns the first path and the number of the others."""
    return shorten(str(files[0]), max_chars=500) + (f" (and {len(files) - 1:,} more)" if len(files) > 1 else "")


def list_names(files: Sequence[Path], *, root: Path, limit: int = 5) -> str:
    """Returns the names of the first files, and the number of the others."""
    names = [shorten(file.relative_to(root).as_posix()) for file in files[:limit]]
    return ", ".join(names) + (f" and {len(files) - limit:,} more" if len(files) > limit else "")
