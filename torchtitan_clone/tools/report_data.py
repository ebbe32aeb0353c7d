"""Reads a run folder for the report: what of it exists and is well-formed.

Nothing in the folder is trusted: numbers are bounded, and text is escaped where it enters the page.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TypeVar

import numpy as np
import tomli

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.reader import flat
from torchtitan_clone.documents import DocumentError, Value, parse_json, read_json, read_regular
from torchtitan_clone.observe import records
from torchtitan_clone.observe.goodput import read_rows
from torchtitan_clone.observe.metrics import METRICS_FILE

MAX_COLUMNS = 1_000
MAX_NUMBER = 1e30
"""Larger values are not drawn."""
MAX_TIME = 1e11
MAX_STEP = 10**12
MAX_RECORDS = 10_000
MAX_TEXTS = 50

Record = dict[str, object]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Series:
    """A column of the rows: steps, seconds since the epoch and values, each [N] and ordered by step."""

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray

    def where(self, mask: np.ndarray) -> "Series":
        """Returns the rows of a mask, or of indices."""
        return Series(steps=self.steps[mask], times=self.times[mask], values=self.values[mask])


@dataclass(kw_only=True)
class RunData:
    """What a run folder contains; `num_skipped` lines and values are not well-formed."""

    name: str
    folder: Path
    num_rows: int = 0
    num_skipped: int = 0
    columns: dict[str, Series] = field(default_factory=dict[str, Series])
    events: list[Record] = field(default_factory=list[Record])
    texts: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])
    """Step, name and text of the last columns of text of events, such as samples."""
    starts: list[Record] = field(default_factory=list[Record])
    breakdowns: list[Record] = field(default_factory=list[Record])
    timeline: Record = field(default_factory=dict[str, object])
    loads: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    pipeline: Record = field(default_factory=dict[str, object])
    collectives: list[list[Record]] = field(default_factory=list[list[Record]])
    """Rows of collectives.rank*.json, one list for each file."""
    options: dict[str, object] = field(default_factory=dict[str, object])
    """Options of config.toml by dotted name."""

    @property
    def first_time(self) -> float:
        """Seconds since the epoch at the start of the run."""
        return min([number(start, "time") for start in self.starts] + [s.times.min() for s in self.columns.values()])

    def events_named(self, name: str) -> list[Record]:
        """Returns the rows of one kind of event."""
        return [event for event in self.events if event["event"] == name]


def number(record: Mapping[str, object], key: str) -> float:
    """Returns a number of a record; 0 where it is missing, none or too large."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and -MAX_NUMBER < value < MAX_NUMBER else 0.0


def run_folders(folder: Path) -> list[Path]:
    """Returns the folder, or those of its replica groups. ConfigError if there are no metrics in them."""
    if (folder / METRICS_FILE).exists():
        return [folder]
    groups = sorted(path for path in folder.glob("replica-*") if (path / METRICS_FILE).exists())
    if not groups:
        what = "has no metrics.jsonl" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"{folder} {what}; give the folder of a run, such as outputs/debug_model")
    return groups


def read_run(folder: Path, *, name: str) -> RunData:
    """Reads a folder. ConfigError if metrics.jsonl cannot be read or has no rows."""
    run = RunData(name=name, folder=folder)
    try:
        _read_rows(run)
    except (DocumentError, OSError) as error:
        raise ConfigError(f"{folder}: {error}; give a copy of the run's folder") from None
    if not run.columns:
        skipped = f" ({run.num_skipped:,} lines are not rows)" if run.num_skipped else ""
        raise ConfigError(f"{folder / METRICS_FILE} has no rows with numbers{skipped}; wait for the run's first step")
    run.starts = _optional(run, lambda: list(_read_lines(run, records.STARTS_FILE)), default=[])
    run.breakdowns = _optional(run, lambda: list(_read_lines(run, records.BREAKDOWNS_FILE)), default=[])
    run.timeline = _optional(run, lambda: _timeline(_read(run, records.TIMELINE_FILE)), default={})
    run.pipeline = _optional(run, lambda: _pipeline(_read(run, records.PIPELINE_FILE)), default={})
    run.loads = _optional(run, lambda: _loads(_read(run, records.LOADS_FILE)), default={})
    files = sorted(folder.glob("collectives.rank*.json"))[:MAX_RECORDS]
    found = [_optional(run, lambda file=file: _collectives(_read(run, file.name)), default=[]) for file in files]
    run.collectives = [rows for rows in found if rows]
    run.options = _optional(run, lambda: flat(tomli.loads(read_regular(folder / "config.toml").decode())), default={})
    return run


def _optional(run: RunData, read: Callable[[], T], *, default: T) -> T:
    """Returns what `read` returns, `default` for a missing or malformed file; counts a malformed one."""
    try:
        return read()
    except FileNotFoundError:
        return default
    except (DocumentError, OSError, ValueError, RecursionError, KeyError):
        run.num_skipped += 1
        return default


def _read(run: RunData, name: str) -> Value:
    return read_json(run.folder / name)


