"""Charts of the report, as plain data of plotly.js: traces and layouts.

Names from a run's files are escaped, because plotly.js reads some HTML in text.
"""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import numpy as np

from torchtitan_clone.observe.goodput import EVENT, KINDS
from torchtitan_clone.observe.records import RECOVERED, REWOUND, SAVED
from torchtitan_clone.tools.report_data import Record, RunData, Series, as_text, number

MAX_MARKS = 300
MAX_BARS = 3_000
MAX_RANKS = 64
SMOOTHED = 0.02
"""Share of the rows over which the smoothed loss is a mean."""
HISTOGRAM_BINS = 60
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
Trace = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart; `curves` have the x values of steps, tokens and hours, between which the page switches."""

    title: str
    traces: list[Trace]
    layout: Mapping[str, object]
    is_over_steps: bool = False


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The columns of one chart over the steps, as a pattern of their names."""

    title: str
    unit: str
    pattern: str


CURVES = [
    Curves(title="Loss by source", unit="nats per token", pattern="(validation_)?loss/.*"),
    Curves(title="Bits per byte by source", unit="bits per byte", pattern="(validation_)?bits_per_byte/.*"),
    Curves(title="Learning rate", unit="learning rate", pattern="lr"),
    Curves(title="Throughput", unit="tokens per second", pattern="tokens_per_second"),
    Curves(title="Computation", unit="TFLOP/s of all devices", pattern="tflops_per_second"),
    Curves(title="Model FLOPs utilization", unit="%", pattern="mfu_percent"),
    Curves(title="Wait for data", unit="% of the step", pattern="data_wait"),
    Curves(title="Peak memory of rank 0", unit="GiB", pattern="memory_gib"),
    Curves(title="Share of trained tokens by source", unit="%", pattern="(share|target)/.*"),
    Curves(title="Epochs by source", unit="epochs", pattern="epochs/.*"),
    Curves(title="Balance of experts", unit="see the names", pattern="router/.*"),
    Curves(title="Auxiliary losses", unit="per token", pattern="auxiliary/.*"),
    Curves(title="Evaluations", unit="score", pattern="evaluation/.*"),
]


def all_charts(runs: Sequence[RunData], *, points: int) -> Iterator[Chart]:
    """Yields the charts for which the runs have data; a curve has about `points` points."""
    columns = {run.name: {**run.columns, **_derived(run)} for run in runs}
    yield _losses(runs, points=points)
    yield _grad_norms(runs, points=points)
    for curves in CURVES:
        traces = [
            _curve(run, columns[run.name][key], name=_label(runs, run, key), points=points)
            for run in runs
            for key in columns[run.name]
            if re.fullmatch(curves.pattern, key)
        ]
        yield _over_steps(curves.title, traces, unit=curves.unit)
    yield _step_times(runs)
    yield _goodput(runs)
    yield _history(runs, points=points)
    yield _saves(runs)
    for run in runs:
        for chart in (_timeline(run), _rank_seconds(run), _pipeline(run), _collectives(run), _expert_loads(run)):
            yield replace(chart, title=f"{chart.title}: {_escaped(run.name)}") if len(runs) > 1 else chart


# ---------------------------------------------------------------- curves over the steps


def kept_indices(values: np.ndarray, *, points: int) -> np.ndarray:
    """Returns the indices of the least and the greatest value of each of points / 2 bins of equally many rows."""
    if len(values) <= points:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), points // 2 + 1).astype(int)
    bins = list(pairwise(edges))
    kept = [first + find(values[first:last]) for first, last in bins for find in (np.argmin, np.argmax)]
    return np.unique([0, *kept, len(values) - 1])


