"""Measures this machine and writes a hardware table for scripts/plan.py, in about three minutes.

    python scripts/measure_hardware.py my_machine.toml

Measures products, attention, memory and, between `--ranks` processes (0: not), collectives; on a CPU steps of small
models on one and two ranks. Nothing else should run meanwhile. On GPUs the network between nodes counts as the links
within one: edit network_us and network_gbps if they differ.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
import torch.distributed as dist

from torchtitan_clone.config import ConfigError
from torchtitan_clone.files import write_atomically
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.planner import measure
from torchtitan_clone.testing.harness import run_ranks


def links(backend: str) -> tuple[float, float]:
    """Runs on every rank: measures the links between all."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    return measure.measure_links()


def table(found: tuple[float, float]) -> measure.Hardware:
    """Runs on one rank: measures the device."""
    torch.set_num_threads(measure.threads())
    has_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if has_gpu else f"{measure.threads()} processors of this machine"
    return measure.measure_hardware(torch.device("cuda" if has_gpu else "cpu"), name=name, links=found)


def steps(warm_up: bool) -> dict[str, float]:
    """Runs on every rank: measures steps of small models on a CPU."""
    dist.init_process_group("gloo")
    return measure.measure_steps(warm_up=warm_up)


def measure_round(ranks: int, *, warm_up: bool) -> measure.Round:
    """Returns a table and, on a CPU, seconds of steps on one rank and, if `ranks` > 1, on two."""
    has_gpu = torch.cuda.is_available()
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")} if has_gpu else {}
    found = run_ranks(links, ranks, "nccl" if has_gpu else "gloo", env=env)[0] if ranks > 1 else (0.0, 1.0)
    (measured,) = run_ranks(table, 1, found, env=env)
    counts = () if has_gpu else range(1, min(ranks, 2) + 1)
    return measured, [run_ranks(steps, count, warm_up, timeout=600)[0] for count in counts]


@reports_errors
def main(words: list[str] | None = None) -> int:
    """Measures and writes the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="file to write")
    ranks = min(2, torch.cuda.device_count() or 2)
    parser.add_argument("--ranks", type=int, default=ranks, help="processes between which collectives are measured")
    parser.add_argument("--rounds", type=int, default=2, help="times to measure, of which medians count; 1: no warm-up")
    args = parser.parse_args(words)
    problem = "" if args.table.parent.is_dir() else f"there is no folder {args.table.parent}; create it first"
    problem = "is a folder; name a file" if args.table.is_dir() else problem
    if problem or args.rounds < 1 or args.ranks < 0:
        counts = f"--rounds={args.rounds} must be at least 1 and --ranks={args.ranks} at least 0"
        raise ConfigError(f"{args.table}: {problem}" if problem else counts)
    rounds = [measure_round(args.ranks, warm_up=args.rounds > 1) for _ in range(args.rounds)]
    print(text := measure.to_toml(measure.fit_rounds(rounds)), end="")
    write_atomically(args.table, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
