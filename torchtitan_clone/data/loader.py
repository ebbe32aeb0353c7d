"""What a trainer sees of the data: a loader that gives a rank its rows of each global batch, and its state."""

import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Data, Training
from torchtitan_clone.data.packing import Batch, pack
from torchtitan_clone.data.row_reader import BatchSlice, Note, RowReader, slice_of_rank
from torchtitan_clone.data.sources import find_source, hub_id
from torchtitan_clone.data.streaming import HubDataset, merge_positions, open_hub
from torchtitan_clone.data.token_dataset import TokenDataset
from torchtitan_clone.data.token_store import prepare_store
from torchtitan_clone.data.tokenizer import Tokenizer

logger = logging.getLogger("torchtitan_clone")

Dataset = TokenDataset | HubDataset
AllGatherObject = Callable[[Any], list[Any]]

WORKER_GRACE_SECONDS = 60
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Those that a cluster sends to all processes of a job, and a terminal to all in front."""
POSITION_KEYS = ("cursors", "bookmark")
LABELS = {
    "data": "the fingerprint of the data",
    "tokenizer": "the fingerprint of the tokenizer",
    "eos_id": "the id of the tokenizer's end-of-text token",
    "held_out_fraction": "data.held_out_fraction",
    "seq_len": "training.seq_len",
    "document_masking": "training.document_masking",
    "seed": "debug.seed",
}


def _alone(value: Any) -> list[Any]:
    return [value]


def open_dataset(*, training: Training, data: Data, tokenizer: Tokenizer) -> Dataset:
    """The data that the options name. Local files are tokenized first where that has not happened before.

    Call it before process groups start, see prepare_store. ConfigError where the data cannot be used.
    """
    if dataset := hub_id(training):
        return open_hub(dataset, training=training, data=data, tokenizer=tokenizer)
    return TokenDataset(store=prepare_store(find_source(training), tokenizer=tokenizer, data=data))


@overload
def build_loader(*, split: Literal["train"], **options: Any) -> "Loader":
    """Rows to train on, shuffled, without end."""


@overload
def build_loader(*, split: Literal["validation"], **options: Any) -> "ValidationLoader":
    """Held-out rows, in order."""


def build_loader(  # pyright: ignore[reportInconsistentOverload]  (the overloads leave the options to this signature)
    *,
    dataset: Dataset,
    split: Literal["train", "validation"],
    seq_len: int,
    document_masking: bool,
    seed: int,
    global_batch_size: int,
    rank: int,
    num_ranks: int,
    local_batch_size: int = 1,
    num_workers: int = 0,
    all_gather_object: AllGatherObject = _alone,
    tokens: Tensor | None = None,
) -> "Loader | ValidationLoader":
    """The rows of one of num_ranks data-parallel ranks; with `tokens` only the tokens at these places of every row.

    Where the ranks' rows do not come out even, they are filled up to a multiple of local_batch_size.
    `all_gather_object` collects an object from every rank, for the state of hub data with more than one of them.
    Validation reads in this process, whatever num_workers is.
    """
    slice_of_part = partial(
        slice_of_rank,
        rank,
        num_ranks=num_ranks,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        multiple=local_batch_size,
    )
    share = slice_of_part()
    packer = _Packer(eos_id=dataset.identity["eos_id"], document_masking=document_masking, tokens=tokens)
    if split == "validation":
        return ValidationLoader(dataset, share=share, packer=packer)
    if num_workers > len(share.rows):
        raise ConfigError(
            f"data.num_workers = {num_workers} is more than the {len(share.rows)} rows a rank takes of each batch, "
            f"which its workers divide among them; set it to {len(share.rows)} or less"
        )
    return Loader(
        dataset,
        slice_of_part=slice_of_part,
        packer=packer,
        seed=seed,
        num_workers=num_workers,
        all_gather_object=all_gather_object,
    )


class Loader:
    """Endless iterator over a rank's rows of one global batch after another.

    Its state is what has been taken out of it and done with, not what it or its workers have read ahead.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        slice_of_part: Callable[..., BatchSlice],
        packer: "_Packer",
        seed: int,
        num_workers: int,
        all_gather_object: AllGatherObject,
    ) -> None:
        self._dataset = dataset
        self._share_of_part = slice_of_part
        self._division = {"part": 0, "parts": 1}
        self._seed = seed
        self._num_workers = num_workers
        self._all_gather_object = all_gather_object
        self._packer = packer
        self._restart(samples=0, position={})
        self._order = {
            **dataset.identity,
            "seq_len": self._share.seq_len,
            "document_masking": packer.document_masking,
            "seed": seed,
        }

    def _restart(self, *, samples: int, position: Mapping[str, Any]) -> None:
        self._samples = samples
        self._position = position
        self._notes: list[Note] = []
        self._batch: Batch | None = None
        self._share = self._share_of_part(**self._division)
        self._feed = self._dataset.train_reader(self._share, seed=self._seed, samples=samples, position=position)
        self._pieces: Iterator[tuple[np.ndarray, Note]] | None = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        batch = self.take()
        self.advance()
        return batch

    def take(self, *, part: int = 0, parts: int = 1) -> Batch:
        """The rank's rows of the next global batch, which is divided into `parts` parts; the same until `advance`."""
        if self._division != {"part": part, "parts": parts}:
            assert not self._notes, "where all parts of the batch are must be known: call state_dict before"
            self._division = {"part": part, "parts": parts}
            self._restart(samples=self._samples, position=self._position)
        if self._batch is None:
            self._batch = self._read()
        return self._batch

    @property
    def taken(self) -> range:
        """The samples of the batch that was taken."""
        first = self._samples + self._share.rows.start
        return range(first, first + self._share.counted)

    @property
    def notes(self) -> list[Note]:
        """How far this rank's rows of the batch that was taken reach into hub data; nothing for other data."""
        return self._notes_of_batch

    def set_stream_positions(self, notes: list[Note]) -> None:
        """After `advance`: these are the notes of this rank in all parts into which the batch was divided."""
        self._notes = notes

    def advance(self) -> None:
        """Be done with the batch that was taken."""
        self._samples += self._share.global_batch_size
        self._notes = self._notes_of_batch
        self._batch = None

    def _read(self) -> Batch:
        num_workers = min(self._num_workers, len(self._share.rows))
        if self._pieces is None:
            self._pieces = _start(self._feed, num_workers=num_workers)
        pieces = [next(self._pieces) for _ in range(max(1, num_workers))]
        self._notes_of_batch = [note for _, note in pieces if note is not None]
        rows = np.concatenate([tokens for tokens, _ in pieces])
        filler = np.repeat(rows[-1:], self._share.size - len(rows), axis=0)
        return self._packer.pack(np.concatenate([rows, filler]), padding=self._share.size - self._share.counted)

    def state_dict(self) -> dict[str, Any]:
        """Plain data that is the same on every rank; for hub data all ranks must call this together."""
        if self._notes:
            notes_of_ranks = self._all_gather_object(self._notes)
            self._position = merge_positions(note for notes in notes_of_ranks for note in notes)
            self._notes = []
        return {"samples": self._samples, **self._order, **self._position}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: bool) -> None:
        """Go on behind the samples that `state` counts, whichever ranks, workers and batch size counted them.

        ConfigError where the data or their order are not the state's, unless allow_change.
        """
        position = {key: state[key] for key in POSITION_KEYS if key in state}
        changes = [key for key, value in self._order.items() if state.get(key) != value]
        report = [f"{LABELS[key]} was {state.get(key)} and is {self._order[key]}" for key in changes]
        if position and len(position["cursors"]) != self._share.global_batch_size:
            streams = len(position["cursors"])
            report.append(f"training.global_batch_size was {streams} and is {self._share.global_batch_size}")
        if report and not allow_change:
            raise ConfigError(
                f"the checkpoint was trained on other batches: {'; '.join(report)}. Put this back, "
                "or set checkpoint.allow_data_change = true to go on with what is set now"
            )
        if report:
            logger.warning("going on after %s samples although %s", f"{state['samples']:,}", "; ".join(report))
        self._restart(samples=state["samples"], position={} if "data" in changes else position)


