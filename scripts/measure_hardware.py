"""Measures this machine and writes a hardware table for scripts/plan.py, in about two minutes.

    python scripts/measure_hardware.py my_machine.toml
    python scripts/measure_hardware.py my_machine.toml --ranks=4

Measures products of several sizes, attention, memory and, between `--ranks` processes (0: not), collectives; on a CPU
also steps of small models, on one and on two ranks. Nothing else should run meanwhile. On GPUs the network between
nodes counts as the links within one: edit network_us and network_gbps if they differ.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
import torch.distributed as dist

from torchtitan_clone.planner.hardware import Hardware
from torchtitan_clone.planner.measure import (
    fit_to_steps,
    measure_hardware,
    measure_links,
    measure_steps,
    threads,
    to_toml,
)
from torchtitan_clone.testing.harness import run_ranks


def links(backend: str) -> tuple[float, float]:
    """Runs on every rank: measures the links between all."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    return measure_links()


def steps() -> dict[str, float]:
    """Runs on every rank: measures steps of small models on a CPU."""
    dist.init_process_group("gloo")
    return measure_steps()


def measured_hardware(name: str, *, ranks: int, rounds: int) -> Hardware:
    """Returns the table of this machine; `ranks` and `rounds` are the options of the command."""
    has_gpu = torch.cuda.is_available()
    torch.set_num_threads(threads())
    found = (0.0, 1.0)
    if ranks > 1:
        backend = "nccl" if has_gpu else "gloo"
        env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")} if has_gpu else {}
        found = run_ranks(links, ranks, backend, env=env)[0]
    hardware = measure_hardware(torch.device("cuda" if has_gpu else "cpu"), name=name, links=found)
    if has_gpu:
        return hardware
    counts = rounds * ((1, 2) if ranks > 1 else (1,))
    return fit_to_steps(hardware, rounds=[run_ranks(steps, ranks, timeout=600)[0] for ranks in counts])


def main(words: list[str] | None = None) -> int:
    """Measures and writes the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="file to write")
    parser.add_argument("--ranks", type=int, default=2, help="processes between which collectives are measured")
    parser.add_argument("--rounds", type=int, default=2, help="how often steps are measured; the fastest count")
    args = parser.parse_args(words)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{threads()} processors of this machine"
    hardware = measured_hardware(name, ranks=args.ranks, rounds=args.rounds)
    text = to_toml(hardware)
    args.table.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
