"""Reads the rows of a mixture: each from the source that the order of its samples gives it.

Checkpoints record its sources, and the stages that have begun, which must not change.

A local source is read by the number of its use. A source of the Hugging Face hub has one stream for each row of the
global batch, as without a mixture: row r takes its next tokens from stream r, and a rank reads its own streams only.

Shapes: B rows, T tokens of a row (seq_len).
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.stages import WHOLE_RUN, DataStage, Timeline
from torchtitan_clone.data.dataset import (
    BatchSlice,
    DatasetIdentity,
    HeldOutRows,
    RowChunk,
    RowReader,
    StreamPosition,
    StreamState,
    TokenDataset,
    read_in_thread,
    slice_of_rank,
)
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.streaming import HubDataset, HubStreams, merge_positions, start_of_streams
from torchtitan_clone.data.token_store import Split
from torchtitan_clone.documents import Value

logger = logging.getLogger("torchtitan_clone")

Source = TokenDataset | HubDataset


@dataclass(frozen=True, kw_only=True)
class MixtureDataset:
    """The sources of a mixture by name, in the order of its configuration. Can be pickled."""

    is_mixture: ClassVar[bool] = True
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
        stores = [source.store for source in self.sources.values() if isinstance(source, TokenDataset)]
        is_local = all(store.remote is None for store in stores)
        return RowReader(batch_slice, read=read if is_local else partial(read_in_thread, read))

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
        rows_of_batch: list[tuple[str, np.ndarray | None]] = [(names[index], None) for index in indices.tolist()]
        for index in np.unique(indices).tolist():
            source = self.sources[names[index]]
            if isinstance(source, TokenDataset):
                chosen = np.flatnonzero(indices == index)
                rows = source.train_rows(seq_len=stage.seq_len, seed=seed)(uses[chosen])
                for place, row in zip(chosen.tolist(), rows, strict=True):
                    rows_of_batch[place] = names[index], row
        return rows_of_batch

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
        errors = [
            f"data.sources, name {shown(name)}: would be read {epochs[name]:.3g} times in {steps:,} steps, and "
            f"max_epochs is {limit:g}; {self._remedy(name, factor=limit / epochs[name])}, or raise max_epochs."
            for name, limit in self.max_epochs.items()
            if epochs[name] > limit
        ]
        if errors:
            raise ConfigError(errors)

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

    def record(self, *, samples: int) -> dict[str, object]:
        """Returns what the first samples were taken from, as plain data."""
        begun = [stage for stage in self.mixture.timeline.stages if stage.first_sample < samples]
        sources = [[name, source.identity.data] for name, source in self.sources.items()]
        streamed = [name for name, source in self.sources.items() if isinstance(source, HubDataset)]
        record: dict[str, object] = {"sources": sources, "stages": [_plain(stage) for stage in begun]}
        return record | {"streamed": streamed} if streamed else record

    def streams_to_resume(
        self, *, state: Mapping[str, Any], streams: list[StreamState], num_rows: int
    ) -> list[StreamState]:
        """Returns the positions in the hub datasets of a mixture, by the fingerprints that a state has of them.

        Others begin anew. States of a single hub dataset, and older ones, do not name them. DocumentError if the state
        is damaged.
        """
        now = {name: source.identity.data for name, source in self.sources.items() if isinstance(source, HubDataset)}
        names = [item.text() for item in Value(state.get("streamed", [*now]), where="streamed").items()]
        trained = dict(_trained_sources(state)) or dict.fromkeys(names, state.get("data"))
        if [*trained] == [WHOLE_RUN]:  # it had no name
            trained = dict.fromkeys(names, trained[WHOLE_RUN])
        left = [(trained.get(name), name, stream) for name, stream in zip(names, streams, strict=False)]
        known: dict[str, StreamState] = {}
        for may_be_renamed in (False, True):
            for name in now.keys() - known.keys():
                same = [each for each in left if each[0] == now[name] and (may_be_renamed or each[1] == name)]
                if same:
                    left.remove(same[0])
                    known[name] = same[0][2]
        start = start_of_streams(None, size=num_rows)
        return [known.get(name, start) for name in now] if known else []


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
        out = np.empty((len(self._rows), self._seq_len + 1), dtype=np.uint32)
        for index in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == index)
            source = self._sources[index]
            if isinstance(source, HubDataset):
                for place in chosen.tolist():
                    out[place] = self._streams[index].next_row(self._rows[place], seq_len=self._seq_len)
                continue
            if index not in self._stored:  # one that is not used may have no row of this length
                self._stored[index] = source.train_rows(seq_len=self._seq_len, seed=self._seed)
            out[chosen] = self._stored[index](uses[chosen])
        return out

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


def _trained_sources(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    sources = [item.items(count=2) for item in Value(state.get("sources", []), where="sources").items()]
    return [(name.text(), fingerprint.text()) for name, fingerprint in sources]


def find_data_changes(dataset: MixtureDataset | None, *, state: Mapping[str, Any], samples: int) -> list[str]:
    """Returns in what the first samples differ from those of a state: None is a run without sources and stages.

    A state without them is that of such a run, which read the first source. DocumentError if the state is damaged.
    """
    trained = _trained_sources(state)
    stages = [item.plain_entries() for item in Value(state.get("stages", []), where="stages").items()]
    if dataset is None:
        is_plain = len(trained) <= 1 and len(stages) <= 1
        return [] if is_plain else ["data.sources and data.stages were set and are not"]
    timeline = dataset.mixture.timeline
    (first, *_) = dataset.sources
    if [name for name, _ in trained] in ([], [WHOLE_RUN]):  # it had no name
        trained = [(first, fingerprint) for _, fingerprint in trained]
        stages = stages or ([_plain(timeline.stages[0])] if samples else [])
        stages = [stage | {"weights": {first: 1.0}} for stage in stages]
    return [
        *_find_source_changes(dataset, trained=trained),
        *_find_stage_changes(timeline, trained=stages, samples=samples),
    ]


def _find_source_changes(dataset: MixtureDataset, *, trained: list[tuple[str, str]]) -> Iterator[str]:
    now = [(name, source.identity.data) for name, source in dataset.sources.items()]
    for place, (name, fingerprint) in enumerate(trained):
        name_now, fingerprint_now = now[place] if place < len(now) else (None, None)
        if name_now != name:
            present = "missing" if name_now is None else shown(name_now)
            yield f"data.sources: entry {place + 1} was {shown(name)} and is {present}"
        elif fingerprint_now != fingerprint:
            yield f"data.sources: {shown(name)} had the fingerprint {fingerprint} and has {fingerprint_now}"


def _find_stage_changes(timeline: Timeline, *, trained: list[dict[str, object]], samples: int) -> Iterator[str]:
    unchanged = 0
    for before, stage in zip_longest(trained, timeline.stages[: len(trained)]):
        now = None if stage is None else _plain(stage)
        is_base = stage == timeline.base  # its sizes are those of [training]
        changes = ["it is missing"] if now is None else list(_find_value_changes(before, now, is_base=is_base))
        if changes:
            step = shown(before.get("first_step"))
            yield f"data.stages: the stage from step {step} has been trained: {', '.join(changes)}"
        unchanged += not changes
    if unchanged < len(trained):
        return
    for stage in timeline.stages[unchanged:]:
        if stage.first_sample < samples:
            yield f"data.stages: the steps from step {stage.first_batch} on have been trained without its stage"
            return
    last = timeline.stages[timeline.stage_of_sample(samples)]
    if (samples - last.first_sample) % last.global_batch_size:
        size = f"training.global_batch_size is {last.global_batch_size}"
        yield f"{size}, and the {samples:,} samples trained end within a batch of that size"


def _find_value_changes(before: dict[str, object], now: dict[str, object], *, is_base: bool) -> Iterator[str]:
    for key in before | now:
        if before.get(key) != now.get(key):
            was, is_now = (shown(values[key]) if key in values else "unset" for values in (before, now))
            yield f"{'training.' if is_base and key != 'weights' else ''}{key} was {was} and is {is_now}"


def _plain(stage: DataStage) -> dict[str, object]:
    """Returns what a stage determines of its samples and of the model."""
    total = sum(stage.weights.values())
    values: dict[str, object] = {
        "first_step": stage.first_batch,
        "seq_len": stage.seq_len,
        "global_batch_size": stage.global_batch_size,
        "weights": {name: weight / total for name, weight in stage.weights.items() if weight},
        "rope_theta": stage.rope_theta,
        "rope_scaling": stage.rope_scaling,
    }
    return {key: value for key, value in values.items() if value is not None}
