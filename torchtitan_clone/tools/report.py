"""The report: one HTML page about one or several runs, which opens without a network.

Data enters the page as JSON without "<", and text escaped; scripts other than those of the page do not run.
"""

import html
import importlib.util
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from string import Template

from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.messages import install
from torchtitan_clone.config.reader import flat
from torchtitan_clone.observe.goodput import EVENT
from torchtitan_clone.observe.records import SAVED
from torchtitan_clone.tools.report_charts import Chart, all_charts
from torchtitan_clone.tools.report_data import RunData, as_text, number, read_run, run_folders

MAX_DATA_BYTES = 1_000_000
"""Of the charts; plotly.js has 4.7 MB."""
POINTS = (1_000, 400, 150, 50)
"""Points of a curve that are tried, until the data is small enough."""
MAX_ROWS = 40
"""Of one run."""
MAX_TABLE = 400
MAX_CELL = 600
"""Characters of a cell."""
_PAGE = Path(__file__).with_name("report_page.html")


def build_report(folders: Sequence[Path]) -> str:
    """Returns the page about these run folders. ConfigError if one has no metrics, or plotly is not installed."""
    script = _plotly_script()
    places = [(place, folder) for folder in folders for place in run_folders(folder)]
    names = unique_names([_name(place, folder=folder) for place, folder in places])
    runs = [read_run(place, name=name) for name, (place, _) in zip(names, places, strict=True)]
    data, points, charts = _charts_that_fit(runs)
    rows = sum(run.num_rows for run in runs)
    skipped = sum(run.num_skipped for run in runs)
    title = ", ".join(run.name for run in runs)
    notes = [
        f"{rows:,} rows of metrics read, {skipped:,} incomplete or malformed lines and values skipped.",
        f"A curve of more than {points:,} rows shows the least and the greatest value of {points // 2:,} equal parts.",
        f"Written {_utc(time.time())}.",
    ]
    page = Template(_PAGE.read_text()).substitute(
        title=html.escape(title),
        notes=html.escape(" ".join(notes)),
        summary=_summary(runs),
        charts="".join(f'<figure id="chart{index}"></figure>' for index in range(charts)),
        tables="".join([_saves(runs), _collectives(runs), _texts(runs), _options(runs), _environments(runs)]),
        nonce=secrets.token_urlsafe(16),
        plotly=script,
        data=data,
    )
    return page.encode(errors="replace").decode()  # JSON and names of files can contain halves of surrogate pairs


def _plotly_script() -> str:
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError(f"the package plotly is not installed; {install('plotly')}")
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _name(place: Path, *, folder: Path) -> str:
    name = folder.resolve().name
    return name if place == folder else f"{name}/{place.name}"


def unique_names(names: Sequence[str]) -> list[str]:
    """Returns the names, with a number after each that occurs before."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name} ({number})" for number in count(2))
        found.append(name if name not in found else next(each for each in numbered if each not in found))
    return found


def _charts_that_fit(runs: Sequence[RunData]) -> tuple[str, int, int]:
    """Returns the charts as JSON, the points of a curve, and the number of charts. ConfigError if too large."""
    for points in POINTS:
        charts = [_as_data(chart) for chart in all_charts(runs, points=points) if chart.traces]
        data = json.dumps(charts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        if len(data) <= MAX_DATA_BYTES:
            return data, points, len(charts)
    raise ConfigError(f"{len(runs)} runs have too many curves for one page; give fewer folders")


def _as_data(chart: Chart) -> dict[str, object]:
    return {"title": chart.title, "traces": chart.traces, "layout": chart.layout, "overSteps": chart.is_over_steps}


# ---------------------------------------------------------------- tables


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table, nothing without rows."""
    cells = [[html.escape(as_text(cell, max_chars=MAX_CELL)) for cell in row] for row in islice(rows, MAX_TABLE)]
    if not cells:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
    return f"<h2>{html.escape(title)}</h2><div><table><tr>{head}</tr>{body}</table></div>"


def _summary(runs: Sequence[RunData]) -> str:
    return _table(
        "Runs",
        ["run", "step", "of", "training loss", "validation loss", "tokens/s", "goodput %", "starts", "hours"],
        [_summary_row(run) for run in runs],
    )


def _summary_row(run: RunData) -> list[object]:
    last = {key: series.values[-1].item() for key, series in run.columns.items()}
    times = [series.times[-1].item() for series in run.columns.values()]
    goodput = (run.events_named(EVENT) or [{}])[-1]
    shown = (f"{last[key]:,.4f}" if key in last else "" for key in ("loss", "validation_loss", "tokens_per_second"))
    step = int(max(series.steps[-1] for series in run.columns.values()))
    hours = f"{(max(times) - run.first_time) / 3600:,.3f}"
    starts = len(run.starts) or int(number(goodput, "starts"))
    total = run.options.get("training.steps", "")
    return [run.name, step, total, *shown, f"{number(goodput, 'goodput_percent'):.1f}", starts, hours]


def _saves(runs: Sequence[RunData]) -> str:
    keys = ("step", "seconds", "blocked_seconds", "staging_seconds")
    return _table(
        f"Checkpoints (the last {MAX_ROWS})",
        ["run", "step", "total seconds", "blocked seconds", "staging seconds", "MiB"],
        [
            [run.name, *(number(save, key) for key in keys), f"{number(save, 'bytes') / 2**20:,.2f}"]
            for run in runs
            for save in run.events_named(SAVED)[-MAX_ROWS:]
        ],
    )


def _collectives(runs: Sequence[RunData]) -> str:
    """Returns the collectives of the first traced rank of each run; those of the largest size."""
    keys = ("axis", "collective", "layer", "count", "exposed")
    return _table(
        "Collectives of a step, first traced rank",
        ["run", "axis", "collective", "layer", "calls", "exposed", "MiB"],
        [
            [run.name, *(row[key] for key in keys), f"{number(row, 'bytes') / 2**20:,.2f}"]
            for run in runs
            for rows in run.collectives[:1]
            for row in sorted(rows, key=lambda row: -number(row, "bytes"))[:MAX_ROWS]
        ],
    )


def _texts(runs: Sequence[RunData]) -> str:
    return _table("Samples", ["run", "step", "name", "text"], [[run.name, *text] for run in runs for text in run.texts])


def _options(runs: Sequence[RunData]) -> str:
    """Returns the options that differ from the defaults or between the runs."""
    defaults = flat(asdict(Config()))
    known = [run for run in runs if run.options]
    names = dict.fromkeys(name for run in known for name in run.options)
    rows = []
    for name in names:
        values = [run.options.get(name, defaults.get(name)) for run in known]
        if any(value != defaults.get(name) for value in values):
            differs = "differs" if any(value != values[0] for value in values) else ""
            rows.append([name, defaults.get(name), *values, *([differs] if len(known) > 1 else [])])
    header = ["option", "default", *(run.name for run in known), *(["between runs"] if len(known) > 1 else [])]
    return _table("Options that differ from the defaults", header, rows)


def _environments(runs: Sequence[RunData]) -> str:
    places = ("time", "after_step", "last_step", "last_time", "was_complete")
    starts = [(run.name, start) for run in runs for start in run.starts[-MAX_ROWS:]]
    keys = dict.fromkeys(key for _, start in starts for key in start if key not in places)
    rows = [
        [name, _utc(number(start, "time")), number(start, "after_step"), *(start.get(key, "") for key in keys)]
        for name, start in starts
    ]
    return _table("Starts and environment", ["run", "start", "after step", *keys], rows)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
