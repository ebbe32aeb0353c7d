"""Measures the GPUs of this machine and writes a hardware table for scripts/plan.py.

    python scripts/measure_hardware.py my_machine.toml

Measures products, attention and memory of one GPU and, between `--ranks` GPUs (0: not), collectives. Nothing else
should run meanwhile. The network between nodes counts as the links within one: edit network_us and network_gbps if they
differ.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError
from torchtitan_clone.files import write_atomically
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.planner import measure


def links_of_rank(rank: int, ranks: int, folder: str) -> None:
    """Runs in a process of each rank: measures the links between all."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    us, gbps = measure.measure_links()
    if rank == 0:
        Path(folder, "links").write_text(f"{us} {gbps}")


def links_between(ranks: int) -> tuple[float, float]:
    """Returns microseconds of a message and GB/s between GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(links_of_rank, args=(ranks, folder), nprocs=ranks)
        us, gbps = map(float, Path(folder, "links").read_text().split())
    return us, gbps


@reports_errors
def main(words: list[str]) -> int:
    """Measures and writes the table; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("table", type=Path, help="file to write")
    present = torch.cuda.device_count()
    ranks = min(2, present)
    parser.add_argument("--ranks", type=int, default=ranks, help="GPUs between which collectives are measured")
    parser.add_argument("--rounds", type=int, default=2, help="times to measure, of which the best count")
    args = parser.parse_args(words)
    problem = "" if args.table.parent.is_dir() else f"there is no folder {args.table.parent}; create it first"
    problem = "is a folder; name a file" if args.table.is_dir() else problem
    if problem or args.rounds < 1 or args.ranks < 0:
        counts = f"--rounds={args.rounds} must be at least 1 and --ranks={args.ranks} at least 0"
        raise ConfigError(f"{args.table}: {problem}" if problem else counts)
    if max(1, args.ranks) > present:
        raise ConfigError(
            f"--ranks={args.ranks}: {present} GPUs are visible, and only GPUs are measured; run this where they are, "
            "or write the table by hand (docs/planner.md)"
        )
    device = torch.device("cuda")
    table = measure.measure_hardware(
        device,
        name=torch.cuda.get_device_name(device),
        memory_gib=torch.cuda.mem_get_info(device)[1] / 2**30,
        node_size=present,
        links=links_between(args.ranks) if args.ranks > 1 else (0.0, 1.0),
        repeats=measure.REPEATS * args.rounds,
    )
    print(text := measure.to_toml(table), end="")
    write_atomically(args.table, text.encode())
    return 0
