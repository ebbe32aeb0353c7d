"""The state of a run apart from its tensors: a document in each checkpoint, which a recovering replica group gets too.

Nothing in it is believed before parse_progress() has checked it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from torchtitan_clone.documents import MAX_BYTES, MAX_INTEGER, Value

MAX_DIGITS = 18
"""Digits of a step, at most."""
MAX_LOSS = 1e39
"""Above each number of float32."""


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """A return to a checkpoint because of spikes."""

    step: int
    """The step that the run went back to."""
    from_step: int
    """The last step before, which was given up with those in between."""
    first_batch: int
    last_batch: int
    """The global batches that are passed over since."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a run apart from its tensors; `data` is the position in the data."""

    step: int
    tokens_seen: int
    skipped_steps: int
    data: Mapping[str, object]
    spikes: Mapping[str, object] = field(default_factory=dict[str, object])
    """The steps that the next one is compared with, {} where nothing is done about spikes."""

    rewinds: tuple[Rewind, ...] = ()
    """All of the run, in order."""

    @property
    def commits(self) -> int:
        """Number of all steps until now, those included that were given up."""
        return self.step + sum(rewind.from_step - rewind.step for rewind in self.rewinds)

    def step_of(self, commit: int) -> int | None:
        """Returns the step of a commit, counted from 1, and None if it was given up since."""
        step, is_before = commit, False
        for rewind in self.rewinds:
            if step > rewind.from_step and not is_before:
                step -= rewind.from_step - rewind.step
                continue
            is_before = True
            if step > rewind.step:
                return None
        return step

    @property
    def suspect_step(self) -> int:
        """Step whose update precedes the first of the spikes in a row, which it may have caused; 0 without them."""
        first = self.spikes.get("first_step", 0)
        return max(0, first - 1) if isinstance(first, int) else 0

    def to_json(self) -> dict[str, object]:
        """Returns this as data that JSON can hold; without `spikes` and `rewinds` where there are none."""
        return {key: value for key, value in asdict(self).items() if value or key not in _OPTIONAL}


_OPTIONAL = ("spikes", "rewinds")
NOTHING_DONE = Progress(step=0, tokens_seen=0, skipped_steps=0, data={})


def parse_progress(value: Value) -> Progress:
    """Returns the progress that a document holds; DocumentError if a value has another type or range."""
    optional = [key for key in _OPTIONAL if key in value.plain_entries()]
    content = value.table("step", "tokens_seen", "skipped_steps", "data", *optional)
    step = content["step"].integer(high=10**MAX_DIGITS - 1)
    return Progress(
        step=step,
        tokens_seen=content["tokens_seen"].integer(),
        skipped_steps=content["skipped_steps"].integer(high=step),
        data=check_position(content["data"]),
        spikes=_check_spikes(content["spikes"]) if "spikes" in optional else {},
        rewinds=tuple(_parse_rewind(each) for each in content["rewinds"].items()) if "rewinds" in optional else (),
    )


def _check_spikes(value: Value) -> Mapping[str, object]:
    """Returns the window of run/spikes.py; DocumentError if a value has another type or range."""
    content = value.table("stage", "in_a_row", "first_step", "losses", "grad_norms")
    for name in ("stage", "in_a_row", "first_step"):
        content[name].integer()
    losses, norms = (
        [each.number(low=-MAX_LOSS, high=MAX_LOSS) for each in content[name].items()]
        for name in ("losses", "grad_norms")
    )
    if len(losses) != len(norms):
        content["grad_norms"].refuse("must have as many values as losses")
    return value.plain_entries()


def _parse_rewind(value: Value) -> Rewind:
    content = value.table("step", "from_step", "first_batch", "last_batch")
    step, first_batch = content["step"].integer(), content["first_batch"].integer(low=1)
    return Rewind(
        step=step,
        from_step=content["from_step"].integer(low=step + 1),
        first_batch=first_batch,
        last_batch=content["last_batch"].integer(low=first_batch),
    )


def check_position(value: Value) -> Mapping[str, object]:
    """Returns the position in the data that a checkpoint or a peer states, {} if it was not saved.

    DocumentError if a value has another type or range: a loader believes the others.
    """
    content = value.entries()
    if content and "samples" not in content:
        value.refuse("must have samples")
    for key, each in content.items():
        if key in _CHECKS:
            _CHECKS[key](each)
    return {key: each.value for key, each in content.items()}


def _check_cursors(value: Value) -> None:
    for cursor in value.items():
        cursor.integers(count=3)
    if not value.value:
        value.refuse("must have a cursor for every row of a global batch")


def _check_bookmark(value: Value) -> None:
    epoch, document, place = value.items(count=3)
    epoch.integer()
    document.integer()
    if place.value is not None:
        place.text(max_chars=MAX_BYTES)


def _check_streams(value: Value) -> None:
    for stream in value.items():
        for key, each in stream.table("cursors", "bookmark").items():
            _CHECKS[key](each)


_CHECKS: Mapping[str, Callable[[Value], object]] = {
    "samples": lambda value: value.integer(high=2**62),
    "data": Value.text,
    "tokenizer": Value.text,
    "eos_id": Value.integer,
    "held_out_fraction": lambda value: value.number(low=0, high=1),
    "seq_len": Value.integer,
    "document_masking": Value.flag,
    "seed": lambda value: value.integer(low=-MAX_INTEGER, high=MAX_INTEGER),
    "teacher": Value.text,
    "cursors": _check_cursors,
    "bookmark": _check_bookmark,
    "streams": _check_streams,
    "stages": lambda value: [stage.entries().get("first_step", stage).integer(low=1) for stage in value.items()],
}
