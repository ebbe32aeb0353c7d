"""Renders the tables of docs/benchmarks.md from benchmarks/results/*.json.

    python benchmarks/render.py            # rewrites the tables of the page
    python benchmarks/render.py --check    # exit code 1 if the page differs

A results file is named <date>-<processor>.json and has blocks of rows: the question that they answer, the command that
measured them, and the conditions under which it did. Of blocks that share question, processor and conditions the newest
is rendered. On the page a table follows its marker, <!-- table NAME -->, up to the next blank line.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"<!-- table ([\w-]+) -->\n(?:[^\n]+\n)*")
Record = Mapping[str, Any]
"""A row with the conditions, the date and the processor of its block."""


@dataclass(frozen=True, kw_only=True)
class Column:
    parts: Sequence[str]
    """Format strings of a record's fields, joined by commas; one whose fields are missing is left out."""
    where: Record


def column(*parts: str, **where: object) -> Column:
    return Column(parts=parts, where=where)


@dataclass(frozen=True, kw_only=True)
class Table:
    question: str
    labels: Sequence[str]
    """Fields of the first columns: records that agree in them are one row, "date" excepted."""
    columns: Mapping[str, Column | str]
    """The others by title, a string being the field; one without any value is left out."""


@dataclass(frozen=True, kw_only=True)
class Pivot:
    question: str
    labels: Sequence[str]
    by: str
    """The field whose values are the titles of the columns."""
    parts: Sequence[str]

    def table(self, records: Sequence[Record]) -> Table:
        values = dict.fromkeys(record[self.by] for record in records if record["question"] == self.question)
        columns = {value: column(*self.parts, **{self.by: value}) for value in values}
        return Table(question=self.question, labels=self.labels, columns=columns)


