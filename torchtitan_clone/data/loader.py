"""The loaders that a trainer reads: a rank's rows of each global batch, and the state to resume from."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context, resource_tracker
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.environment import STOP_SIGNALS
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.data.dataset import Dataset, RowChunk, RowReader, StreamPosition, StreamState, slice_of_rank
from torchtitan_clone.data.packing import Batch, pack
from torchtitan_clone.documents import DocumentError, Value
from torchtitan_clone.observe.by_source import Totals, scale_bytes

if TYPE_CHECKING:
    from torchtitan_clone.data.mixture_dataset import MixtureDataset
    from torchtitan_clone.data.predictions import ReadPredictions

logger = logging.getLogger("torchtitan_clone")

T = TypeVar("T")
MAX_SAMPLES = 1 << 62
GatherPositions = Callable[[list[StreamPosition]], Iterable[StreamPosition]]
LABELS = {
    "data": "the fingerprint of the data",
    "tokenizer": "the fingerprint of the tokenizer, which data.add_bos is part of,",
    "eos_id": "the id of the tokenizer's end-of-text token",
    "held_out_fraction": "data.held_out_fraction",
    "seq_len": "training.seq_len",
    "document_masking": "training.document_masking",
    "seed": "debug.seed",
    "teacher": "the digest of the teacher",
}
"""State that determines the order and content of the batches, and who predicts their targets, with the names used in
messages."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Which rows data-parallel rank `rank` reads and how they are packed, in training and in validation."""

    seq_len: int
    document_masking: bool
    """Restart positions at every document, and do not predict the first token of a document from the previous one."""
    mtp_depth: int = 0
    """Depths of multi-token prediction that the batches have targets for."""
    rank: int = 0
    num_ranks: int = 1
    token_indices: Tensor | None = None
    """Tokens of every sequence that this rank keeps (context parallelism); None keeps all."""
    routed_tokens: slice | None = None
    """Which of these tokens this rank's routers get (tensor parallelism); None: batches do not mark context."""


