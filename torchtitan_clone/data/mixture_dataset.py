"""Reads the rows of a mixture: each from the source that the order of its samples gives it.

A local source is read by the number of its use. A source of the Hugging Face hub has one stream for each row of the
global batch, as without a mixture: row r takes its next tokens from stream r, and a rank reads its own streams only.

Shapes: B rows, T tokens of a row (seq_len).
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.row_reader import (
    BatchSlice,
    DatasetIdentity,
    HeldOutRows,
    RowChunk,
    RowReader,
    StreamPosition,
    StreamState,
    slice_of_rank,
)
from torchtitan_clone.data.streaming import HubDataset, HubStreams, merge_positions, start_of_streams
from torchtitan_clone.data.token_dataset import TokenDataset
from torchtitan_clone.data.token_store import Split

logger = logging.getLogger("torchtitan_clone")

Source = TokenDataset | HubDataset


@dataclass(frozen=True, kw_only=True)
class MixtureDataset:
    """The sources of a mixture by name, in the order of its configuration. Can be pickled."""

    mixture: Mixture
    sources: Mapping[str, Source]
    max_epochs: Mapping[str, float]
    """Limits of the sources that have one."""
    counted_rows: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Rows of the local sources by name and seq_len, of those that were asked for."""

    @property
    def identity(self) -> DatasetIdentity:
        """That of the first source, so that a run without a mixture may continue with one."""
        return next(iter(self.sources.values())).identity

    def train_reader(
        self, batch_slice: BatchSlice, *, seed: int, samples: int, streams: list[StreamState]
    ) -> RowReader:
        read = partial(self._read_train, batch_slice=batch_slice, seed=seed, samples=samples, streams=streams)
        return RowReader(batch_slice, read=read)

    def validation_reader(self, batch_slice: BatchSlice) -> HeldOutRows:
        """Returns a reader of global batches of one source each, which the sources take in turn.

        Leaves out the sources that have no row, with a warning; ConfigError if all have none.
        """
        readers: list[tuple[int, HeldOutRows]] = []
        errors: list[str] = []
        for index, (name, source) in enumerate(self.sources.items()):
            try:
                readers.append((index, source.validation_reader(batch_slice)))
            except ConfigError as error:
                errors.append(f"data.sources, name {shown(name)}: {error}")
        if not readers:
            raise ConfigError(errors)
        for message in errors:
            _warn_once(message)
        return partial(_read_in_turn, readers)

    def read_batch(self, batch: int, *, seed: int) -> list[tuple[str, np.ndarray | None]]:
        """Returns source and tokens [T + 1] of each row of a global batch; None: of a stream, which has no numbers."""
        timeline, names = self.mixture.timeline, list(self.sources)
        stage = timeline.stages[timeline.stage_index(batch=batch)]
        first = timeline.first_sample(batch=batch)
        indices, uses = self.mixture.locate(range(first, first + stage.global_batch_size))
        found: list[tuple[str, np.ndarray | None]] = [(names[index], None) for index in indices.tolist()]
        for index in np.unique(indices).tolist():
            source = self.sources[names[index]]
            if isinstance(source, TokenDataset):
                chosen = np.flatnonzero(indices == index)
                rows = source.train_rows(seq_len=stage.seq_len, seed=seed)(uses[chosen])
                for place, row in zip(chosen.tolist(), rows, strict=True):
                    found[place] = names[index], row
        return found

    def epochs_before(self, sample: int) -> dict[str, float]:
        """Returns how many times each local source was read before a sample."""
        return {name: sum(epochs) for name, epochs in self.epochs_by_stage(sample).items()}

    def epochs_by_stage(self, sample: int) -> dict[str, list[float]]:
        """Returns for each local source how many times each stage read it before a sample."""
        uses = self.mixture.uses_by_stage(sample)
        lengths = [stage.seq_len for stage in self.mixture.timeline.stages]
        return {
            name: [
                rows / self._num_rows(name, seq_len=seq_len) if rows else 0.0
                for rows, seq_len in zip(uses[:, index].tolist(), lengths, strict=True)
            ]
            for index, (name, source) in enumerate(self.sources.items())
            if isinstance(source, TokenDataset)
        }

    def byte_scales(self, split: Split) -> dict[str, float]:
        """Returns what the bytes of each local source's tokens are multiplied with, see TokenStore.byte_scale."""
        sources = self.sources.items()
        return {name: source.store.byte_scale(split) for name, source in sources if isinstance(source, TokenDataset)}

    def _num_rows(self, name: str, *, seq_len: int) -> int:
        """Returns the rows of a local source; ConfigError if there is none."""
        source = self.sources[name]
        if (name, seq_len) not in self.counted_rows and isinstance(source, TokenDataset):
            try:
                self.counted_rows[name, seq_len] = source.num_rows("train", seq_len=seq_len)
            except ConfigError as error:
                raise ConfigError(f"data.sources, name {shown(name)}: {error}") from error
        return self.counted_rows[name, seq_len]

    def check(self, *, steps: int) -> None:
        """Checks that no source is read more often than its limit; ConfigError, also if one has no row."""
        timeline = self.mixture.timeline
        end = timeline.first_sample(batch=timeline.batch_of_step(steps) + 1)
        epochs = self.epochs_before(end)
        found = [
            f"data.sources, name {shown(name)}: would be read {epochs[name]:.3g} times in {steps:,} steps, and "
            f"max_epochs is {limit:g}; {self._remedy(name, factor=limit / epochs[name])}, or raise max_epochs."
            for name, limit in self.max_epochs.items()
            if epochs[name] > limit
        ]
        if found:
            raise ConfigError(found)

    def _remedy(self, name: str, *, factor: float) -> str:
        """Says how to use `factor` times the rows of a source."""
        stages = self.mixture.timeline.stages
        weights = stages[0].weights
        others = sum(weights.values()) - weights[name]
        if len(stages) > 1:
            return f"lower its weight in each stage, to {_round_down(factor):g} of its share"
        if not others:
            return "lower training.steps"
        share = factor * weights[name] / (others + weights[name])
        return f"lower its weight to {_round_down(share * others / (1 - share)):g}"

    def _read_train(
        self, rows: range, *, batch_slice: BatchSlice, seed: int, samples: int, streams: list[StreamState]
    ) -> Iterator[RowChunk]:
        """Yields the rows of each batch up to the end of the phase, whose batches have the shape of the slice."""
        timeline = self.mixture.timeline
        batch = timeline.batch_at(samples)
        phase = timeline.phase_stage(batch=timeline.unskipped(batch))
        while batch < phase.first_batch:  # the batches passed over begin in an earlier phase, of another shape
            before = timeline.phase_stage(batch=batch)
            size = before.global_batch_size
            whole = slice_of_rank(0, num_ranks=1, global_batch_size=size, seq_len=before.seq_len)
            read = _Reader(self, rows=whole.rows, batch_slice=whole, seed=seed, streams=streams)
            end = timeline.end_of_phase(batch=batch)
            read.pass_over(range(batch, end))
            batch, streams = end, merge_positions(read.positions(), num_rows=size)
        read = _Reader(self, rows=rows, batch_slice=batch_slice, seed=seed, streams=streams)
        while timeline.phase_stage(batch=(wanted := timeline.unskipped(batch))) is phase:
            read.pass_over(range(batch, wanted))
            yield read(timeline.first_sample(batch=wanted)), read.positions()
            batch = wanted + 1