TIME, MEMORY, SPEED = "{time}", "{gib} GiB", "{tokens_per_s} tokens/s"
PEERS = ("nanoGPT", "litgpt", "torchtitan", "HF Trainer", "plain loop")
PLACE = ("processor", "date")
TABLES: dict[str, Table | Pivot] = {
    "peers": Table(
        question="peers",
        labels=(*PLACE, "run", "dtype"),
        columns={
            f"{size}: {program}": column(*parts, size=size, program=program)
            for size in ("16M", "120M")
            for program, parts in {
                "ours": (SPEED, MEMORY), "ours, tied": (MEMORY,), **dict.fromkeys(PEERS, (TIME, MEMORY)),
            }.items()
        },
    ),
    "allocator": Table(
        question="same allocator",
        labels=(*PLACE, "dtype"),
        columns={
            f"{size} {run}: {program}": column(TIME, size=size, run=run, program=program)
            for size in ("16M", "120M") for run in ("eager", "compiled") for program in PEERS
        },
    ),
    "less-memory": Table(
        question="less memory",
        labels=(*PLACE, "dtype", "ours"),
        columns={
            "speed, memory": column(SPEED, MEMORY, time=1),
            **{name: column(TIME, MEMORY, program=name) for name in PEERS},
        },
    ),
    "gpu": Table(
        question="gpu peers",
        labels=["model"],
        columns={
            "ours": column(SPEED, MEMORY, program="ours"),
            **{name: column(TIME, MEMORY, program=name) for name in ("ours, no graph", *PEERS, "products")},
        },
    ),
    "gpu-attention": Pivot(question="gpu attention", labels=["mask"], by="shape", parts=["{ms} ms", "{ratio} x"]),
    "gpu-sections": Pivot(question="gpu sections", labels=PLACE, by="section", parts=["{result}"]),
    "ranks": Pivot(question="ranks", labels=[*PLACE, "model"], by="axis", parts=["{ratio}", "{of_expected}"]),
    "goodput": Table(
        question="goodput",
        labels=["run"],
        columns={
            "steps": "steps",
            "trained twice": "repeated",
            "deaths": "deaths",
            "median step": "median_step",
            "goodput": "goodput",
            "goodput of survivors": "survivors",
        },
    ),
    "fault-grid": Pivot(
        question="fault grid", labels=PLACE, by="groups", parts=["{one}", "{two} s ({default_one}", "{default_two} s)"]
    ),
    "campaign": Pivot(
        question="campaign", labels=PLACE, by="scene", parts=["{runs} runs", "{faults} faults", "{wrong} wrong"]
    ),
    "generation": Pivot(
        question="generation", labels=PLACE, by="family", parts=["{ours}", "{transformers}", "{ratio}"]
    ),
    "checkpoint": Table(
        question="checkpoint",
        labels=["mode"],
        columns={
            "blocked, s": "blocked",
            "total, s": "total",
            "MB/s": "mb_per_s",
            "steps slower by": "slower",
            "memory, GiB": "gib",
        },
    ),
    "store": Table(
        question="store",
        labels=PLACE,
        columns={
            "state": "state",
            "blocked / synchronous save to the disk": "blocked",
            "rate of an upload / of a bare put": "upload",
            "received / needed by a resume on three ranks": "read",
        },
    ),
    "published": Table(
        question="memory, published",
        labels=["run"],
        columns={
            "GPUs": "gpus",
            "published": "published",
            "predicted, expandable segments": "expandable",
            "predicted, fixed segments": "fixed",
        },
    ),
    "memory-gpu": Pivot(question="memory, gpu", labels=["recomputation"], by="family", parts=["{mib}", "{error}"]),
    "memory-cpu": Pivot(question="memory, real", labels=PLACE, by="configuration", parts=["{mib}", "{error}"]),
    "data": Table(
        question="data",
        labels=PLACE,
        columns={
            "loader, M tokens/s: 1 source, 5": "loader",
            "start on 50 M tokens": "start_50m",
            "start on 10 G tokens": "start_10g",
            "preparing / `tokenizers`": "prepared",
        },
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page differs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    page = options.page.read_text()
    rendered = render_page(page, records=read_records(options.results))
    if rendered != page and options.check:
        print(
            f"error: the tables of {options.page} are not those of the results; run benchmarks/render.py",
            file=sys.stderr,
        )
        return 1
    if rendered != page:
        options.page.write_text(rendered)
    return 0


def read_records(folder: Path) -> list[Record]:
    """Returns the records of the newest block for each question, processor and set of conditions, oldest file first."""
    newest: dict[str, list[Record]] = {}
    for path in sorted(folder.glob("*.json")):
        file = json.loads(path.read_text(), parse_float=str)  # keeps the digits of a number
        for block in file["results"]:
            key = json.dumps([block["question"], file["processor"], block["conditions"]], sort_keys=True)
            common = {"question": block["question"], "processor": file["processor"], "date": file["date"]}
            newest[key] = [{**common, **block["conditions"], **row} for row in block["rows"]]
    return [record for records in newest.values() for record in records]


def render_page(page: str, *, records: Sequence[Record]) -> str:
    """Returns the page with its tables rendered; raises KeyError for the marker of an unknown table."""

    def render_marked(marker: re.Match[str]) -> str:
        table = TABLES[marker[1]]
        table = table.table(records) if isinstance(table, Pivot) else table
        return f"<!-- table {marker[1]} -->\n{render(table, records=records)}"

    return MARKER.sub(render_marked, page)


def render(table: Table, *, records: Sequence[Record]) -> str:
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        if record["question"] == table.question:
            key = tuple(record[field] for field in table.labels if field != "date")
            groups.setdefault(key, []).append(record)
    processors = [record["processor"] for record in records]
    columns = {title: column(f"{{{one}}}") if isinstance(one, str) else one for title, one in table.columns.items()}
    rows: list[tuple[list[str], dict[str, str]]] = []
    for group in sorted(groups.values(), key=lambda group: processors.index(group[0]["processor"])):
        used: list[Record] = []
        cells = {title: _cell(one, records=group, used=used) for title, one in columns.items()}
        first = {**group[0], "date": ", ".join(sorted({record["date"] for record in used}))}
        rows.append(([_text(first[field]) for field in table.labels], cells))
    titles = [title for title in columns if any(cells[title] for _, cells in rows)]
    if not rows:
        raise SystemExit(f"error: no results for the question {table.question!r}")
    lines = [[*table.labels, *titles], ["---"] * (len(table.labels) + len(titles))]
    lines += [[*labels, *(cells[title] for title in titles)] for labels, cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(column: Column, *, records: Sequence[Record], used: list[Record]) -> str:
    for record in records:
        values = {name: _text(value) for name, value in record.items()}
        parts = [part for part in column.parts if set(re.findall(r"{(.*?)}", part)) <= set(values)]
        if parts and all(record.get(name) == value for name, value in column.where.items()):
            used.append(record)
            return ", ".join(part.format_map(values) for part in parts)
    return ""


def _text(value: object) -> str:
    """Returns a number with its digits, and a median with its quartiles as "1.595 (1.53-1.83)"."""
    if isinstance(value, list):
        median, low, high = value
        return f"{median} ({low}-{high})"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