class Loader:
    """Endless iterator over a rank's shuffled training rows of each global batch.

    Each rank's batch is padded to the same multiple of local_batch_size. The state counts the batches that were
    committed, not what was read ahead. ConfigError if the dataset has no row, or num_workers exceeds a rank's rows.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        options: LoaderOptions,
        seed: int,
        global_batch_size: int,
        local_batch_size: int = 1,
        num_workers: int = 0,
        gather_positions: GatherPositions = lambda positions: positions,
        read_predictions: "ReadPredictions | None" = None,
        teacher: str | None = None,
    ) -> None:
        self._slice_of_replica = partial(
            slice_of_rank,
            options.rank,
            num_ranks=options.num_ranks,
            global_batch_size=global_batch_size,
            seq_len=options.seq_len,
            multiple_of=local_batch_size,
        )
        self._slice = self._slice_of_replica()
        if num_workers > (rows := len(self._slice.rows)):
            raise ConfigError(
                f"data.num_workers = {num_workers}: more than the {rows} sequences of a global batch that each rank "
                f"reads, which its workers divide among themselves; set it to at most {rows}."
            )
        self._mixture = _as_mixture(dataset)
        self._train_reader = partial(dataset.train_reader, seed=seed)
        pack_rows = partial(_pack, eos_id=dataset.identity.eos_id, options=options)
        self._read = partial(_read_batches, pack_rows=pack_rows, num_workers=num_workers)
        self._gather_positions = gather_positions
        self._read_predictions = read_predictions
        seq_len = options.seq_len if self._mixture is None else self._mixture.mixture.timeline.stages[0].seq_len
        order = {"seq_len": seq_len, "document_masking": options.document_masking, "seed": seed}
        self._order: dict[str, object] = asdict(dataset.identity) | order
        self._order |= {} if teacher is None else {"teacher": teacher}
        self._samples = 0
        self._streams: list[StreamState] = []
        self._uncollected: list[StreamPosition] = []
        self._batch: Batch | None = None
        self._ahead: tuple[Batch, list[StreamPosition]] | Exception | None = None
        """The batch after the current one or the error of reading it, if it has been read ahead."""
        self.stream_positions: list[StreamPosition] = []
        """Positions of this rank's streams after the current batch, as plain data; empty for local data."""
        self._batches = self._read_batches()

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        batch = self.next_batch()
        self.commit()
        return batch

    def next_batch(self, *, replica_index: int = 0, num_replicas: int = 1) -> Batch:
        """Returns the rank's rows of its replica group's slice of the next global batch; the same until `commit`."""
        batch_slice = self._slice_of_replica(replica_index=replica_index, num_replicas=num_replicas)
        if batch_slice != self._slice:
            assert not self._uncollected, "call state_dict before the number of replica groups changes"
            self._slice = batch_slice
            self._restart()
        if self._batch is None:
            ahead, self._ahead = self._ahead, None
            if isinstance(ahead, Exception):
                raise ahead
            self._batch, self.stream_positions = ahead or next(self._batches)
            if self._mixture is not None:
                samples = self.sample_range  # empty on a rank whose rows are all padding
                sources_B = self._mixture.mixture.locate(samples)[0] if samples else np.zeros(0, dtype=np.int64)
                self._batch = self._batch.with_groups(sources_B)
            if self._read_predictions is not None:
                self._batch = self._batch.with_predictions(*self._read_predictions(self.sample_range))
        return self._batch

    def read_ahead(self) -> float:
        """Reads the batch after the current one, while a GPU computes with that; returns the seconds that this took.

        An error is raised later, by the call of next_batch() that would return the batch.
        """
        start = time.perf_counter()
        if self._ahead is None:
            try:
                self._ahead = next(self._batches)
            except Exception as error:  # noqa: BLE001, the current batch is not affected
                self._ahead = error
        return time.perf_counter() - start

    @property
    def sample_range(self) -> range:
        """Samples of the current batch that this rank trains on."""
        first = self._first_sample + self._slice.rows.start
        return range(first, first + self._slice.counted)

    @property
    def next_batch_number(self) -> int | None:
        """Number of the next global batch in data.stages; None for a run without a mixture."""
        timeline = None if self._mixture is None else self._mixture.mixture.timeline
        return None if timeline is None else timeline.unskipped(timeline.batch_at(self._samples))

    @property
    def _first_sample(self) -> int:
        """First sample of the current global batch."""
        return self._samples if self._mixture is None else self._mixture.mixture.timeline.next_sample(self._samples)

    def source_progress(self) -> tuple[int | None, dict[str, int], dict[str, float]]:
        """Returns the number of the last global batch in data.stages, None without a mixture; the tokens trained of
        each source; and how often each local one was read."""
        if self._mixture is None:
            return None, {}, {}
        mixture = self._mixture.mixture
        tokens = dict(zip(mixture.names, mixture.tokens_before(self._samples), strict=True))
        return mixture.timeline.batch_at(self._samples) - 1, tokens, self._mixture.epochs_before(self._samples)

    def scale_bytes(self, by_source: Mapping[str, Totals]) -> dict[str, Totals]:
        """Returns the totals of the sources with the bytes of their text, see TokenStore.byte_scale."""
        return {} if self._mixture is None else scale_bytes(by_source, self._mixture.byte_scales("train"))

    def set_stream_positions(self, positions: list[StreamPosition]) -> None:
        """Records, after `commit`, the positions of this rank's streams in all replica groups."""
        self._uncollected = positions

    def commit(self) -> None:
        """Counts the current batch as consumed."""
        self._samples = self._first_sample + self._slice.global_batch_size
        self._uncollected = self.stream_positions
        self._batch = None

    def state_dict(self) -> dict[str, object]:
        """Returns plain data, the same on every rank; a collective over all ranks for hub data."""
        if self._uncollected:
            positions = self._gather_positions(self._uncollected)
            from torchtitan_clone.data.streaming import merge_positions

            self._streams = merge_positions(positions, num_rows=self._slice.global_batch_size)
            self._uncollected = []
        state: dict[str, object] = {"samples": self._samples, **self._order}
        if self._mixture is not None:
            state |= self._mixture.record(samples=self._samples)
        if self._streams:
            from torchtitan_clone.data.streaming import streams_to_plain

            state |= streams_to_plain(self._streams)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: bool) -> None:
        """Resumes after the samples that `state` counts, for any number of ranks, workers and any batch size.

        ConfigError if the state is damaged, or if the data, their order or the teacher differ from the state's, unless
        allow_change. A run may begin or cease to have a teacher.
        """
        try:
            samples = Value(state.get("samples"), where="samples").integer(high=MAX_SAMPLES)
            streams = _read_streams(state)
            changes = _find_mixture_changes(self._mixture, state=state, samples=samples)
            if self._mixture is not None:
                num_rows = self._slice.global_batch_size
                streams = self._mixture.streams_to_resume(state=state, streams=streams, num_rows=num_rows)
        except DocumentError as error:
            raise ConfigError(f"the position in the data that the checkpoint holds is damaged: {error}") from error
        changed = {key: value for key, value in self._order.items() if state.get(key) != value}
        if "teacher" not in state:
            changed.pop("teacher", None)
        report = [f"{LABELS[key]} was {toml_like(state.get(key))} and is {toml_like(changed[key])}" for key in changed]
        report += changes
        size = self._slice.global_batch_size
        if self._mixture is None and streams and len(streams[0].cursors) != size:
            report.append(f"training.global_batch_size was {len(streams[0].cursors)} and is {size}")
        if report and not allow_change:
            raise ConfigError(
                f"the checkpoint was trained on different batches: {'; '.join(report)}. Restore what changed, or set "
                "checkpoint.allow_data_change to true to resume with what is new."
            )
        if report:
            logger.warning("resuming after %s samples although %s", f"{samples:,}", "; ".join(report))
        self._samples = samples
        self._streams = [] if self._mixture is None and "data" in changed else streams
        self._restart()

    def _restart(self) -> None:
        self._uncollected = []
        self._batch = self._ahead = None
        self._batches = self._read_batches()

    def _read_batches(self) -> Iterator[tuple[Batch, list[StreamPosition]]]:
        reader = self._train_reader(self._slice, samples=self._samples, streams=self._streams)
        return self._read(reader)


