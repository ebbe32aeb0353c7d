"""Compares the losses that variants of a run reach, and after how many steps and seconds, with several seeds.

    python benchmarks/time_to_loss.py adamw= muon=--job.config_file=train_configs/debug_muon.toml
    python benchmarks/time_to_loss.py slow= fast=--optimizer.lr=6e-3 --rounds 2 --image a.svg -- --training.steps=40

A variant is a name and its options; options after `--` are those of all variants. Seeds are 0, 1, ... as many as
rounds. Runs follow one another, in an order that changes, each with all threads. "loss" is the last held-out one, a
mean over seeds with its least and greatest; seconds are those of training alone, without start, validation and saves.
"of steps" and "of seconds" are the shares of the first variant's steps and seconds after which the held-out loss is at
most its last one with the same seed; medians.
Defaults: train_configs/debug_model.toml without checkpoints, validated every 12 steps.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.curves import Curve, draw
from benchmarks.turns import ROOT, alternate, processor_name
from benchmarks.variants import parse, run_to_end

COMMON = ["--checkpoint.enable=false", "--metrics.log_freq=1", "--validation.freq=12"]
COLORS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Held-out losses by step, and the seconds of training until then."""

    losses: Mapping[int, float]
    seconds: Mapping[int, float]

    def reach(self, loss: float) -> int | None:
        """Returns the first step at which the held-out loss is at most this."""
        return min((step for step, each in self.losses.items() if each <= loss), default=None)


def read(file: Path) -> Run:
    """Reads metrics.jsonl, which has a line for each step."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    taken = [row for row in rows if "step_seconds" in row]
    until = dict(zip((r["step"] for r in taken), itertools.accumulate(r["step_seconds"] for r in taken), strict=True))
    losses = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    return Run(losses=losses, seconds={step: until[step] for step in losses})


def train(options: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> Run:
    """Trains to the end in a folder."""
    default = f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}"
    own = [f"--job.dump_folder={folder}", f"--job.run_name={folder.name}"]
    run_to_end([default, *COMMON, *own, *options], environment=environment)
    return read(folder / folder.name / "metrics.jsonl")


def describe(runs: Sequence[Run], first: Sequence[Run]) -> str:
    """Returns the columns of a variant."""
    ends = [run.losses[max(run.losses)] for run in runs]
    loss = f"{statistics.mean(ends):.4f} ({min(ends):.3f}-{max(ends):.3f})"
    steps, seconds = max(runs[0].losses), statistics.median(run.seconds[max(run.losses)] for run in runs)
    reached = [run.reach(other.losses[max(other.losses)]) for run, other in zip(runs, first, strict=True)]
    if None in reached:
        return f"{loss:>24}{steps:8}{seconds:10.1f}{'not reached':>24}"
    shares = [
        (step / max(other.losses), run.seconds[step] / other.seconds[max(other.losses)])
        for run, other, step in zip(runs, first, reached, strict=True)
        if step is not None
    ]
    of_steps, of_seconds = (statistics.median(each) for each in zip(*shares, strict=True))
    return f"{loss:>24}{steps:8}{seconds:10.1f}{of_steps:12.3f}{of_seconds:12.3f}"


def main() -> None:
    """Trains and prints a table."""
    _, choices, common = parse(__doc__, rounds=3, more={"--image": "draw the losses to this .svg file"})
    environment = {**os.environ, "OMP_NUM_THREADS": str(choices.threads)}
    print(f"{processor_name(uses_gpu=True)}; {choices.threads} threads {' '.join(common)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        seeds = {each: itertools.count() for each, _ in choices.variants}

        def take(name_of: str, own: Sequence[str]) -> Run:
            seed = next(seeds[name_of])
            options = [*common, *own, f"--debug.seed={seed}"]
            return train(options, folder=Path(name, f"{name_of}-{seed}"), environment=environment)

        taken = alternate(
            {each: lambda e=each, o=own: take(e, o) for each, own in choices.variants}, rounds=choices.rounds
        )
    first, *_ = taken.values()
    print(f"{'':16}{'loss':>24}{'steps':>8}{'seconds':>10}{'of steps':>12}{'of seconds':>12}")
    for each, runs in taken.items():
        print(f"{each:16}{describe(runs, first)}")
    if choices.json:
        losses = {each: [{"losses": r.losses, "seconds": r.seconds} for r in runs] for each, runs in taken.items()}
        choices.json.write_text(
            json.dumps({"processor": processor_name(), "options": common, "runs": losses}, indent=1)
        )
    if choices.image:
        curves = [
            Curve(name=each, values=run.losses, color=color)
            for (each, runs), color in zip(taken.items(), itertools.cycle(COLORS), strict=False)
            for run in runs
        ]
        choices.image.write_text(draw(curves, caption="Held-out loss by seed"))


if __name__ == "__main__":
    main()
