"""Compares predicted with measured step times of the debug model on this machine's CPU, on 1, 2 and 4 ranks.

    python benchmarks/planner_cpu.py
    python benchmarks/planner_cpu.py --steps=20 --ranks=1 --ranks=2 -- --training.seq_len=1024

Measures the machine and trains on each number of ranks, which share the processor, in turn for several rounds, since
the speed of a virtual machine changes from minute to minute. Times are medians over the rounds of the median step, as
those of the small models that the machine is measured with. Nothing else should run. Arguments after `--` are options
of all.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch

from benchmarks.turns import processor_name
from scripts.measure_hardware import measure_round
from torchtitan_clone.config import load_config
from torchtitan_clone.planner.hardware import Hardware
from torchtitan_clone.planner.measure import fit_rounds, threads
from torchtitan_clone.planner.time_model import StepTime, predict_step_time
from torchtitan_clone.run import preflight
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import make_corpus
from torchtitan_clone.testing.trainers import open_trainer

WARM_UP_STEPS = 2
CASES = {
    1: {"alone": {}},
    2: {
        "shard": {},
        "tensor": {"parallelism.tensor_parallel_degree": 2},
        "context": {"parallelism.context_parallel_degree": 2},
        "pipeline": {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 8},
    },
    4: {"shard": {}, "shard, tensor": {"parallelism.tensor_parallel_degree": 2}},
}
"""Options by number of ranks and name."""


def median_step(argv: list[str], steps: int) -> float:
    """Returns the seconds of a rank's median step."""
    torch.set_num_threads(max(1, threads() // dist_world_size()))
    with open_trainer(argv) as trainer:
        found = []
        for number in range(1, WARM_UP_STEPS + steps + 1):
            start = time.perf_counter()
            trainer.train_step(number)
            found.append(time.perf_counter() - start)
    return median(found[WARM_UP_STEPS:])


def dist_world_size() -> int:
    """Returns the number of ranks, before there is a process group."""
    return int(os.environ["WORLD_SIZE"])


def predicted(argv: list[str], *, ranks: int, hardware: Hardware) -> StepTime:
    return predict_step_time(
        preflight.resolve(load_config(argv), world_size=ranks, device_type="cpu"), hardware=hardware
    )


def main(words: list[str]) -> int:
    """Measures, trains and prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run that count")
    parser.add_argument("--rounds", type=int, default=4, help="how often all is measured; medians count")
    parser.add_argument("--ranks", type=int, action="append", choices=CASES, help="number of ranks; default: all")
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "data" / "corpus")
        common = [
            f"--job.dump_folder={folder}", f"--training.dataset_path={corpus}", f"--data.cache_folder={folder}/cache",
            "--training.seq_len=512", "--training.local_batch_size=4", "--checkpoint.enable=false",
            "--lr_scheduler.warmup_steps=1", f"--training.steps={arguments.steps + WARM_UP_STEPS}",
            "--activation_checkpoint.mode=none", *words[split + 1 :],
        ]  # fmt: skip
        runs = {
            (ranks, name): [*common, *(f"--{key}={value}" for key, value in options.items())]
            for ranks in arguments.ranks or CASES
            for name, options in CASES[ranks].items()
        }
        rounds, measured = [], {run: [] for run in runs}
        for number in range(arguments.rounds):
            rounds.append(measure_round(2))
            for (ranks, name), argv in runs.items():
                run_name = f"--job.run_name={number}-{ranks}-{name.replace(', ', '-')}"
                found = run_ranks(median_step, ranks, [*argv, run_name], arguments.steps, timeout=600)
                measured[ranks, name].append(max(found))
        hardware = fit_rounds(rounds)
        print(f"{processor_name()}\n{hardware}")
        print(f"{'ranks':>5}  {'mesh':16}{'measured s':>11}{'predicted s':>12}{'error':>8}  parts of the prediction")
        for (ranks, name), argv in runs.items():
            step = predicted(argv, ranks=ranks, hardware=hardware)
            parts = ", ".join(f"{part} {each / step.seconds:.0%}" for part, each in step.parts.items())
            seconds = median(measured[ranks, name])
            print(f"{ranks:5}  {name:16}{seconds:11.3f}{step.seconds:12.3f}{step.seconds / seconds - 1:+8.1%}  {parts}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
