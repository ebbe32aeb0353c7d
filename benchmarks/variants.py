"""Compares variants of a run: what an option costs or gains on this machine, in time of a step and peak memory.

    python benchmarks/variants.py documents= causal=--training.document_masking=false
    python benchmarks/variants.py "none=" "full=--activation_checkpoint.mode=full" --rounds 20 -- --compile.enable=true

A variant is a name and its options; options after `--` are those of all variants. The programs live at once and
train one step each in turn. "time" is the ratio to the first in the same round: its
median and quartiles. A variant with an option that ends in _degree=2 has two ranks, each with half of the threads.
Defaults: train_configs/debug_model.toml without checkpoints and validation.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch

from benchmarks.regress import SERVE, ranks_of
from benchmarks.turns import ROOT, Program, Running, Step, median_of, processor_name, ratio_of, take_turns, timed
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.run.preflight import resolve

WARM_UP_STEPS = 3
COMMON = [
    f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}", "--training.steps=1_000_000",
    "--checkpoint.enable=false", "--validation.enable=false",
]  # fmt: skip


def variant(text: str) -> tuple[str, list[str]]:
    """Returns the name and the options."""
    name, equals, options = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=OPTIONS")
    return name, shlex.split(options)


def parse(
    doc: str | None, *, rounds: int, more: Mapping[str, str] | None = None
) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """Returns the parser, what it read, and the options of all variants; `more` names options of files."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=variant, help="NAME=OPTIONS, of which there may be none")
    parser.add_argument("--rounds", type=int, default=rounds, help="times that each variant is measured")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    for option, text in (more or {}).items():
        parser.add_argument(option, type=Path, help=text)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    choices = parser.parse_args(sys.argv[1:end])
    if choices.rounds < 2:
        parser.error(f"--rounds {choices.rounds}: must be at least 2")
    if len(dict(choices.variants)) < len(choices.variants):
        parser.error("two variants have the same name")
    return parser, choices, sys.argv[end + 1 :]


def run_to_end(options: Sequence[str], *, environment: Mapping[str, str]) -> Step:
    """Returns how long a run of these options takes; SystemExit with its last lines if it fails."""
    command = [sys.executable, "-m", "torchtitan_clone.train", *options]
    run, step = timed(
        lambda: subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    )
    if run.returncode:
        raise SystemExit(f"error: {shlex.join(options)}: the run failed: {(run.stdout + run.stderr)[-2000:]}")
    return step


def main() -> None:
    """Measures and prints a table."""
    parser, choices, common = parse(__doc__, rounds=10)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, programs = {}, []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, options in choices.variants:
            argv = [*COMMON, f"--job.dump_folder={folder}", f"--job.run_name={name}", *common, *options]
            ranks = ranks_of(argv)
            try:
                plan = resolve(load_config(argv), world_size=ranks, device_type=device_type)
            except ConfigError as error:
                parser.error(f"{name}: {error}")
            tokens[name] = plan.tokens_per_step
            threads = max(1, choices.threads // ranks)
            environment = {"OMP_NUM_THREADS": str(threads)}
            command = [sys.executable, "benchmarks/regress.py", SERVE, str(ROOT), *argv]
            log = folder / f"{len(programs)}.log"
            programs.append(Program(name=name, command=command, environment=environment, log=log))
        print(f"{processor_name()}; {choices.threads} threads {shlex.join(common)}", flush=True)
        running = [stack.enter_context(Running(program)) for program in programs]
        take_turns(running, rounds=WARM_UP_STEPS)
        steps = take_turns(running, rounds=choices.rounds)
    first, *_ = steps
    print(f"{'':22}{'time / ' + first:>22}{'tokens/s':>12}{'GiB':>8}")
    for name, of_variant in steps.items():
        rate = tokens[name] / median_of(of_variant)
        ratio = str(ratio_of(of_variant, steps[first]))
        print(f"{name:22}{ratio:>22}{rate:12,.0f}{of_variant[-1]['gib']:8.2f}")
    if choices.json:
        result = {"processor": processor_name(), "options": common, "variants": dict(choices.variants)}
        choices.json.write_text(json.dumps({**result, "tokens": tokens, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
