"""Divides the documents of a part of a source between the splits, in batches for the tokenizer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_clone.data.formats import read_token_rows
from torchtitan_clone.data.marks import Rendered
from torchtitan_clone.data.sources import BadRows, Source, read_documents
from torchtitan_clone.data.token_store import StoreKey, content_of, unit_hash

BATCH_CHARACTERS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Part:
    """Files that are tokenized together, and the store of their tokens."""

    source: Source
    bytes_before: int
    """Size of the parts before it."""
    key: StoreKey
    folder: Path
    has_ids: bool
    """Whether the source has token ids instead of text, which its first file says."""
    cuts_end: bool
    """Whether the end of its text is held out, instead of documents by their hash."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """What is known about a batch of documents before it is tokenized."""

    part: Part
    held_out: np.ndarray
    """bool; by document."""
    text_bytes: np.ndarray
    """int64; by document, 0 of chats and token ids."""
    bytes_read: int
    """Of the part."""
    bad_rows: BadRows
    """Of the part, complete with its last batch."""


_Document = str | Rendered | np.ndarray
"""Text, a chat, or the token ids of a parquet file."""
_LabelledDocument = tuple[_Document, int, bool, int]
"""With the bytes of the source read so far, whether it is held out, and the bytes of its text, 0 of others."""


def documents_of(source: Source, *, has_ids: bool, bad_rows: BadRows) -> Iterator[tuple[_Document, int]]:
    """Yields every document, with the number of bytes of the source read so far."""
    if has_ids:
        return read_token_rows(source.files, column=source.text_key)
    if source.chat is None:
        return read_documents(source, bad_rows=bad_rows)
    from torchtitan_clone.data.chat import read_chats

    return read_chats(source, bad_rows=bad_rows)


def read_batches(part: Part, *, limit: int) -> Iterator[tuple[list[Any], Label]]:
    """Yields documents for one process and their label; the last batch of a part is empty."""
    bad_rows = BadRows(limit=limit)
    documents = (_cut_end if part.cuts_end else _choose_by_hash)(part, bad_rows=bad_rows)
    bytes_read = 0
    while True:
        batch = list(_take_characters(documents, BATCH_CHARACTERS))
        held_out = np.array([is_validation for _, _, is_validation, _ in batch], dtype=bool)
        text_bytes = np.array([size for *_, size in batch], dtype=np.int64)
        bytes_read = batch[-1][1] if batch else bytes_read
        label = Label(part=part, held_out=held_out, text_bytes=text_bytes, bytes_read=bytes_read, bad_rows=bad_rows)
        yield [each.to_encode if isinstance(each, Rendered) else each for each, *_ in batch], label
        if not batch:
            return


def _choose_by_hash(part: Part, *, bad_rows: BadRows) -> Iterator[_LabelledDocument]:
    fraction = part.key.held_out_fraction
    for document, bytes_read in documents_of(part.source, has_ids=part.has_ids, bad_rows=bad_rows):
        content = content_of(document)
        is_validation = fraction > 0 and unit_hash(content) <= fraction
        yield document, bytes_read, is_validation, len(content) if isinstance(document, str) else 0


def _cut_end(part: Part, *, bad_rows: BadRows) -> Iterator[_LabelledDocument]:
    """Holds out the end of all documents together, of which one is cut, at a line end if it has one before."""
    counted = documents_of(part.source, has_ids=part.has_ids, bad_rows=BadRows(limit=bad_rows.limit))
    total = sum(len(document) for document, _ in counted)
    left = total - math.ceil(total * part.key.held_out_fraction)
    for document, bytes_read in documents_of(part.source, has_ids=part.has_ids, bad_rows=bad_rows):
        assert not isinstance(document, Rendered)
        cut = min(len(document), max(0, left))
        left -= len(document)
        if isinstance(document, str) and 0 < cut < len(document):
            cut = document.rfind("\n", 0, cut) + 1 or cut
        for half, is_validation in ((document[:cut], False), (document[cut:], True)):
            if len(half):
                yield half, bytes_read, is_validation, 0 if part.has_ids else len(content_of(half))


def _take_characters(documents: Iterator[_LabelledDocument], size: int) -> Iterator[_LabelledDocument]:
    while size > 0 and (document := next(documents, None)):
        size -= len(document[0])
        yield document