class ValidationLoader:
    """A rank's rows of the held-out documents; every iteration is one pass over all of them.

    The last global batch is filled up with rows without targets, so that all ranks have equally many batches.
    """

    def __init__(self, dataset: Dataset, *, share: BatchSlice, packer: "_Packer") -> None:
        self._feed = dataset.validation_reader(share)
        self._packer = packer

    def __len__(self) -> int:
        """Batches of one pass; TypeError for hub data, which has to be read to know."""
        return len(self._feed)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        for tokens, padding in self._feed:
            yield self._packer.pack(tokens, padding=padding)


class _Packer:
    """Packs rows, into pinned memory where there is a GPU."""

    def __init__(self, *, eos_id: int, document_masking: bool, tokens: Tensor | None) -> None:
        self.document_masking = document_masking
        self._eos_id, self._tokens = eos_id, tokens
        self._pin = torch.cuda.is_available()

    def pack(self, rows: np.ndarray, *, padding: int = 0) -> Batch:
        batch = pack(rows, eos_id=self._eos_id, document_masking=self.document_masking, padding=padding)
        batch = batch if self._tokens is None else batch.tokens_at(self._tokens)
        return batch.pin_memory() if self._pin else batch


def _start(feed: RowReader, *, num_workers: int) -> Iterator[tuple[np.ndarray, Note]]:
    """Read the feed here, or in processes that take turns to deliver their part of a batch."""
    if num_workers == 0:
        return iter(feed)
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital")  # torchdata's own, on every start
        loader = StatefulDataLoader(
            feed,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            worker_init_fn=_prepare_worker,
            multiprocessing_context="spawn",  # a fork would copy torch's threads and CUDA
        )
    with _signals_held_back():
        return iter(loader)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Processes started inside get no signal before they can answer it; here it arrives afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # lets some of them through when it has started
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _unchanged(part: Any) -> Any:
    """Keeps arrays out of torch's hands: as tensors they would need /dev/shm, which is small in containers."""
    return part


def _prepare_worker(worker: int) -> None:
    """A signal to the whole job must not take the workers from a trainer that wants to finish its step."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_GRACE_SECONDS))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
