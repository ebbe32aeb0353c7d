"""Compares the trainer with other programs that train the same model, their steps taken in turn.

    python benchmarks/peers.py --size 16M
    python benchmarks/peers.py --size 120M --compile --dtype bfloat16 --rounds 12 --allocator
    python benchmarks/peers.py --size tiny --only ours nanoGPT
    python benchmarks/peers.py --size host --threads 1 --rounds 60 --only ours "plain loop" nanoGPT torchtitan
    python benchmarks/peers.py --size 8B-layers --compile --dtype bfloat16 --device cuda --only ours products torchtitan

Peers are nanoGPT (its design, written anew), Hugging Face's Trainer, litgpt, torchtitan 0.2.2 and our model in a plain
loop. They are installed into an environment of their own (--environment) that shares this one's torch. All have blocks
of equal products, the same batch and precision and AdamW; FLOPs are counted and must be equal. nanoGPT's embedding is
also its output weight: "ours, tied" has as many parameters, but for nanoGPT's positions. "products" is their products
alone: its time over ours is the share of their speed that ours reaches. "ours, graph" launches forward and backward on
a GPU as a CUDA graph. "ours, micro-batches" trains on half of the rows at a time and sums gradients, "ours, selective"
computes every second block again in backward, as the package's default does, "8 blocks" the first 8, and "per
operation" some operations of all blocks or of the first 8, with more FLOPs; these take less memory. Programs live at
once and take their steps in turn. "time" is the ratio to the first of --only in the same round, with quartiles. On a
CPU ours allocates tensors in a region, the peers and "ours, default malloc" by malloc; --allocator gives our allocator
to the peers too. The first step is timed from the start of the process; with --compile once with all caches of the
compiler empty ("cold"), also that of precompiled headers, and once with full ones.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import ROOT, Program, Running, Step, processor_name, ratio_of, take_turns

OURS, BARE = "ours", "ours, default malloc"
PER_OPERATION = {"activation_checkpoint": "selective", "selective_ac_option": "op", "tied": True}
OPTIONS = {
    OURS: {},
    BARE: {},
    "ours, graph": {"graph": True},
    "ours, micro-batches": {"micro_batches": 2},
    "ours, tied": {"tied": True},
    "ours, selective": {"activation_checkpoint": "selective"},
    "ours, tied, selective": {"activation_checkpoint": "selective", "tied": True},
    "ours, tied, 8 blocks": {"activation_checkpoint": "full", "first_blocks": 8, "tied": True},
    "ours, tied, per operation": PER_OPERATION,
    "ours, tied, 8 blocks per operation": {**PER_OPERATION, "first_blocks": 8},
}
"""What the programs of this package do differently from the others, by name."""
DEFAULT_NAMES = [OURS, "products", "plain loop", "nanoGPT", "HF Trainer", "litgpt", "torchtitan"]
NAMES = list(dict.fromkeys([*OPTIONS, *DEFAULT_NAMES]))
INSTALLED = {
    "HF Trainer": ["accelerate>=1.1", "psutil"],
    "litgpt": ["litgpt==0.5.13", "lightning", "lightning-utilities", "torchmetrics", "jsonargparse", "psutil"],
    "torchtitan": ["torchtitan==0.2.2", "tyro", "docstring-parser", "typeguard", "einops"],
}
"""Packages of each peer, installed without their own requirements: those name other versions of what is here."""
INSTALLED_WHOLE = {"torchtitan": ["datasets>=4,<6"]}
"""Packages of each peer that are installed with their requirements, none of which is torch."""
WARM_UP_STEPS = 2
EQUAL_FLOPS = 1e-6  # relative difference of programs that compute the same


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its batch."""

    dim: int
    layers: int
    heads: int
    hidden: int
    vocab: int
    rows: int = 8
    tokens: int = 512


