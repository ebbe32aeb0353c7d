"""What checkpoints record of a mixture: its sources, and the stages that have begun, which must not change."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.stages import WHOLE_RUN, DataStage, Timeline
from torchtitan_clone.data.mixture_dataset import MixtureDataset
from torchtitan_clone.data.row_reader import StreamState
from torchtitan_clone.data.streaming import HubDataset, start_of_streams
from torchtitan_clone.documents import Value


def mixture_record(dataset: MixtureDataset, *, samples: int) -> dict[str, object]:
    """Returns what the first samples were taken from, as plain data."""
    begun = [stage for stage in dataset.mixture.timeline.stages if stage.first_sample < samples]
    sources = [[name, source.identity.data] for name, source in dataset.sources.items()]
    streamed = [name for name, source in dataset.sources.items() if isinstance(source, HubDataset)]
    record: dict[str, object] = {"sources": sources, "stages": [_plain(stage) for stage in begun]}
    return record | {"streamed": streamed} if streamed else record


def streams_to_resume(
    dataset: MixtureDataset, *, state: Mapping[str, Any], streams: list[StreamState], num_rows: int
) -> list[StreamState]:
    """Returns the positions in the hub datasets of a mixture, by the fingerprints that a state has of them.

    Others begin anew. States of a single hub dataset, and older ones, do not name them. DocumentError if it is damaged.
    """
    now = {name: source.identity.data for name, source in dataset.sources.items() if isinstance(source, HubDataset)}
    names = [item.text() for item in Value(state.get("streamed", [*now]), where="streamed").items()]
    trained = dict(_trained_sources(state)) or dict.fromkeys(names, state.get("data"))
    if [*trained] == [WHOLE_RUN]:  # it had no name
        trained = dict.fromkeys(names, trained[WHOLE_RUN])
    left = [(trained.get(name), name, stream) for name, stream in zip(names, streams, strict=False)]
    known: dict[str, StreamState] = {}
    for may_be_renamed in (False, True):
        for name in now.keys() - known.keys():
            found = [each for each in left if each[0] == now[name] and (may_be_renamed or each[1] == name)]
            if found:
                left.remove(found[0])
                known[name] = found[0][2]
    start = start_of_streams(None, size=num_rows)
    return [known.get(name, start) for name in now] if known else []


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
