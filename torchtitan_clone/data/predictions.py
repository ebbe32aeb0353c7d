"""Stored predictions: what a teacher takes for the most likely tokens, beside the tokens of a token store.

    <folder>/<key>/train.ids      ids of the K most likely tokens after each token of the split (uint16 or uint32)
                   train.values   their log-probabilities (float16 or float32)
                   meta.json      the teacher, the tokens and the rows that it has read

Both have one row for each token of the split, by its position there. A teacher sees no more than the row of a batch, so
that rows of other tokens have other predictions. The key is a hash of what determines the tokens.
Shapes: B rows, T tokens of a row (seq_len), K stored tokens.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.started import as_started
from torchtitan_clone.data.dataset import Dataset, TokenDataset
from torchtitan_clone.data.mixture_dataset import MixtureDataset
from torchtitan_clone.data.slices import map_numbers
from torchtitan_clone.data.token_store import META_FILE, TokenStore, commit, digest_of, dtype_of_ids
from torchtitan_clone.documents import DocumentError, read_json
from torchtitan_clone.files import write_atomically

FORMAT = 1
IDS_FILE, VALUES_FILE = "train.ids", "train.values"
DIGEST = "[0-9a-f]{64}"


@dataclass(frozen=True, kw_only=True)
class PredictedRows:
    """What the teacher has read, which the batches of a run must equal."""

    data: str
    """Fingerprint of the tokens, their marks and their packing."""
    tokenizer: str
    held_out_fraction: float
    tokens: int
    """Of the split."""
    vocab_size: int
    seq_len: int
    document_masking: bool
    temperature: float


@dataclass(frozen=True, kw_only=True)
class PredictionMeta(PredictedRows):
    """Content of meta.json."""

    format: int
    teacher: str
    """digest_of_weights() of it."""
    k: int
    dtype: str


def folder_of(folder: Path, store: TokenStore) -> Path:
    """Returns where the predictions for the tokens of a store are."""
    meta = store.meta
    return folder / digest_of([store.fingerprint, meta.tokenizer_fingerprint, meta.held_out_fraction])[:16]


def rows_for(
    store: TokenStore, *, vocab_size: int, seq_len: int, document_masking: bool, temperature: float
) -> PredictedRows:
    """Returns what a run with these options reads of a store."""
    return PredictedRows(
        data=store.fingerprint, tokenizer=store.meta.tokenizer_fingerprint, tokens=store.meta.tokens["train"],
        held_out_fraction=store.meta.held_out_fraction, vocab_size=vocab_size, seq_len=seq_len,
        document_masking=document_masking, temperature=temperature,
    )  # fmt: skip


# ---------------------------------------------------------------------- written


def begin_predictions(folder: Path, *, meta: PredictionMeta) -> None:
    """Makes the files of predictions, for PredictionWriter."""
    partial_folder = _partial(folder)
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    for name, dtype in _dtypes(meta).items():
        with (partial_folder / name).open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, meta.tokens * meta.k * dtype.itemsize))


class PredictionWriter:
    """Writes some of the predictions, while other processes write others."""

    def __init__(self, folder: Path, *, meta: PredictionMeta) -> None:
        shape = (meta.tokens, meta.k)
        names = _dtypes(meta).items()
        self._files = [np.memmap(_partial(folder) / name, dtype=dtype, mode="r+", shape=shape) for name, dtype in names]

    def write(self, positions: np.ndarray, *, ids: np.ndarray, values: np.ndarray) -> None:
        """Writes ids and values [N, K] of the tokens at these positions [N]; -1 is left out."""
        for file, content in zip(self._files, (ids, values), strict=True):
            file[positions[positions >= 0]] = content[positions >= 0]

    def close(self) -> None:
        """Flushes what was written to disk."""
        for file in self._files:
            file.flush()


def finish_predictions(folder: Path, *, meta: PredictionMeta) -> None:
    """Gives the files, which are complete, the name under which runs find them."""
    partial_folder = _partial(folder)
    write_atomically(partial_folder / META_FILE, json.dumps(asdict(meta), indent=2).encode())
    commit(partial_folder, folder)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _dtypes(meta: PredictionMeta) -> dict[str, np.dtype]:
    return {IDS_FILE: np.dtype(dtype_of_ids(meta.vocab_size)), VALUES_FILE: np.dtype(meta.dtype)}


# ---------------------------------------------------------------------- read


@dataclass(frozen=True, kw_only=True)
class PredictionStore:
    """Complete predictions for the tokens of a store."""

    folder: Path
    meta: PredictionMeta

    @cached_property
    def _files(self) -> list[np.ndarray]:
        names = _dtypes(self.meta).items()
        return [map_numbers(self.folder / name, dtype=str(dtype)).reshape(-1, self.meta.k) for name, dtype in names]

    def read(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and log-probabilities [*, K]; ConfigError if they are damaged."""
        ids, values = (file[positions] for file in self._files)
        if ids.max() >= self.meta.vocab_size or not values.max() <= 0:
            reason = "it holds an id or a log-probability that no teacher has"
            raise ConfigError(f"the predictions {self.folder} are corrupt ({reason}); delete them and write them again")
        return ids, values