def _derived(run: RunData) -> dict[str, Series]:
    """Returns columns that follow from others: the wait for data, and the share of each source in the tokens."""
    found: dict[str, Series] = {}
    seconds, waits = run.columns.get("step_seconds"), run.columns.get("data_seconds")
    if seconds is not None and waits is not None and len(seconds.steps) == len(waits.steps):
        share = 100 * waits.values / np.maximum(seconds.values, 1e-9)
        found["data_wait"] = Series(steps=seconds.steps, times=seconds.times, values=share)
    sources = {key.removeprefix("tokens/"): each for key, each in run.columns.items() if key.startswith("tokens/")}
    sizes = {len(each.steps) for each in sources.values()}
    if len(sizes) != 1:
        return found
    total = np.maximum(sum((each.values for each in sources.values()), np.zeros(sizes.pop())), 1)
    for name, each in sources.items():
        found[f"share/{name}"] = Series(steps=each.steps, times=each.times, values=100 * each.values / total)
    weights = _weights(run)
    if not run.options.get("data.stages") and sources.keys() == weights.keys():
        ends = np.array([True, *[False] * (len(total) - 2), True])[: len(total)]
        for name, each in sources.items():
            line = each.where(ends)
            percent = np.full(len(line.steps), 100 * weights[name] / max(sum(weights.values()), 1e-9))
            found[f"target/{name}"] = Series(steps=line.steps, times=line.times, values=percent)
    return found


def _weights(run: RunData) -> dict[str, float]:
    """Returns the weight of each source of config.toml."""
    sources = run.options.get("data.sources")
    tables = [each for each in sources if isinstance(each, dict)] if isinstance(sources, list) else []
    return {str(table.get("name")): number(table, "weight") if "weight" in table else 1.0 for table in tables}


def _curve(run: RunData, series: Series, *, name: str, points: int, **style: object) -> Trace:
    """Returns a line; `xs` are its x values in each unit."""
    kept = kept_indices(series.values, points=points)
    few = {"mode": "lines+markers"} if len(kept) <= 50 else {"mode": "lines"}
    y = _rounded(series.values[kept])
    return {"type": "scatter", "name": name, "xs": _xs(run, series, kept), "y": y, **few, **style}


def _marks(run: RunData, series: Series, *, name: str, symbol: str, color: str) -> Trace:
    """Returns a mark for each row, or for rows at equal distances where there are too many."""
    kept = np.unique(np.linspace(0, len(series.steps) - 1, min(len(series.steps), MAX_MARKS)).astype(int))
    shown = f"{len(series.steps):,} rows" if len(kept) == len(series.steps) else f"{MAX_MARKS} of {len(series.steps):,}"
    marker = {"symbol": symbol, "color": color, "size": 7}
    return {
        "type": "scatter", "mode": "markers", "marker": marker, "name": f"{name} ({shown})",
        "xs": _xs(run, series, kept), "y": _rounded(series.values[kept]),
    }  # fmt: skip


def _xs(run: RunData, series: Series, kept: np.ndarray) -> dict[str, list[float]]:
    """Returns the steps, tokens and hours of these rows; tokens of rows without them are interpolated."""
    steps = series.steps[kept]
    xs = {"steps": _rounded(steps, digits=12), "hours": _rounded((series.times[kept] - run.first_time) / 3600)}
    if tokens := run.columns.get("tokens_seen"):
        xs["tokens"] = _rounded(np.interp(steps, tokens.steps, tokens.values), digits=9)
    return xs


def _over_steps(title: str, traces: list[Trace], *, unit: str, is_log: bool = False) -> Chart:
    y = {"title": {"text": unit}, **({"type": "log"} if is_log else {})}
    return Chart(title=title, traces=traces, layout={"yaxis": y}, is_over_steps=True)


def _losses(runs: Sequence[RunData], *, points: int) -> Chart:
    traces = []
    for run in runs:
        if loss := run.columns.get("loss"):
            width = max(1, round(SMOOTHED * len(loss.values)))
            style = {"opacity": 0.4, "line": {"width": 1}} if width > 1 else {}
            traces.append(_curve(run, loss, name=_label(runs, run, "training"), points=points, **style))
            if width > 1:
                name = _label(runs, run, f"training, mean of {width:,} rows")
                traces.append(_curve(run, _running_mean(loss, width=width), name=name, points=points))
        if validation := run.columns.get("validation_loss"):
            name = _label(runs, run, "validation")
            traces.append(_curve(run, validation, name=name, points=points, mode="lines+markers"))
    return _over_steps("Loss", traces, unit="nats per token")


