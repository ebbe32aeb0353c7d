"""Checks of what replica groups record of their attempts at steps: every sample counts once.

Each rank writes a line when it starts, for the samples of an attempt, and when an attempt is committed or left.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.support.runs import Row, read_json_lines

Records = dict[str, list[Row]]
"""Lines by file, in the order in which they were written."""
Attempt = tuple[int, int]
"""A step and its quorum."""


def counted_attempts(records: Records) -> dict[int, Attempt]:
    """Returns, by step, the attempt that counts: the last one of the last step, and those that it results from.

    Groups on both sides of a network partition may commit a step, each in a quorum of its own; one of them gives it up.
    Where all groups of a quorum started from a checkpoint, the last attempt at the step of the checkpoint counts.
    """
    times: dict[Attempt, float] = {}
    before: dict[Attempt, Attempt] = {}
    for lines in records.values():
        last: Attempt | None = None
        for line in lines:
            if "started" in line or "healed" in line:
                last = None
            elif line.get("committed"):
                attempt = (line["step"], line["quorum"])
                times[attempt] = max(line["time"], times.get(attempt, 0.0))
                if last is not None and last[0] == attempt[0] - 1:
                    before[attempt] = last
                last = attempt
    counted: dict[int, Attempt] = {}
    for step in sorted({step for step, _ in times}, reverse=True):
        latest = max((attempt for attempt in times if attempt[0] == step), key=lambda attempt: times[attempt])
        counted[step] = before.get(counted.get(step + 1, (0, 0)), latest)
    return counted


def committed_once(records: Records, *, steps: int, rows: int) -> list[str]:
    """Returns what is wrong with the samples that were committed; nothing if each was committed once."""
    wrong = []
    samples: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    counted = counted_attempts(records)
    for name, lines in records.items():
        last = 0
        for line in lines:
            if "started" in line:
                last = 0
            elif "rows" in line:
                samples[line["step"], line["quorum"]].add((line["rows"][0], line["rows"][1]))
            elif line.get("committed"):
                if line["step"] <= last:
                    wrong.append(f"{name}: step {line['step']} is committed after step {last}")
                last = line["step"]
    for step in range(1, steps + 1):
        if step not in counted:
            wrong.append(f"step {step} was not committed")
            continue
        found = sorted(row for start, stop in samples[counted[step]] for row in range(start, stop))
        if found != list(range((step - 1) * rows, step * rows)):
            wrong.append(f"step {step}: samples {found}")
    return wrong


class GroupResults:
    """What the replica groups of a run wrote to `folder`, when they started, and when they died."""

    def __init__(self, folder: Path, *, groups: int) -> None:
        self.folder = folder
        self.groups = groups
        self.starts: list[tuple[float, int]] = []
        """Time and group of each."""
        self.deaths: list[tuple[float, int, list[int | None]]] = []
        """Time, group and exit codes of each."""

    def log_of(self, group: int) -> str:
        """Returns what rank 0 of a group has printed in all its starts."""
        return (self.folder / f"group{group}.rank0.log").read_text()

    @property
    def log(self) -> str:
        """What all ranks have printed, without the lines of steps."""
        files = sorted(self.folder.glob("group*.log"))
        lines = [f"{file.stem}: {line}" for file in files for line in file.read_text().splitlines()]
        return "\n".join(line for line in lines if "  loss " not in line)

    def step_rows(self, group: int) -> list[Row]:
        """Returns the rows of steps in a group's metrics.jsonl."""
        file = self.folder / "run" / f"replica-{group}" / "metrics.jsonl"
        return [row for row in read_json_lines(file) if "loss" in row]

    def step_of(self, group: int) -> int:
        """Returns the last step that a group has logged."""
        return max((row["step"] for row in self.step_rows(group)), default=0)

    @property
    def losses(self) -> dict[int, float]:
        """Losses by step; all groups must agree to the last bit."""
        found: dict[int, float] = {}
        for row in (row for group in range(self.groups) for row in self.step_rows(group)):
            assert found.setdefault(row["step"], row["loss"]) == row["loss"], f"groups differ: {row}"
        return found

    def digests(self, prefix: str = "", *, groups: Sequence[int] | None = None) -> dict[int, set[str]]:
        """Returns, by rank, the digests of state at the end; one each where all groups have the same bits.

        `prefix` selects tensors by their name, such as "model/"; `groups` restricts the groups.
        """
        found: dict[int, set[str]] = defaultdict(set)
        chosen = range(self.groups) if groups is None else groups
        for file in (file for group in chosen for file in self.folder.glob(f"digests.{group}.*")):
            tensors = json.loads(file.read_text())
            found[int(file.suffix[1:])].add(str([each for each in tensors.items() if each[0].startswith(prefix)]))
        return dict(found)

    def records(self) -> Records:
        """Returns what all ranks of all replica groups recorded of samples and commits."""
        files = sorted((self.folder / "run").glob("replica-*/rows.rank*.jsonl"))
        return {f"{file.parent.name}/{file.name}": read_json_lines(file) for file in files}

    def gaps(self, group: int) -> list[tuple[float, float]]:
        """Returns the times of each two successive commits of one process of this group."""
        found: list[tuple[float, float]] = []
        last: float | None = None
        for line in self.records().get(f"replica-{group}/rows.rank0.jsonl", []):
            if "started" in line:
                last = None
            elif line.get("committed"):
                if last is not None:
                    found.append((last, line["time"]))
                last = line["time"]
        return found

    def wrong_rows(self) -> list[str]:
        """Returns what is wrong with the steps in each metrics.jsonl: the group's commits that count, once, in order.

        A group may die after it commits a step and before it logs it, once a death.
        """
        wrong = []
        records = self.records()
        counted = set(counted_attempts(records).values())
        for group in range(self.groups):
            logged = [row["step"] for row in self.step_rows(group)]
            lines = records.get(f"replica-{group}/rows.rank0.jsonl", [])
            own = {
                line["step"] for line in lines if line.get("committed") and (line["step"], line["quorum"]) in counted
            }
            deaths = sum(dead == group for _, dead, _ in self.deaths)
            if logged != sorted(set(logged)) or set(logged) - own or len(own - set(logged)) > deaths:
                wrong.append(f"metrics of group {group}: {logged}, but committed were {sorted(own)}")
        return wrong
