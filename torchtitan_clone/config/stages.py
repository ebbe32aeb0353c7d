"""Stages of a run's data: consecutive global batches with the same mixture, sequence length and batch size.

Global batches are numbered from 1, without gaps. Training step t uses the t-th one that data.skip_steps does not pass
over, so that passing over a batch does not change what the others hold.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torchtitan_clone.config.messages import did_you_mean, shown
from torchtitan_clone.config.schema_training import MAX_STEPS, WEIGHTS, Data, DataSource, Stage, Training
from torchtitan_clone.documents import is_plain_name

WHOLE_RUN = "data"
"""Name of the only source of a run without data.sources."""
OF_CHATS = {"supervise": "assistant", "supervise_thinking": True, "supervise_tool_calls": True, "long_chats": "drop"}
"""Options that only sources of chats have, with their defaults."""
SOURCE_OPTIONS = ("text_key", "parse_special_tokens", "format", *OF_CHATS)
"""Options that each entry of data.sources has, and [training] for a run without entries."""


@dataclass(frozen=True, kw_only=True)
class DataStage:
    """A stage with all its values; sizes are in rows of its own seq_len."""

    first_batch: int
    first_sample: int
    """Rows of all batches before it, those that are passed over included."""
    seq_len: int
    global_batch_size: int
    local_batch_size: int
    weights: dict[str, float]
    """Share of the tokens by source, 0 for the sources that are not named."""
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None

    @property
    def engine_options(self) -> tuple[object, ...]:
        """What the model and the shape of a batch depend on."""
        sizes = (self.seq_len, self.global_batch_size, self.local_batch_size)
        return (*sizes, self.rope_theta, repr(self.rope_scaling))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All stages in order, the last one without end, and the ranges of batches that are passed over."""

    base: DataStage
    """The values of the tables, which hold before the first stage."""
    stages: tuple[DataStage, ...]
    skipped: tuple[tuple[int, int], ...]
    """First and last batch of each range, in order."""

    def stage_index(self, *, batch: int) -> int:
        """Returns the index of the stage that a batch belongs to."""
        return bisect_right(self.stages, batch, key=lambda stage: stage.first_batch) - 1

    def phase_stage(self, *, batch: int) -> DataStage:
        """Returns the first of the consecutive stages up to this batch that differ in their weights only."""
        index = self.stage_index(batch=batch)
        while index and self.stages[index - 1].engine_options == self.stages[index].engine_options:
            index -= 1
        return self.stages[index]

    def end_of_phase(self, *, batch: int) -> int:
        """Returns the first batch of the next phase; `batch` must not be in the last one."""
        phase = self.phase_stage(batch=batch)
        starts = (stage.first_batch for stage in self.stages if stage.first_batch > batch)
        return next(start for start in starts if self.phase_stage(batch=start) is not phase)

    def first_sample(self, *, batch: int) -> int:
        """Returns the number of rows in all batches before this one."""
        stage = self.stages[self.stage_index(batch=batch)]
        return stage.first_sample + (batch - stage.first_batch) * stage.global_batch_size

    def stage_of_sample(self, sample: int) -> int:
        """Returns the index of the stage that a sample belongs to."""
        return bisect_right(self.stages, sample, key=lambda stage: stage.first_sample) - 1

    def batch_at(self, samples: int) -> int:
        """Returns the batch after this many samples, which end a batch, whether or not it is passed over."""
        stage = self.stages[self.stage_of_sample(samples)]
        return stage.first_batch + (samples - stage.first_sample) // stage.global_batch_size

    def next_sample(self, samples: int) -> int:
        """Returns the first sample that is trained after this many."""
        return self.first_sample(batch=self.unskipped(self.batch_at(samples)))

    def unskipped(self, batch: int) -> int:
        """Returns this batch, or the first after it that is not passed over."""
        for first, last in self.skipped:
            if first <= batch <= last:
                batch = last + 1
        return batch

    def passing_over(self, ranges: Iterable[tuple[int, int]]) -> "Timeline":
        """Returns the timeline that also passes over these ranges of batches, which may overlap."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.skipped, *ranges]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        return replace(self, skipped=tuple(merged))

    def batch_of_step(self, step: int) -> int:
        """Returns the batch of a training step, in a run whose skipped batches were all known in time."""
        batch = step
        for first, last in self.skipped:
            if first <= batch:
                batch += last - first + 1
        return batch


def has_timeline(data: Data, *, training: Training) -> bool:
    """Returns whether the options ask for numbered global batches."""
    return bool(data.sources or data.stages or data.skip_steps) or training.on_spike == "rewind"


def reads_chats(data: Data, *, training: Training) -> bool:
    """Returns whether a source of the run holds chats."""
    return any(each.format == "chat" for each in (data.sources or [training]))


def resolved_timeline(data: Data, *, training: Training, global_batch_size: int) -> Timeline | None:
    """Returns the stages of a run, None where no option asks for any; find_data_errors() refuses invalid ones."""
    if not has_timeline(data, training=training):
        return None
    weights = {source.name: source.weight for source in data.sources} or {WHOLE_RUN: 1.0}
    first = DataStage(
        first_batch=1,
        first_sample=0,
        seq_len=training.seq_len,
        global_batch_size=global_batch_size,
        local_batch_size=training.local_batch_size,
        weights=weights,
    )
    stages = [first]
    for entry in data.stages:
        following = _following(stages[-1], entry)
        stages = [*(stages if entry.first_step > 1 else []), following]
    ranges = tuple((first, last) for first, last in data.skip_steps)
    return Timeline(base=first, stages=tuple(stages), skipped=ranges)


def find_data_errors(data: Data, *, training: Training) -> Iterator[str]:
    """Yields one message for each entry of data.sources, data.stages and data.skip_steps that cannot be followed."""
    if data.sources and training.dataset_path is not None:
        yield "training.dataset_path: data.sources names the data; remove one of the two."
    if not data.sources:
        yield from _find_chat_errors(training, at="training.", data=data)
    for name in SOURCE_OPTIONS if data.sources else ():
        if getattr(training, name) != getattr(Training(), name):
            yield f"training.{name}: has no effect with data.sources; set {name} in each of its entries instead."
    names = [source.name for source in data.sources]
    for place, source in enumerate(data.sources):
        yield from _find_source_errors(source, is_repeated=source.name in names[:place])
        yield from _find_chat_errors(source, at=f"data.sources, name {shown(source.name)}: ", data=data)
    begins_with_weights = any(stage.first_step == 1 and stage.weights for stage in data.stages[:1])
    if data.sources and not any(source.weight for source in data.sources) and not begins_with_weights:
        yield "data.sources: the weight of every source is 0; set at least one above 0."
    yield from _find_stage_errors(data.stages, names=names or [WHOLE_RUN], training=training)
    last = 0
    for entry in data.skip_steps:
        if len(entry) != 2 or not last < entry[0] <= entry[1] <= MAX_STEPS:
            limits = f"from {last + 1} to {MAX_STEPS:,}"
            rule = f"must be a range [first, last] of steps {limits}; list ranges in order, without overlap"
            yield f"data.skip_steps, {shown(entry)}: {rule}."
            return
        last = entry[1]


def _find_source_errors(source: DataSource, *, is_repeated: bool) -> Iterator[str]:
    point = f"data.sources, name {shown(source.name)}"
    if not is_plain_name(source.name):
        yield f"{point}: names a column of the metrics: printable characters without a slash; choose another."
    if is_repeated:
        yield f"{point}: an earlier source has this name; choose another."
    if (source.path is None) == (source.dataset is None):
        yield f"{point}: set either path, to files, or dataset, to the name of a dataset."


def _find_chat_errors(options: Training | DataSource, *, at: str, data: Data) -> Iterator[str]:
    is_chat = options.format == "chat"
    of_text: dict[str, object] = {"text_key": "text", "parse_special_tokens": False}
    for name, default in (of_text if is_chat else OF_CHATS).items():
        if getattr(options, name) != default:
            rule = f'has no effect with format = "{options.format}"'
            yield f"{at}{name} = {shown(getattr(options, name))}: {rule}; remove it, or set format."
    if is_chat and options.long_chats == "cut" and data.packing != "best_fit":
        rule = 'data.packing = "concatenate" puts long chats into several rows'
        yield f'{at}long_chats = "cut": {rule}; remove it, or set data.packing to "best_fit".'


def _find_stage_errors(stages: list[Stage], *, names: list[str], training: Training) -> Iterator[str]:
    step, seq_len = 0, training.seq_len
    rows = {"global_batch_size": training.global_batch_size, "local_batch_size": training.local_batch_size}
    for stage in stages:
        point = f"data.stages, first_step {stage.first_step}"
        if stage.first_step <= step:
            yield f"{point}: must be above {step}; list the stages in increasing order of first_step, from 1."
        for name, weight in stage.weights.items():
            if name not in names:
                yield f"{point}: weights: {shown(name)} is no source{did_you_mean(name, names)}."
            if not WEIGHTS.holds(weight):
                yield f"{point}: weights: {shown(name)} = {weight}: must be {WEIGHTS.describe()}."
        if stage.weights and not any(stage.weights.values()):
            yield f"{point}: weights: all are 0; set at least one above 0."
        step, before, seq_len = stage.first_step, seq_len, stage.seq_len or seq_len
        for key, size in rows.items():
            rows[key] = getattr(stage, key) or (size if size == -1 else size * before // seq_len)
            if getattr(stage, key) is None and size != -1 and size * before % seq_len:
                yield _describe_rest(stage, key, rows=size, before=before, seq_len=seq_len)
                return


def find_batch_errors(data: Data, *, timeline: Timeline) -> Iterator[str]:
    """Yields a message for the first stage whose global batch, which no option gives, would have other tokens."""
    following = timeline.stages[len(timeline.stages) - len(data.stages) :]
    for entry, before, stage in zip(data.stages, (timeline.base, *following), following, strict=False):
        rows = before.global_batch_size
        if entry.global_batch_size is None and rows * before.seq_len % stage.seq_len:
            yield _describe_rest(entry, "global_batch_size", rows=rows, before=before.seq_len, seq_len=stage.seq_len)
            return


def _describe_rest(stage: Stage, key: str, *, rows: int, before: int, seq_len: int) -> str:
    rule = f"{rows} sequences of {before} tokens are no whole number of sequences of {seq_len}"
    return f"data.stages, first_step {stage.first_step}: seq_len = {seq_len}: {key}: {rule}; set {key} of the stage."


def _following(before: DataStage, entry: Stage) -> DataStage:
    """Returns the stage of an entry, whose unset values are those before, and batches of as many tokens."""
    seq_len = entry.seq_len or before.seq_len
    weights = before.weights
    if entry.weights:
        weights = {name: float(entry.weights.get(name, 0.0)) for name in before.weights}
    scaling = entry.rope_scaling
    return replace(
        before,
        first_batch=entry.first_step,
        first_sample=before.first_sample + (entry.first_step - before.first_batch) * before.global_batch_size,
        seq_len=seq_len,
        global_batch_size=entry.global_batch_size or before.global_batch_size * before.seq_len // seq_len,
        local_batch_size=entry.local_batch_size or before.local_batch_size * before.seq_len // seq_len,
        weights=weights,
        rope_theta=before.rope_theta if entry.rope_theta is None else entry.rope_theta,
        rope_scaling=before.rope_scaling if scaling is None else scaling,
    )