def _running_mean(series: Series, *, width: int) -> Series:
    """Returns the mean of each row and the width - 1 before it, from the first row that has so many."""
    sums = np.cumsum(np.concatenate([[0.0], series.values]))
    means = (sums[width:] - sums[:-width]) / width
    return Series(steps=series.steps[width - 1 :], times=series.times[width - 1 :], values=means)


def _grad_norms(runs: Sequence[RunData], *, points: int) -> Chart:
    traces = []
    for run in runs:
        norms = run.columns.get("grad_norm")
        norms = norms and norms.where(norms.values > 0)
        if norms is None or not len(norms.steps):
            continue
        traces.append(_curve(run, norms, name=_label(runs, run, "gradient norm"), points=points))
        clipped = run.columns.get("clipped")
        if clipped is not None and clipped.values.any():
            rows = norms.where(np.isin(norms.steps, clipped.steps[clipped.values > 0]))
            traces.append(_marks(run, rows, name=_label(runs, run, "clipped"), symbol="circle-open", color="#e8a33d"))
        counts = run.columns.get("skipped_steps")
        if counts is not None and counts.values.any():
            rows = counts.where(np.diff(counts.values, prepend=0.0) > 0)
            at = np.interp(rows.steps, norms.steps, norms.values)  # the norm of a skipped step may be no number
            rows = Series(steps=rows.steps, times=rows.times, values=at)
            traces.append(_marks(run, rows, name=_label(runs, run, "skipped"), symbol="x", color="#c0392b"))
    return _over_steps("Gradient norm before clipping", traces, unit="norm (log)", is_log=True)


# ---------------------------------------------------------------- time and checkpoints


