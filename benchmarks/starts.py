"""Compares how long variants of a run take from the command to the end of their first step, with full caches.

    python benchmarks/starts.py eager= compiled=--compile.enable=true
    python benchmarks/starts.py eager= compiled=--compile.enable=true --rounds 10 -- --model.args.vocab_size=16384

A variant is a name and its options; options after `--` are those of all variants. Each starts once to fill the caches,
and then once in each round, in an order that changes. The table has medians of seconds, and
of the difference from the first variant in the same round with its quartiles. Defaults: one step of
train_configs/debug_model.toml without checkpoints and validation.
"""

import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import ROOT, Step, alternate, median_of, processor_name
from benchmarks.variants import parse, run_to_end

COMMON = [
    f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}", "--training.steps=1",
    "--lr_scheduler.warmup_steps=1", "--checkpoint.enable=false", "--validation.enable=false",
]  # fmt: skip


def start(options: Sequence[str], *, environment: Mapping[str, str]) -> Step:
    """Returns how long a run of these options takes, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run_to_end([*COMMON, f"--job.dump_folder={folder}", *options], environment=environment)


def main() -> None:
    """Measures and prints a table."""
    _, choices, common = parse(__doc__, rounds=6)
    environment = {**os.environ, "OMP_NUM_THREADS": str(choices.threads)}
    print(f"{processor_name(uses_gpu=True)}; {choices.threads} threads {shlex.join(common)}", flush=True)
    starts = {name: partial(start, [*common, *own], environment=environment) for name, own in choices.variants}
    alternate(starts, rounds=1)  # fills the caches
    taken = alternate(starts, rounds=choices.rounds)
    first, *_ = taken.values()
    for name, of_variant in taken.items():
        differences = [one["wall"] - other["wall"] for one, other in zip(of_variant, first, strict=True)]
        low, median, high = statistics.quantiles(differences)
        print(f"{name:22}{median_of(of_variant):8.2f} s {median:+8.2f} ({low:+.2f} to {high:+.2f})")
    if choices.json:
        choices.json.write_text(
            json.dumps({"processor": processor_name(), "options": common, "starts": taken}, indent=1)
        )


if __name__ == "__main__":
    main()