class ValidationLoader:
    """Iterable over a rank's held-out rows; every iteration is one pass over all held-out documents.

    Pads the last global batch with rows without targets, to be full on all ranks. ConfigError without a held-out row.
    """

    def __init__(self, dataset: Dataset, *, options: LoaderOptions, global_batch_size: int) -> None:
        batch_slice = slice_of_rank(
            options.rank, num_ranks=options.num_ranks, global_batch_size=global_batch_size, seq_len=options.seq_len
        )
        mixture = _as_mixture(dataset)
        self._has_sources = mixture is not None
        self._byte_scales = {} if mixture is None else mixture.byte_scales("validation")
        self._held_out_rows = dataset.validation_reader(batch_slice)
        self._pack = partial(_pack, eos_id=dataset.identity.eos_id, options=options)

    def __iter__(self) -> Iterator[Batch]:
        for rows, padding, source in self._held_out_rows():
            batch = self._pack(rows, padding=padding)
            yield batch.with_groups(np.full(len(rows), source)) if self._has_sources else batch

    def scale_bytes(self, by_source: Mapping[str, Totals]) -> dict[str, Totals]:
        """Returns the totals of the sources with the bytes of their text, see TokenStore.byte_scale."""
        return scale_bytes(by_source, self._byte_scales)


def _as_mixture(dataset: Dataset) -> "MixtureDataset | None":
    """Returns the dataset if it is a mixture, whose module other runs do not import."""
    return cast("MixtureDataset", dataset) if dataset.is_mixture else None