def _read_rows(run: RunData) -> None:
    """Reads metrics.jsonl: rows of numbers into columns, events and texts apart."""
    by_keys: dict[tuple[str, ...], list[Record]] = {}
    for line in read_rows(run.folder / METRICS_FILE):
        try:
            row = parse_json(line, where="row").plain_entries()
            Value(row["step"], where="step").integer(high=MAX_STEP)
            Value(row["time"], where="time").number(low=0, high=MAX_TIME)
        except (DocumentError, KeyError):
            run.num_skipped += 1
            continue
        run.num_rows += 1
        if isinstance(row.get("event"), str):
            run.events.append(_bounded(row))
            texts = [(key, text) for key, text in row.items() if isinstance(text, str) and key != "event"]
            run.texts = [*run.texts, *((int(number(row, "step")), key, text) for key, text in texts)][-MAX_TEXTS:]
        by_keys.setdefault(tuple(row), []).append(row)
    parts: dict[str, list[Series]] = {}
    for keys, rows in by_keys.items():
        steps, times = (np.array([row[key] for row in rows], dtype=np.float64) for key in ("step", "time"))
        is_event = "event" in keys
        for key in keys:
            if key in ("step", "time") or (is_event and not key.startswith("evaluation/")):
                continue
            values = [row[key] for row in rows]
            is_known = key in parts or len(parts) < MAX_COLUMNS
            column = _floats(values) if is_known else np.full(len(values), np.inf)
            is_small = np.abs(column) < MAX_NUMBER
            run.num_skipped += int(np.sum(~is_small & ~np.isnan(column)))
            if is_small.any():
                parts.setdefault(key, []).append(Series(steps=steps, times=times, values=column).where(is_small))
    run.columns = {key: _joined(series) for key, series in parts.items()}


def _floats(values: list[object]) -> np.ndarray:
    """Returns numbers [N], NaN for what is none, infinity for what is too large."""
    if not set(map(type, values)) <= {int, float, bool, NoneType}:
        values = [value if isinstance(value, int | float) else None for value in values]
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:  # an integer of hundreds of digits
        is_large = [isinstance(each, int | float) and not -MAX_NUMBER < each < MAX_NUMBER for each in values]
        return _floats([np.inf if large else each for each, large in zip(values, is_large, strict=True)])


def _joined(parts: list[Series]) -> Series:
    """Returns the rows of all parts in the order of their steps."""
    joined = {key: np.concatenate([getattr(part, key) for part in parts]) for key in ("steps", "times", "values")}
    return Series(**joined).where(np.argsort(joined["steps"], kind="stable"))


def _bounded(record: Mapping[str, object]) -> Record:
    """Returns the texts and the numbers of a record that are not too large."""
    return {
        key: value
        for key, value in record.items()
        if isinstance(value, str) or (isinstance(value, int | float) and -MAX_NUMBER < value < MAX_NUMBER)
    }


def _read_lines(run: RunData, name: str) -> Iterator[Record]:
    """Yields the last records of a file of JSON lines with a valid time; lists of numbers stay."""
    for line in read_regular(run.folder / name).splitlines()[-MAX_RECORDS:]:
        try:
            record = parse_json(line, where=name).plain_entries()
            Value(record.get("time"), where="time").number(low=0, high=MAX_TIME)
        except DocumentError:
            run.num_skipped += 1
            continue
        lists = {key: _numbers(value) for key, value in record.items() if isinstance(value, list)}
        yield _bounded(record) | lists


def _numbers(values: list[object]) -> list[float | None]:
    """Returns a list of numbers; None for what is no number, or too large."""
    return [
        float(value) if isinstance(value, int | float) and -MAX_NUMBER < value < MAX_NUMBER else None
        for value in values
    ]


def _timeline(value: Value) -> Record:
    table = value.entries()
    ranks = [[span.items(count=3) for span in rank.items()] for rank in table["spans"].items()]
    spans = [[(name.text(), begin.number(), length.number()) for name, begin, length in rank] for rank in ranks]
    lists = {key: _numbers(table[key].plain_items()) for key in ("data", "total")}
    if not len(spans) == len(lists["data"]) == len(lists["total"]):
        value.refuse("must have as many items in each list")
    return {"step": table["step"].integer(), "spans": spans, **lists}


def _pipeline(value: Value) -> Record:
    """Returns the summary, and of each action kind, micro-batch, rank, stage, start and end."""
    table = value.table("summary", "actions")
    actions: list[tuple[str, int, int, int, int, int]] = []
    for item in table["actions"].items():
        rank, kind, stage, microbatch, start, end = item.items(count=6)
        index = 0 if microbatch.value is None else microbatch.integer()
        actions.append((kind.text(), index, rank.integer(), stage.integer(), start.integer(), end.integer()))
    return {"summary": table["summary"].text(), "actions": actions}


def _loads(value: Value) -> dict[str, list[float]]:
    tables = value.entries()["loads"].entries()
    return {name: [each.number(low=0, high=MAX_NUMBER) for each in load.items()] for name, load in tables.items()}


def _collectives(value: Value) -> list[Record]:
    rows = []
    for item in value.items():
        row = item.table("axis", "collective", "layer", "implicit", "count", "bytes", "exposed")
        texts = {key: row[key].text() for key in ("axis", "collective", "layer")}
        exposed = row["exposed"]
        counts = {key: row[key].integer() for key in ("count", "bytes")}
        rows.append({**texts, **counts, "exposed": None if exposed.value is None else exposed.integer()})
    return rows


def as_text(value: object, *, max_chars: int = 300) -> str:
    """Returns an option or number as short text; nothing for None."""
    value = f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else value
    value = f"{value:.0f}" if isinstance(value, float) else value
    value = "" if value is None else value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."
