"""Drops documents that occur before in the same source, or in an earlier one of a mixture.

    <store>/hashes/{train,validation}.hashes           hash of the tokens of each document (16 bytes)
    <store>/unique-<id>/{train,validation}.offsets     start of each kept document, and the end of the last (int64)
                        {train,validation}.runs        where each run is among the kept tokens and in the store (int64)

A *run* is consecutive documents that are kept; the last entry is the number of kept tokens. The tokens stay in the
store, which runs with and without duplicates share. The id identifies the stores of the earlier sources. Documents are
compared by their tokens, so that text and token ids can be. The training split of a source comes before its other one.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.data.marks import ids_of
from torchtitan_clone.data.slices import Tokens, load_slices, map_bytes
from torchtitan_clone.data.token_store import (
    Split,
    TokenStore,
    build_once,
    check_documents,
    corrupt_store_error,
    digest_of,
)
from torchtitan_clone.documents import DocumentError
from torchtitan_clone.files import write_atomically

logger = logging.getLogger("torchtitan_clone")

HASH_BYTES = 16
_CHUNK_TOKENS = 1 << 24
COMPARED_AT_ONCE = 1 << 22
"""Documents whose hashes are in memory at once, with about 60 bytes each."""


class KeptTokens:
    """The tokens of the documents that are kept, as one array that is read in slices."""

    def __init__(self, tokens: Tokens, *, runs: np.ndarray) -> None:
        self._tokens = tokens
        self._positions, self._starts = runs.T
        self.dtype = tokens.dtype

    def __len__(self) -> int:
        return int(self._positions[-1])

    def __getitem__(self, positions: slice) -> np.ndarray:
        start, stop, _ = positions.indices(len(self))
        slices = [self._tokens[begin:end] for begin, end in self._places(start, stop)]
        return slices[0] if len(slices) == 1 else np.concatenate([np.empty(0, dtype=self.dtype), *slices])

    def load(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Fetches slices at once, see load_slices()."""
        load_slices(self._tokens, [place for start, stop in bounds for place in self._places(start, stop)])

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the slices of all tokens that a slice of the kept ones consists of."""
        first = int(np.searchsorted(self._positions, start, side="right")) - 1
        last = int(np.searchsorted(self._positions, stop, side="left"))
        begins, ends = self._positions[first:last].tolist(), self._positions[first + 1 : last + 1].tolist()
        for begin, end, place in zip(begins, ends, self._starts[first:last].tolist(), strict=True):
            yield place + max(start, begin) - begin, place + min(stop, end) - begin


@dataclass(frozen=True, kw_only=True)
class UniqueStore(TokenStore):
    """A store without duplicates: `folder` says which documents of `base` are kept."""

    base: TokenStore

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint} {self.folder.name}"

    def tokens(self, split: Split) -> KeptTokens:
        return KeptTokens(self.base.tokens(split), runs=self._runs(split))

    def _runs(self, split: Split) -> np.ndarray:
        numbers = self._map(f"{split}.runs", dtype="int64")
        if len(numbers) % 2:
            raise DocumentError(f"{split}.runs has a position without its place in the store")
        return numbers.reshape(-1, 2)

    def check(self) -> None:
        """DocumentError if the files are not those of the base."""
        for split in get_args(Split):
            runs, size = self._runs(split), len(self.base.tokens(split))
            lengths = np.diff(runs[:, 0])
            if not len(runs) or runs[0, 0] or not ((lengths > 0) & (runs[:-1, 1] >= 0)).all():
                raise DocumentError(f"{split}.runs does not increase from 0")
            if (runs[:-1, 1] > size - lengths).any():
                raise DocumentError(f"{split}.runs exceeds the {size:,} tokens of the store")
            check_documents(self, split)


def drop_duplicates(stores: Mapping[str, TokenStore]) -> dict[str, TokenStore]:
    """Returns the stores without documents that occur before in the same or an earlier one; compares them if needed.

    ConfigError if nothing is left of one, or if the result is damaged or cannot be written.
    """
    unique: dict[str, TokenStore] = {}
    earlier: list[TokenStore] = []
    for name, store in stores.items():
        earlier.append(store)
        folder = store.folder / f"unique-{digest_of([each.folder.name for each in earlier[:-1]])[:16]}"
        try:
            if not folder.exists():
                hashes = [each for store in earlier for each in _open_hashes(store)]  # takes the lock of each store
                build_once(folder, name=store.meta.source, build=partial(_write_kept, store=store, hashes=hashes))
            unique[name] = _open_unique(store, folder=folder)
            if store.meta.documents["train"] and not unique[name].meta.documents["train"]:
                rule = f"data.drop_duplicates leaves none of its {store.meta.documents['train']:,} training documents"
                raise ConfigError(f"data.sources, name {shown(name)}: {rule}; remove the source, or set it to false.")
        except DocumentError as error:
            raise corrupt_store_error(folder, reason=str(error)) from error
        except OSError as error:
            remedy = "set it to false, or data.cache_folder to a folder that can be written"
            raise ConfigError(f"data.drop_duplicates = true: {folder} failed: {error}; {remedy}.") from error
    return unique


def _open_unique(store: TokenStore, *, folder: Path) -> UniqueStore:
    unique = UniqueStore(folder=folder, meta=store.meta, packing=store.packing, remote=store.remote, base=store)
    unique.check()
    offsets = {split: unique.offsets(split) for split in get_args(Split)}
    tokens = {split: int(each[-1]) for split, each in offsets.items()}
    documents = {split: len(each) - 1 for split, each in offsets.items()}
    return replace(unique, meta=replace(store.meta, tokens=tokens, documents=documents))


def _write_kept(folder: Path, *, store: TokenStore, hashes: Sequence[np.ndarray]) -> None:
    """Writes which documents of a store are the first with their hash; its splits are the last of the hashes."""
    splits = get_args(Split)
    dropped_tokens = 0
    kept = find_first(hashes)[-len(splits) :]
    for split, is_kept in zip(splits, kept, strict=True):
        offsets = store.offsets(split)
        kept_offsets = np.concatenate([[0], np.cumsum(np.diff(offsets)[is_kept])]).astype(np.int64)
        begins = np.flatnonzero(is_kept & ~np.concatenate([[False], is_kept[:-1]]))
        positions = kept_offsets[np.cumsum(is_kept)[begins] - 1]
        runs = np.stack([np.append(positions, kept_offsets[-1]), np.append(offsets[begins], 0)], axis=1)
        write_atomically(folder / f"{split}.offsets", kept_offsets.tobytes())
        write_atomically(folder / f"{split}.runs", runs.astype(np.int64).tobytes())
        dropped_tokens += int(offsets[-1] - kept_offsets[-1])
    logger.info(
        "dropped %s of %s documents of %s (%.2f %% of the tokens), which it or an earlier source has before",
        f"{sum(int(np.count_nonzero(~each)) for each in kept):,}",
        *(f"{sum(map(len, kept)):,}", store.meta.source),
        100 * dropped_tokens / max(1, sum(store.meta.tokens.values())),
    )


def _open_hashes(store: TokenStore) -> list[np.ndarray]:
    """Returns the hashes of the documents of each split, as uint64 [documents, 2]."""
    folder = store.folder / "hashes"
    build_once(folder, name=store.meta.source, build=partial(_write_hashes, store=store))
    contents = [map_bytes(folder / f"{split}.hashes", follow_links=False) for split in get_args(Split)]
    for split, hashes in zip(get_args(Split), contents, strict=True):
        if len(hashes) != HASH_BYTES * store.meta.documents[split]:
            raise DocumentError(f"{folder / f'{split}.hashes'} has {len(hashes):,} bytes, not 16 for each document")
    return [hashes.view(np.uint64).reshape(-1, 2) for hashes in contents]


def _write_hashes(folder: Path, *, store: TokenStore) -> None:
    for split in get_args(Split):
        with (folder / f"{split}.hashes").open("wb") as file:
            file.writelines(_hash_documents(store, split))
            file.flush()
            os.fsync(file.fileno())


def _hash_documents(store: TokenStore, split: Split) -> Iterator[bytes]:
    tokens = store.tokens(split)
    for start, stop in pairwise(store.offsets(split)):
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        for place in range(start, stop, _CHUNK_TOKENS):
            chunk = tokens[place : min(stop, place + _CHUNK_TOKENS)]
            digest.update(np.ascontiguousarray(ids_of(chunk), dtype=store.dtype).data)
        yield digest.digest()


def find_first(hashes: Sequence[np.ndarray], *, at_once: int = COMPARED_AT_ONCE) -> list[np.ndarray]:
    """Returns for each hash of several lists, uint64 [documents, 2], whether no equal one comes before it."""
    are_first = [np.zeros(len(each), dtype=bool) for each in hashes]
    passes = max(1, -(-sum(map(len, hashes)) // at_once))
    for number in range(passes):
        chosen = [np.flatnonzero(each[:, 0] % passes == number) for each in hashes]
        compared = np.concatenate([each[indices] for each, indices in zip(hashes, chosen, strict=True)])
        order = np.lexsort(compared.T)  # stable
        is_first = np.ones(len(order), dtype=bool)
        is_first[order[1:]] = (compared[order[1:]] != compared[order[:-1]]).any(axis=1)
        ends = np.cumsum([len(indices) for indices in chosen])
        for flags, indices, each in zip(are_first, chosen, np.split(is_first, ends[:-1]), strict=True):
            flags[indices] = each
    return are_first
