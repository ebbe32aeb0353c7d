"""Compares how long variants of a run take from the command to the end of their first step, with full caches.

    python benchmarks/starts.py eager= compiled=--compile.enable=true
    python benchmarks/starts.py eager= compiled=--compile.enable=true --rounds 10 -- --model.args.vocab_size=16384

A variant is a name and its options; options after `--` are those of all variants. Each starts once to fill the caches,
and then in random order once in each round. The table has medians of seconds, and
of the difference from the first variant in the same round with its quartiles. Defaults: one step of
train_configs/debug_model.toml without checkpoints and validation.
"""

import argparse
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import ROOT, processor_name
from benchmarks.variants import variant

COMMON = [
    f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}", "--training.steps=1",
    "--lr_scheduler.warmup_steps=1", "--checkpoint.enable=false", "--validation.enable=false",
]  # fmt: skip


def seconds_of(options: Sequence[str], *, environment: Mapping[str, str]) -> float:
    """Returns how long a run of these options takes; SystemExit with its last lines if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchtitan_clone.train", *COMMON, f"--job.dump_folder={folder}", *options]
        start = time.perf_counter()
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
    if run.returncode:
        raise SystemExit(f"error: {shlex.join(options)}: the run failed: {(run.stdout + run.stderr)[-2000:]}")
    return seconds


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=variant, help="NAME=OPTIONS, of which there may be none")
    parser.add_argument("--rounds", type=int, default=6, help="measured starts of each variant")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    choices, common = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if choices.rounds < 2:
        parser.error(f"--rounds {choices.rounds}: must be at least 2")
    options = {name: [*common, *own] for name, own in choices.variants}
    environment = {**os.environ, "OMP_NUM_THREADS": str(choices.threads)}
    print(f"{processor_name(uses_gpu=True)}; {choices.threads} threads {shlex.join(common)}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in options}
    for of_variant in options.values():
        seconds_of(of_variant, environment=environment)
    for _ in range(choices.rounds):
        for name in random.sample([*options], len(options)):
            seconds[name].append(seconds_of(options[name], environment=environment))
    first, *_ = seconds.values()
    for name, of_variant in seconds.items():
        low, median, high = statistics.quantiles([one - other for one, other in zip(of_variant, first, strict=True)])
        print(f"{name:22}{statistics.median(of_variant):8.2f} s {median:+8.2f} ({low:+.2f} to {high:+.2f})")


if __name__ == "__main__":
    main()
