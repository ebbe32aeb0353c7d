"""Rotary scaling in config.json: rope_scaling, or rope_parameters of transformers 5."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace

from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.models.hub_keys import Arguments, read_argument
from torchtitan_clone.models.rope import RopeScaling

ORIGINAL_LENGTH = "original_max_position_embeddings"
"""Of a rotary scaling, or of config.json itself: transformers prefers the latter."""
_REQUIRED = {"factor": "factor", "original_max_seq_len": ORIGINAL_LENGTH}
_KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "llama3": {**_REQUIRED, "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": _REQUIRED,
}
"""Keys of each type of rotary scaling by the names of our arguments, all of them required."""
_YARN_KEYS = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
"""Keys that YaRN may have, with names and defaults of ours."""
_OTHERS = {"rope_type", "type", "finetuned"}
"""Keys of all types; the last is without effect."""


def read_scaling(entries: Mapping[str, Value], *, family: str, original: Value | None) -> Arguments | None:
    """Returns the arguments of a rotary scaling without its theta, None for none. DocumentError.

    Every key is read, without effect, or refused by name. `original` is the original length of config.json itself.
    """
    given = {name: entry for name, entry in entries.items() if entry.value is not None or name == "truncate"}
    kind = _read_type(given, family=family)
    if original is not None and ORIGINAL_LENGTH in _KEYS[kind].values():
        given[ORIGINAL_LENGTH] = original
    if absent := [name for name in _KEYS[kind].values() if name not in given]:
        raise DocumentError(f"config.json: the rope scaling has no {', '.join(absent)}")
    keys = {**_KEYS[kind], **{name: name for name in _YARN_KEYS if name in given and kind == "yarn"}}
    for name, entry in given.items():
        if name == "partial_rotary_factor" and entry.value != 1.0:
            entry.refuse(f"{family} rotates all features of a head")
        if name not in {*keys.values(), *_OTHERS, "partial_rotary_factor"}:
            entry.refuse(f"a rope scaling of type {kind} has no such key in {family}; remove it if it has no effect")
    values: Arguments = {ours: read_argument(ours, given[theirs]) for ours, theirs in keys.items()}
    return None if kind == "default" else _checked(values, given=given, kind=kind)


def _read_type(given: Mapping[str, Value], *, family: str) -> str:
    """Returns the type; `type` is its older name."""
    entry = given.get("rope_type", given.get("type"))
    if entry is None:
        return "default"
    if "type" in given and given["type"].value != entry.value:
        entry.refuse(f"differs from type, an older name of it, which is {shorten(repr(given['type'].value))}")
    if entry.text() not in _KEYS:
        entry.refuse(f'{family} supports only "default", "llama3" and "yarn"')
    return entry.text()


def _checked(values: Arguments, *, given: Mapping[str, Value], kind: str) -> Arguments:
    """Returns the arguments without those that are computed or that transformers takes as absent."""
    if values.get("attention_factor") == 0.0:  # which transformers multiplies by, and means "computed" here
        given["attention_factor"].refuse("must be above 0; remove it, so that it is computed from the factor")
    if bool(values.get("mscale")) != bool(values.get("mscale_all_dim")):
        raise DocumentError("config.json: the rope scaling has one of mscale and mscale_all_dim; give both or none")
    if not values.get("mscale"):  # transformers takes zeros as absent
        values = {name: value for name, value in values.items() if not name.startswith("mscale")}
    found = RopeScaling(rope_type="yarn" if kind == "yarn" else "llama3", **values)
    if kind == "yarn" and found.original_max_seq_len < 2 * math.pi * found.beta_slow:
        rule = "no pair of features rotates beta_slow times in it, which transformers does not stretch"
        given[ORIGINAL_LENGTH].refuse(f"{rule}; set a length of pretraining")
    is_default = math.isclose(found.magnitude(), replace(found, attention_factor=0.0).magnitude(), rel_tol=1e-9)
    return asdict(replace(found, attention_factor=0.0) if is_default else found)


def scaling_to_config(scaling: RopeScaling) -> dict[str, object]:
    """Returns a rotary scaling as in config.json."""
    values = asdict(scaling)
    found = {theirs: values[ours] for ours, theirs in _KEYS[scaling.rope_type].items()}
    if scaling.rope_type == "yarn":
        found |= {name: values[name] for name in ("beta_fast", "beta_slow", "truncate")}
        if scaling.mscale and scaling.mscale_all_dim:
            found |= {name: values[name] for name in ("mscale", "mscale_all_dim")}
        elif scaling.magnitude() != scaling.growth(1.0):  # transformers reads both of mscale or none
            values["attention_factor"] = scaling.magnitude()
        if values["attention_factor"]:
            found["attention_factor"] = values["attention_factor"]
    return {"rope_type": scaling.rope_type, **found}