def open_predictions(folder: Path, *, rows: PredictedRows) -> PredictionStore:
    """Opens the predictions for these rows; ConfigError if there are none, or those of others."""
    remedy = as_started("write them with scripts/store_predictions.py and the options of the run")
    option = f"distillation.store = {shown(str(folder.parent))}"
    if not folder.is_dir():
        others = (_find_changes(meta, rows=rows) for meta in _read_metas(folder.parent))
        nearest = "; ".join(min(others, key=len, default=[]))
        found = f"it has none for these tokens{nearest and f', and the nearest are for {nearest}'}"
        found = "it was not written to its end" if _partial(folder).exists() else found
        raise ConfigError(f"{option}: {found}; {remedy}.")
    try:
        meta = _read_meta(folder / META_FILE)
        for name, dtype in _dtypes(meta).items():
            if (size := (folder / name).stat().st_size) != meta.tokens * meta.k * dtype.itemsize:
                raise DocumentError(f"{name} has {size:,} bytes, not {meta.tokens * meta.k * dtype.itemsize:,}")
    except (OSError, DocumentError) as error:
        raise ConfigError(f"{option}: {folder.name} is corrupt ({error}); delete it, and {remedy}.") from error
    if changes := _find_changes(meta, rows=rows):
        remedy = f"restore what changed, or set distillation.store to another folder and {remedy}"
        raise ConfigError(f"{option}: its predictions are for {'; '.join(changes)}; {remedy}.")
    return PredictionStore(folder=folder, meta=meta)


def _find_changes(meta: PredictionMeta, *, rows: PredictedRows) -> list[str]:
    """Returns what rows have otherwise than those of predictions; the fingerprint of tokens has their packing."""
    return [
        f"{name} {shown(getattr(meta, name))}, and this run has {shown(value)}"
        for name, value in asdict(rows).items()
        if getattr(meta, name) != value
    ]


def teachers_of(folder: Path) -> list[str]:
    """Returns the digests of the teachers of all predictions in a folder, without those that are damaged."""
    return sorted({meta.teacher for meta in _read_metas(folder)})


def _read_metas(folder: Path) -> Iterator[PredictionMeta]:
    for path in sorted(folder.glob(f"*/{META_FILE}")):
        with suppress(OSError, DocumentError):
            yield _read_meta(path)


def _read_meta(path: Path) -> PredictionMeta:
    table = read_json(path).table(*(field.name for field in fields(PredictionMeta)))
    return PredictionMeta(
        format=table["format"].integer(low=FORMAT, high=FORMAT),
        teacher=table["teacher"].text(pattern=DIGEST),
        data=table["data"].text(),
        tokenizer=table["tokenizer"].text(),
        held_out_fraction=table["held_out_fraction"].number(low=0, high=1),
        vocab_size=(vocab_size := table["vocab_size"].integer(low=1)),
        seq_len=table["seq_len"].integer(low=1),
        document_masking=table["document_masking"].flag(),
        temperature=table["temperature"].number(low=0),
        k=table["k"].integer(low=1, high=vocab_size),
        dtype=table["dtype"].choice("float16", "float32"),
        tokens=table["tokens"].integer(),
    )


ReadPredictions = Callable[[range], tuple[np.ndarray, np.ndarray]]
"""Returns ids and log-probabilities [B, K, T] for samples."""


def prediction_reader(
    folder: Path, dataset: Dataset, *, seq_len: int, seed: int, document_masking: bool, temperature: float,
    vocab_size: int, tokens: np.ndarray | None,
) -> tuple[ReadPredictions, str]:  # fmt: skip
    """Opens the predictions for a dataset; ConfigError if some are missing. `tokens` are those of each row to read.

    Also returns what tells the teachers and what is stored of them from others.
    """
    sources = dataset.sources if isinstance(dataset, MixtureDataset) else {"": dataset}
    opened: list[tuple[TokenDataset, PredictionStore]] = []
    for name, source in sources.items():
        if not isinstance(source, TokenDataset):
            rule = f"the documents of {name or 'training.dataset'} are streamed, and have no stored predictions"
            raise ConfigError(f"distillation.store = {shown(str(folder))}: {rule}; set distillation.teacher_path.")
        options = {"vocab_size": vocab_size, "document_masking": document_masking, "temperature": temperature}
        rows = rows_for(source.store, seq_len=seq_len, **options)
        opened.append((source, open_predictions(folder_of(folder, source.store), rows=rows)))
    if len(sizes := {predictions.meta.k for _, predictions in opened}) > 1:
        rule = f"its sources have {' and '.join(map(str, sorted(sizes)))} tokens at each position"
        raise ConfigError(f"distillation.store = {shown(str(folder))}: {rule}; write all with the same --k.")
    readers = [partial(_read, *each, seq_len=seq_len, seed=seed, tokens=tokens) for each in opened]
    k = sizes.pop()

    def read(samples: range) -> tuple[np.ndarray, np.ndarray]:
        uses = np.arange(samples.start, samples.stop)
        indices = np.zeros(len(samples), dtype=np.int64)
        if isinstance(dataset, MixtureDataset) and samples:
            indices, uses = dataset.mixture.locate(samples)
        shape = (len(samples), k, seq_len if tokens is None else len(tokens))
        ids, values = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
        for index in np.unique(indices).tolist():
            chosen = indices == index
            ids[chosen], values[chosen] = readers[index](uses[chosen])
        return ids, values

    metas = [predictions.meta for _, predictions in opened]
    return read, " and ".join(sorted({f"{meta.teacher[:16]} with {meta.k} in {meta.dtype}" for meta in metas}))


def _read(
    source: TokenDataset, predictions: PredictionStore, uses: np.ndarray, *, seq_len: int, seed: int,
    tokens: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    positions = source.train_positions(uses, seq_len=seq_len, seed=seed)
    positions = positions if tokens is None else positions[:, tokens]
    ids, values = predictions.read(np.maximum(positions, 0))  # padding has no target
    return ids.swapaxes(1, 2), values.swapaxes(1, 2)