SIZES = {
    "tiny": Size(dim=64, layers=2, heads=2, hidden=192, vocab=2_048, rows=2, tokens=64),
    "host": Size(dim=64, layers=12, heads=2, hidden=192, vocab=2_048, rows=2, tokens=64),  # time of calls, not products
    "4M": Size(dim=256, layers=3, heads=8, hidden=768, vocab=4_096, rows=4),
    "16M": Size(dim=256, layers=8, heads=8, hidden=768, vocab=16_384),
    "120M": Size(dim=768, layers=12, heads=12, hidden=2_048, vocab=24_576, rows=4),
    "1B": Size(dim=2_048, layers=16, heads=16, hidden=5_632, vocab=32_768, rows=2, tokens=2_048),
    "8B-layers": Size(dim=4_096, layers=4, heads=32, hidden=11_008, vocab=32_768, rows=2, tokens=4_096),
}
"""Hidden sizes are those that torchtitan and this package derive from the width."""


def main() -> None:
    """Runs the comparison and prints a table."""
    options = _parse()
    work = {"size": options.size, "dtype": options.dtype, "compile": options.compile, "device": options.device}
    with tempfile.TemporaryDirectory() as folder:
        programs = list(_programs(options, work, folder=Path(folder)))
        print(_header(options, work), flush=True)
        # Before anything else runs, which would fill the caches.
        cold = _first_steps(programs) if options.compile and not options.skip_cold else {}
        parameters, flops = _count(programs, folder=Path(folder))
        with ExitStack() as stack:
            running, first = [], {}
            for program in programs:  # one after another, so that first steps do not disturb one another
                running.append(stack.enter_context(Running(program)))
                running[-1].begin()
                if not options.at_once:
                    running[-1].end()
                    first[program.name] = running[-1].age_seconds
            for each in running if options.at_once else []:
                each.end()
            take_turns(running, rounds=WARM_UP_STEPS)
            steps = take_turns(running, rounds=options.rounds)
    size = SIZES[options.size]
    tokens = size.rows * size.tokens
    rows = [_row(name, steps, cold=cold, first=first, parameters=parameters, tokens=tokens) for name in steps]
    _print_table(rows)
    if flops:
        print(f"FLOPs of the products of a step, equal in all programs that do not recompute: {flops:,}")
    if options.json:
        result = {
            "processor": processor_name(uses_gpu=options.device == "cuda"),
            "threads": options.threads,
            "flops": flops,
            **work,
        }
        options.json.write_text(json.dumps({**result, "rows": rows, "steps": steps}, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="16M", choices=list(SIZES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--skip-cold", action="store_true", help="do not time first steps with empty caches")
    parser.add_argument("--at-once", action="store_true", help="take first steps at the same time and do not time them")
    parser.add_argument("--allocator", action="store_true", help="give all programs our allocator of CPU tensors")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each program")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    only = "programs to run, first one of ours; default: all but variants of ours; their memory adds up"
    parser.add_argument("--only", nargs="+", choices=NAMES, default=DEFAULT_NAMES, help=only)
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "torchtitan_clone" / "peers")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.only[0] not in OPTIONS:
        parser.error(
            f"--only {options.only[0]!r}: the first program must be one of ours, which others are compared with"
        )
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: must be at least 2")
    return options


# ---------------------------------------------------------------- programs


def _programs(options: argparse.Namespace, work: Mapping[str, object], *, folder: Path) -> Iterator[Program]:
    python = _prepare_environment(options.environment, names=options.only)
    for name in options.only:
        is_ours = name in OPTIONS
        with_allocator = name != BARE and (is_ours or options.allocator)
        environment = {
            "OMP_NUM_THREADS": str(options.threads),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0") if options.device == "cuda" else "",
            "ALLOCATOR": "" if with_allocator else "default",
        }
        environment |= _empty_caches(folder / name.replace(" ", "_")) if options.compile else {}
        own_work = json.dumps({**work, **OPTIONS.get(name, {})})
        command = [python, "benchmarks/peer_programs.py", OURS if is_ours else name, own_work]
        yield Program(name=name, command=command, environment=environment, log=folder / f"{name}.log")


def _empty_caches(folder: Path) -> dict[str, str]:
    """Returns the environment of a program whose caches are in this folder, which is created.

    torch keeps the headers that it precompiles below TMPDIR, wherever the inductor's cache is, and this package what it
    compiles below XDG_CACHE_HOME.
    """
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache"}
    for name in caches.values():
        (folder / name).mkdir(parents=True)
    return {variable: str(folder / name) for variable, name in caches.items()}


def _prepare_environment(folder: Path, *, names: Sequence[str]) -> str:
    """Returns a Python that has the peers' packages and this environment's; installs what is missing."""
    packages = [package for name in names for package in INSTALLED.get(name, [])]
    if not packages:
        return sys.executable
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False)
    library = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (library / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    whole = [package for name in names for package in INSTALLED_WHOLE.get(name, [])]
    commands = [[*pip, "--no-deps", *packages], *([[*pip, *whole]] if whole else [])]
    if any(subprocess.run(command, check=False).returncode for command in commands):
        raise SystemExit(f"error: cannot install {', '.join(packages)} into {folder}; run with --only ours nanoGPT")
    return str(python)


def _first_steps(programs: Sequence[Program]) -> dict[str, float]:
    """Returns the seconds from the start of each program to the end of its first step, with empty caches."""
    seconds = {}
    for program in programs:
        with Running(program) as running:
            running.step()
            seconds[program.name] = running.age_seconds
    return seconds


def _header(options: argparse.Namespace, work: Mapping[str, object]) -> str:
    return f"{processor_name(uses_gpu=options.device == 'cuda')}; {options.threads} threads; {json.dumps(work)}"


def _count(programs: Sequence[Program], *, folder: Path) -> tuple[dict[str, int], int]:
    """Returns the number of parameters of each program, and the FLOPs of the products of a step; counted in eager mode.

    The FLOPs must be the same in all programs that do not recompute; 0 if all do.
    """
    parameters, flops = {}, {}
    for program in programs:
        options = {**json.loads(program.command[-1]), "compile": False, "count_flops": True}
        command = [*program.command[:-1], json.dumps(options)]
        counting = replace(program, command=command, log=folder / "flops.log")
        with Running(counting) as running:
            running.step()
            running.step()
        counts = dict(re.findall(r"^(flops|parameters) (\d+)$", counting.log.read_text(), re.MULTILINE))
        parameters[program.name] = int(counts["parameters"])
        if "activation_checkpoint" not in options:
            flops[program.name] = int(counts["flops"])
    # transformers computes the angles of rotary embeddings by a product in some versions, which is 33 kFLOP.
    if flops and max(flops.values()) > min(flops.values()) * (1 + EQUAL_FLOPS):
        raise SystemExit(f"error: the programs do not compute the same; FLOPs of the products of a step: {flops}")
    return parameters, next(iter(flops.values()), 0)


# ---------------------------------------------------------------- results


def _row(
    name: str,
    steps: Mapping[str, list[Step]],
    *,
    cold: Mapping[str, float],
    first: Mapping[str, float],
    parameters: Mapping[str, int],
    tokens: int,
) -> dict[str, object]:
    first_steps = next(iter(steps.values()))
    return {
        "name": name,
        "time": str(ratio_of(steps[name], first_steps)),
        "CPU time": str(ratio_of(steps[name], first_steps, clock="cpu")),
        "tokens/s": tokens / statistics.median(step["wall"] for step in steps[name]),
        "cold": cold.get(name),
        "first": first.get(name),
        "gib": steps[name][-1]["gib"],
        "parameters": parameters[name],
    }


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = f"{'tokens/s':>10}{'cold s':>8}{'first s':>8}{'GiB':>7}{'parameters':>14}"
    print(f"{'':22}{'time':>20}{'CPU time':>20}{columns}")
    for row in rows:
        cold, first = ("" if row[key] is None else f"{row[key]:.1f}" for key in ("cold", "first"))
        print(
            f"{row['name']:22}{row['time']:>20}{row['CPU time']:>20}{row['tokens/s']:10,.0f}"
            f"{cold:>8}{first:>8}{row['gib']:7.2f}{row['parameters']:14,}"
        )


if __name__ == "__main__":
    main()