def _step_times(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    style = {"type": "scatter", "mode": "lines", "line": {"shape": "hvh"}, "fill": "tozeroy"}
    for run in runs:
        if series := run.columns.get("step_seconds"):
            limit = np.quantile(series.values, 0.999 if len(series.values) >= 1000 else 1)
            shown = series.values[series.values <= limit]
            around = 1e-9 + 1e-4 * np.abs(shown).max()  # equal values, or almost, have bins too
            between = (shown.min() - around, shown.max() + around)
            counts, edges = np.histogram(shown, bins=min(HISTOGRAM_BINS, 4 + len(shown) // 10), range=between)
            beyond = len(series.values) - len(shown)
            name = _label(runs, run, f"{beyond:,} rows are longer" if beyond else "all rows")
            x = _rounded((edges[1:] + edges[:-1]) / 2)
            traces.append({**style, "name": name, "x": x, "y": _rounded(100 * counts / len(series.values))})
    layout = _axes("seconds per step, mean of a row", "% of the rows")
    return Chart(title="Distribution of step times", traces=traces, layout=layout)


def _goodput(runs: Sequence[RunData]) -> Chart:
    last = {_escaped(run.name): run.events_named(EVENT)[-1] for run in runs if run.events_named(EVENT)}
    traces: list[Trace] = [
        {
            "type": "bar", "orientation": "h", "name": kind.replace("_", " "), "y": list(last),
            "x": [round(number(row, f"{kind}_seconds"), 3) for row in last.values()],
        }
        for kind in ("progress", *KINDS)
        if any(number(row, f"{kind}_seconds") for row in last.values())
    ]  # fmt: skip
    shares = ", ".join(f"{number(row, 'goodput_percent'):.1f} %" for row in last.values())
    title = f"Goodput over all starts: {shares}"
    layout = {**_axes("seconds", ""), "barmode": "stack"}
    return Chart(title=title, traces=traces, layout=layout)


def _history(runs: Sequence[RunData], *, points: int) -> Chart:
    """Returns the steps over time, with the starts and ends of processes, saves and recoveries."""
    traces: list[Trace] = []
    for run in runs:
        series = run.columns.get("loss")
        if series is None:
            continue
        kept = np.unique(np.linspace(0, len(series.steps) - 1, points).astype(int))
        hours = _rounded((series.times[kept] - run.first_time) / 3600)
        name = _label(runs, run, "steps")
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": hours, "y": _rounded(series.steps[kept])})
        ends = [start for start in run.starts if "last_time" in start and not start.get("was_complete")]
        marks = {
            "start": ("triangle-up", [(number(start, "time"), number(start, "after_step")) for start in run.starts]),
            "end or death": ("x", [(number(start, "last_time"), number(start, "last_step")) for start in ends]),
            "save": ("diamond", [(number(row, "time"), number(row, "step")) for row in run.events_named(SAVED)]),
            "recovery": ("star", [(number(row, "time"), number(row, "step")) for row in run.events_named(RECOVERED)]),
            "rewind": (
                "triangle-down",
                [(number(row, "time"), number(row, "step")) for row in run.events_named(REWOUND)],
            ),
        }
        for what, (symbol, places) in marks.items():
            if places := places[-MAX_MARKS:]:
                x = [round((time - run.first_time) / 3600, 6) for time, _ in places]
                mark = {"type": "scatter", "mode": "markers", "marker": {"symbol": symbol, "size": 10}}
                traces.append({**mark, "name": _label(runs, run, what), "x": x, "y": [step for _, step in places]})
    return Chart(title="Starts, deaths, saves and recoveries", traces=traces, layout=_axes("hours", "step"))


def _saves(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for run in runs:
        saves = run.events_named(SAVED)[-MAX_MARKS:]
        steps = [number(save, "step") for save in saves]
        kinds = {"seconds": "total", "staging_seconds": "staging", "blocked_seconds": "training blocked"}
        for key, what in kinds.items():
            y = [round(number(save, key), 4) for save in saves]
            traces += [{"type": "bar", "name": _label(runs, run, what), "x": steps, "y": y}] if saves else []
    layout = {**_axes("step", "seconds"), "barmode": "group"}
    return Chart(title="Cost of checkpoints", traces=traces, layout=layout)


# ---------------------------------------------------------------- charts of one run


def _timeline(run: RunData) -> Chart:
    """Returns the measured step: a bar for each rank, with its collectives on top of the computation."""
    title = f"Step {as_text(run.timeline.get('step'))} by rank, each collective waited for"
    if not run.timeline:
        return Chart(title=title, traces=[], layout={})
    totals, waits = (cast("list[float]", run.timeline[key])[:MAX_RANKS] for key in ("total", "data"))
    ranks = [f"rank {rank}" for rank in range(len(totals))]
    bar = {"type": "bar", "orientation": "h", "hoverinfo": "name+x+y"}
    traces: list[Trace] = [
        {**bar, "name": "computation and rest", "y": ranks, "x": totals, "marker": {"color": "#d9dee5"}},
        {**bar, "name": "data", "y": ranks, "x": waits, "marker": {"color": "#6c7a89"}},
    ]
    spans = cast("list[list[tuple[str, float, float]]]", run.timeline["spans"])[:MAX_RANKS]
    longest = sorted(((*span, rank) for rank, own in enumerate(spans) for span in own), key=lambda each: -each[2])
    for name in sorted({each[0] for each in longest[:MAX_BARS]}):
        own = [each for each in longest[:MAX_BARS] if each[0] == name]
        places = {"y": [ranks[each[3]] for each in own], "base": [each[1] for each in own]}
        traces.append({**bar, "name": _escaped(name), **places, "x": [each[2] for each in own]})
    layout = {**_axes("seconds", ""), "barmode": "overlay"}
    return Chart(title=title, traces=traces, layout=layout)


def _rank_seconds(run: RunData) -> Chart:
    """Returns the seconds of each rank in the measured steps, without data and communication."""
    columns: dict[float, list[float | None]] = {}
    for record in run.breakdowns[-MAX_MARKS:]:
        lists = [record.get(key) for key in ("total", "data", "communication")]
        if all(isinstance(each, list) for each in lists):
            parts = zip(*cast("list[list[float | None]]", lists), strict=False)
            own = [None if total is None else total - (data or 0) - (sent or 0) for total, data, sent in parts]
            columns[number(record, "step")] = own[:MAX_RANKS]
    height = max(map(len, columns.values()), default=0)
    z = [[column[rank] if rank < len(column) else None for column in columns.values()] for rank in range(height)]
    ranks = [f"rank {rank}" for rank in range(height)]
    trace = {"type": "heatmap", "x": [f"{step:.0f}" for step in columns], "y": ranks, "z": z, "colorscale": "Viridis"}
    layout = {"xaxis": {"type": "category", "title": {"text": "step"}}}
    title = "Computation of each rank in measured steps, in seconds"
    return Chart(title=title, traces=[trace] if z else [], layout=layout)


def _pipeline(run: RunData) -> Chart:
    actions = cast("list[tuple[str, int, int, int, int, int]]", run.pipeline.get("actions", []))[:MAX_BARS]
    traces: list[Trace] = []
    for kind in dict.fromkeys(action[0] for action in actions):
        own = [action for action in actions if action[0] == kind]
        texts = [f"{microbatch}<br>stage {stage}" for _, microbatch, _, stage, _, _ in own]
        traces.append({
            "type": "bar", "orientation": "h", "name": KIND_NAMES.get(kind, _escaped(kind)), "hovertext": texts,
            "y": [f"rank {action[2]}" for action in own], "base": [action[4] for action in own],
            "x": [action[5] - action[4] for action in own], "text": [str(action[1]) for action in own],
            "textposition": "inside", "marker": {"line": {"width": 1, "color": "white"}},
        })  # fmt: skip
    layout = {**_axes("time, in forwards of one stage", ""), "barmode": "overlay"}
    layout["yaxis"] = {"autorange": "reversed", "type": "category"}
    title = f"Pipeline schedule: {_escaped(as_text(run.pipeline.get('summary', '')))}"
    return Chart(title=title, traces=traces, layout=layout)


def _collectives(run: RunData) -> Chart:
    """Returns the bytes of a step by layer and axis, as the mean over the ranks that were traced."""
    sums: dict[str, dict[str, float]] = {}
    for row in (row for rows in run.collectives for row in rows):
        name, layer = f"{row['axis']} {row['collective']}", _escaped(as_text(row["layer"]))
        by_layer = sums.setdefault(_escaped(name), {})
        by_layer[layer] = by_layer.get(layer, 0) + number(row, "bytes") / 2**20 / len(run.collectives)
    bar = {"type": "bar", "orientation": "h"}
    traces: list[Trace] = [
        {**bar, "name": name, "y": list(by_layer), "x": [round(mib, 4) for mib in by_layer.values()]}
        for name, by_layer in sums.items()
    ]
    layout = {**_axes("MiB per rank and step", ""), "barmode": "stack"}
    title = f"Collectives of a step by layer and axis, {len(run.collectives)} ranks traced"
    return Chart(title=title, traces=traces, layout=layout)


def _expert_loads(run: RunData) -> Chart:
    loads = {_escaped(name): np.array(load) / max(np.mean(load), 1e-9) for name, load in run.loads.items() if load}
    z = [_rounded(load, digits=3) for load in loads.values()]
    trace = {"type": "heatmap", "y": list(loads), "z": z, "zmin": 0, "colorscale": "Viridis"}
    layout = _axes("expert", "")
    return Chart(title="Tokens of each expert over the mean", traces=[trace] if z else [], layout=layout)


def _axes(x: str, y: str) -> Record:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _label(runs: Sequence[RunData], run: RunData, text: str) -> str:
    return _escaped(text if len(runs) == 1 else f"{run.name}: {text}")


def _escaped(text: str) -> str:
    return html.escape(as_text(text, max_chars=80))


def _rounded(values: np.ndarray, *, digits: int = 5) -> list[float]:
    """Returns the values with so many significant digits, which keeps the page small."""
    found = [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in found]