def _round_down(value: float) -> float:
    """Rounds down to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.floor(value / unit) * unit


@cache  # the loaders are opened once to check them
def _warn_once(message: str) -> None:
    logger.warning("a source is left out of validation: %s", message)


def _read_in_turn(readers: list[tuple[int, HeldOutRows]]) -> Iterator[tuple[np.ndarray, int, int]]:
    active = [(index, read()) for index, read in readers]
    while active:
        for index, rows in list(active):
            batch = next(rows, None)
            if batch is None:
                active.remove((index, rows))
            else:
                yield batch[0], batch[1], index


class _Reader:
    """Reads some rows of one global batch after another."""

    def __init__(
        self, dataset: MixtureDataset, *, rows: range, batch_slice: BatchSlice, seed: int, streams: list[StreamState]
    ) -> None:
        self._mixture = dataset.mixture
        self._rows = rows
        self._seq_len = batch_slice.seq_len
        self._num_rows = batch_slice.global_batch_size
        self._seed = seed
        self._sources = list(dataset.sources.values())
        self._stored: dict[int, Callable[[np.ndarray], np.ndarray]] = {}
        self._streams: dict[int, HubStreams] = {}
        for index, source in enumerate(self._sources):
            if isinstance(source, HubDataset):
                place = len(self._streams)  # a source that was added has no position yet
                start = start_of_streams(streams[place] if place < len(streams) else None, size=self._num_rows)
                self._streams[index] = HubStreams(source, rows=rows, start=start)

    def __call__(self, first_sample: int) -> np.ndarray:
        """Returns the rows [B, T + 1] of the batch that begins with this sample."""
        sources, uses = self._locate(first_sample)
        found = np.empty((len(self._rows), self._seq_len + 1), dtype=np.uint32)
        for index in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == index)
            source = self._sources[index]
            if isinstance(source, HubDataset):
                for place in chosen.tolist():
                    found[place] = self._streams[index].next_row(self._rows[place], seq_len=self._seq_len)
                continue
            if index not in self._stored:  # one that is not used may have no row of this length
                self._stored[index] = source.train_rows(seq_len=self._seq_len, seed=self._seed)
            found[chosen] = self._stored[index](uses[chosen])
        return found

    def pass_over(self, batches: range) -> None:
        """Removes the rows of these batches from the streams; other sources are read by number."""
        for batch in batches if self._streams else ():
            sources, _ = self._locate(self._mixture.timeline.first_sample(batch=batch))
            for row, index in zip(self._rows, sources.tolist(), strict=True):
                if index in self._streams:
                    self._streams[index].next_row(row, seq_len=self._seq_len)

    def positions(self) -> list[StreamPosition]:
        """Returns the position in each hub dataset after the last batch."""
        streams = enumerate(self._streams.values())
        return [stream.position(first_index=order * self._num_rows) for order, stream in streams]

    def _locate(self, first_sample: int) -> tuple[np.ndarray, np.ndarray]:
        return self._mixture.locate(range(first_sample + self._rows.start, first_sample + self._rows.stop))
