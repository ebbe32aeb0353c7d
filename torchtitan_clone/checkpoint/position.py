"""Checks the position in the data that a checkpoint or a peer states, before a loader believes it."""

from collections.abc import Callable, Mapping

from torchtitan_clone.documents import MAX_BYTES, MAX_INTEGER, Value


def check_position(value: Value) -> Mapping[str, object]:
    """Returns a loader's state, {} if it was not saved; DocumentError if a value has another type or range."""
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
    "cursors": _check_cursors,
    "bookmark": _check_bookmark,
    "streams": _check_streams,
    "stages": lambda value: [stage.entries().get("first_step", stage).integer(low=1) for stage in value.items()],
}