def _read_streams(state: Mapping[str, Any]) -> list[StreamState]:
    """Returns the positions in hub datasets; DocumentError if they are damaged."""
    if not state.keys() & {"cursors", "streams"}:
        return []
    from torchtitan_clone.data.streaming import streams_from_plain

    return streams_from_plain(state)


def _find_mixture_changes(mixture: "MixtureDataset | None", *, state: Mapping[str, Any], samples: int) -> list[str]:
    """Returns in what the sources and stages differ from those of a state; DocumentError if it is damaged."""
    if mixture is None and not state.keys() & {"sources", "stages"}:
        return []
    from torchtitan_clone.data.mixture_dataset import find_data_changes

    return find_data_changes(mixture, state=state, samples=samples)


def _pack(rows: np.ndarray, *, eos_id: int, options: LoaderOptions, padding: int) -> Batch:
    choices = {"document_masking": options.document_masking, "mtp_depth": options.mtp_depth}
    batch = pack(rows, eos_id=eos_id, padding=padding, marks_context=options.routed_tokens is not None, **choices)
    if options.token_indices is not None:
        batch = batch.select_tokens(options.token_indices)
    if options.routed_tokens is not None:
        batch = batch.select_context(options.routed_tokens)
    return batch.pin_memory() if torch.cuda.is_available() else batch


def _read_batches(
    reader: RowReader, *, pack_rows: Callable[..., Batch], num_workers: int
) -> Iterator[tuple[Batch, list[StreamPosition]]]:
    batch_slice = reader.batch_slice
    num_workers = min(num_workers, len(batch_slice.rows))
    chunks = _start_reading(reader, num_workers=num_workers)
    while chunks_of_batch := list(islice(chunks, max(1, num_workers))):
        rows = np.concatenate([tokens for tokens, _ in chunks_of_batch])
        filler = np.repeat(rows[-1:], batch_slice.size - len(rows), axis=0)
        batch = pack_rows(np.concatenate([rows, filler]), padding=batch_slice.size - batch_slice.counted)
        yield batch, [position for _, positions in chunks_of_batch for position in positions]


def _start_reading(reader: RowReader, *, num_workers: int) -> Iterator[RowChunk]:
    if num_workers == 0:
        return iter(reader)
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital")  # torchdata causes it on every start
        loader = StatefulDataLoader(
            reader,
            batch_size=None,
            collate_fn=_identity,
            num_workers=num_workers,
            worker_init_fn=_init_worker,
            multiprocessing_context="spawn",  # a fork would copy torch's threads and CUDA
            generator=torch.Generator(),  # the workers' seed would come from the default one, whose state is saved
        )
    with _blocked_stop_signals():
        try:
            get_context("spawn").Lock()
        except OSError as error:
            raise ConfigError(
                f"data.num_workers = {num_workers}: worker processes share semaphores, which need a writable /dev/shm: "
                f"{error}; mount one, or set it to 0."
            ) from error
        return _raise_errors(iter(loader))


def _raise_errors(chunks: Iterator[RowChunk | ConfigError]) -> Iterator[RowChunk]:
    """Yields what workers read; raises an error that one of them found."""
    for chunk in chunks:
        if isinstance(chunk, ConfigError):
            raise chunk
        yield chunk


@contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """Blocks the stop signals in processes that start inside, until they can handle them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Training exits without teardown; the tracker then removes the workers' semaphores, and would warn of each run's.
    warnings_before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [warnings_before, "ignore:resource_tracker"]))
    resource_tracker.ensure_running()  # unblocks some of the signals when it starts
    if warnings_before is None:
        del os.environ["PYTHONWARNINGS"]
    else:
        os.environ["PYTHONWARNINGS"] = warnings_before
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _identity(value: T) -> T:
    """Keeps arrays as they are: as tensors they would need /dev/shm, which is small in containers."""
    return value


def _init_worker(worker: int) -> None:
    """Keeps a signal to the job from ending the workers while the trainer finishes its step."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # After SIGTERM a worker has 60 s until it exits, should its trainer not have ended it before.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
