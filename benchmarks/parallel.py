"""Measures what each axis of the mesh costs: two ranks against one, at the same work per rank.

    python benchmarks/parallel.py
    python benchmarks/parallel.py shard tensor --json result.json -- --training.seq_len=1024

Two ranks and one rank live at the same time and train their steps in turn. One rank is measured as two runs that begin
a step together and have half of the machine each, as each of two ranks has; its time is that until both have ended,
since ranks wait for each other. The expected time of a step on two ranks is that of one rank, plus the bubble of a
pipeline, whose stages take as long as they have FLOPs, and the time of its collectives: their number and bytes at the
latency and bandwidth that are measured first, the best of 20, as if nothing overlapped; on a CPU most are messages
(comm/collectives.py). Times and ratios are medians, with quartiles. "busy" is the ratio of processor seconds of a rank:
what the time exceeds it by are ranks that wait for each other. The last table measures
training.freeze_schedule. Arguments after `--` are options of all runs. With fewer than two GPUs the ranks run on the
CPU. `benchmarks/peers.py --compile --device cuda` compares one GPU with a plain compiled loop.
"""

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
import torch.distributed as dist

from benchmarks.turns import Program, Ratio, Running, processor_name, ratio_of, serve_turns_of_ranks, take_turns
from tests.support.harness import collect, start_ranks
from tests.support.runs import make_corpus
from tests.support.trainers import open_trainer
from torchtitan_clone.comm.collectives import all_gather, all_to_all, reduce_scatter, start_exchange
from torchtitan_clone.config import load_config
from torchtitan_clone.cpu.shared_memory import connect
from torchtitan_clone.parallel.pipeline import schedule_seconds
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.planner.collective_trace import CollectiveTrace
from torchtitan_clone.run import preflight
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.torch_compat import all_gather_single, reduce_scatter_single

SERVE = "serve"
WARM_UP_STEPS = 2
ROWS = 2
"""Rows that one rank alone trains on in a step."""
TWICE = {"training.local_batch_size": 2 * ROWS}
PIPELINE = {"parallelism.pipeline_parallel_degree": 2, **TWICE}
CASES = {
    "replicate": {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1},
    "shard": {},
    "tensor": {"parallelism.tensor_parallel_degree": 2, **TWICE},
    "pipeline": PIPELINE,
    **{
        f"context {method}": {
            "parallelism.context_parallel_degree": 2,
            "parallelism.context_parallel_rotate_method": method,
            **TWICE,
        }
        for method in ("allgather", "alltoall", "ring")
    },
}
_DATA_2 = f"pipeline_parallel_degree = 1, local_batch_size = {ROWS}"
FREEZING = {
    "nothing frozen, pipeline 2": PIPELINE,
    "half frozen, pipeline 2": PIPELINE | {"training.freeze_schedule": "[{step = 1, layers = 3}]"},
    "half frozen, then data 2": PIPELINE | {"training.freeze_schedule": f"[{{step = 1, layers = 3, {_DATA_2}}}]"},
}
CUDA = torch.cuda.device_count() > 1
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
GPUS = (os.environ.get("CUDA_VISIBLE_DEVICES", "0,1") if CUDA else "0,1").split(",")[:2]


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", help="words of which a case has one; all without any")
    parser.add_argument("--rounds", type=int, default=12, help="measured steps of each run")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: must be at least 2")
    with tempfile.TemporaryDirectory() as folder:
        results = _measure_all(Path(folder), arguments, words[split + 1 :])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def _measure_all(folder: Path, arguments: argparse.Namespace, others: list[str]) -> dict:
    logging.disable()
    os.environ["PYTHONWARNINGS"] = "ignore"
    common = _options(folder) | dict(word.removeprefix("--").split("=", 1) for word in others)
    start = partial(_start, folder=folder)
    links = collect(start_ranks(measure_links, 2, env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS)} if CUDA else None))[0]
    _print_links(links)
    columns = f"{'one rank':>9}{'two':>9}{'ratio':>20}{'busy':>20}{'should be':>11}{'calls':>7}{'MiB':>8}{'seconds':>9}"
    print(f"\n{'seconds a step':20}{columns}")
    cases = {}
    for name, changes in CASES.items():
        if not arguments.axes or any(word in name for word in arguments.axes):
            with ExitStack() as stack:
                ones = common | {"training.global_batch_size": ROWS}
                first, second = (start(stack, ones, name=f"one{run}", gpus=[GPUS[run]]) for run in (0, 1))
                two = start(stack, common | changes, name="two", gpus=GPUS)
                cases[name] = _compare(first, second, two, rounds=arguments.rounds, links=links)
            _print_case(name, cases[name])
    if not arguments.axes or "freezing" in arguments.axes:
        print(f"\n{'':28}{'seconds a step':>15}")
        with ExitStack() as stack:
            programs = [start(stack, common | changes, name=name, gpus=GPUS) for name, changes in FREEZING.items()]
            for name, steps in take_turns(programs, rounds=arguments.rounds).items():
                cases[name] = {"seconds": statistics.median(step["wall"] for step in steps)}
                print(f"{name:28}{cases[name]['seconds']:15.3f}", flush=True)
    return {"processor": processor_name(), "torch": torch.__version__, "links": links, "cases": cases}


def _options(folder: Path) -> dict[str, object]:
    return {
        "job.dump_folder": folder,
        "training.dataset_path": make_corpus(folder / "data" / "corpus"),
        "data.cache_folder": folder / "cache",
        "training.seq_len": 512,
        "training.local_batch_size": ROWS,
        "training.global_batch_size": 2 * ROWS,
        "training.mixed_precision_param": "bfloat16" if CUDA else "float32",
        "training.steps": 1_000_000,
        "lr_scheduler.warmup_steps": 1,
        "activation_checkpoint.mode": "none",
        "checkpoint.enable": "false",
        "parallelism.pipeline_parallel_schedule": "1F1B",
    }


def _start(stack: ExitStack, options: Mapping[str, object], *, folder: Path, name: str, gpus: Sequence[str]) -> Running:
    """Starts a run, a rank for each of the GPUs; the stack ends it."""
    argv = [f"--{key}={value}" for key, value in options.items()]
    program = Program(
        name=name,
        command=[sys.executable, __file__, SERVE, str(len(gpus)), *argv, f"--job.run_name={name}"],
        environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if CUDA else ON_CPU,
        log=folder / f"{name}.log",
    )
    return stack.enter_context(Running(program))


def serve(argv: list[str]) -> None:
    """Trains a run, one step a turn; the first report has a step's collectives and the idle share of a pipeline."""
    ranks, *argv = argv
    config = load_config(argv)
    turn = serve_turns_of_ranks(int(ranks))
    with open_trainer(argv) as trainer:
        plan = preflight.resolve(config, world_size=dist.get_world_size(), device_type="cuda" if CUDA else "cpu")
        numbers = itertools.count(1)
        for _ in range(WARM_UP_STEPS):
            trainer.train_step(next(numbers))
        with CollectiveTrace(trainer.engine.mesh.group_axes()) as trace:
            trainer.train_step(next(numbers))
        turn(collectives=trace.rows(), idle=_idle_share(plan) if plan.degrees.pp > 1 else 0.0)
        while True:
            trainer.train_step(next(numbers))
            turn()


def _idle_share(plan: RunPlan) -> float:
    """Returns the share of a pass through the pipeline in which its ranks wait for each other."""
    options, training = plan.config.parallelism, plan.config.training
    count = training.local_batch_size // options.pipeline_parallel_microbatch_size
    layers = plan.spec.layer_flops(plan.model_args, parameters=plan.parameters, seq_len=training.seq_len)
    flops = {f"layers.{index}": layer for index, layer in enumerate(layers)}
    flops["output"] = 6.0 * plan.parameters["output.weight"].numel()
    stages = [sum(flops.get(name, 0.0) for name in modules) for modules in plan.stages.modules]
    shares = {"F": 1 / 3, "B": 2 / 3}  # of the FLOPs of a stage, in 1F1B
    seconds = schedule_seconds(
        options, stages=plan.stages, microbatches=count, cost=lambda kind, stage: shares[kind] * stages[stage], delay=0
    )
    return 1 - count * sum(stages) / (plan.degrees.pp * seconds)


def measure_links() -> dict:
    """Returns, for each collective between two ranks, seconds of a small one and seconds per byte of a large one."""
    launch = Launch.from_environment()
    device = pick_device(launch)
    found = {}
    with process_group(load_config([]).comm, launch=launch, device=device):
        if not CUDA:
            connect(dist.GroupMember.WORLD)
        for name, build in COLLECTIVES.items():
            small, large = 2**14, 2**24
            times = []
            for size in (small, large):
                call = build(torch.zeros(size // 4, device=device), launch.rank)
                times.append(min(_seconds(call) for _ in range(20)))
            per_byte = max(0.0, (times[1] - times[0]) / (large - small))
            found[name] = {"call": times[0], "byte": per_byte}
    return found


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _send_or_receive(whole: torch.Tensor, rank: int) -> Callable[[], object]:
    return lambda: dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)


def _message(whole: torch.Tensor, rank: int) -> dist.Work:
    sent, received = ([(1, whole)], []) if rank == 0 else ([], [(0, whole)])
    return start_exchange(sent, received, group=dist.GroupMember.WORLD, collective="send")


COLLECTIVES: dict[str, Callable[[torch.Tensor, int], Callable[[], object]]] = {
    "all_gather": lambda whole, rank: lambda: all_gather_single(whole, whole.chunk(2)[rank].clone()),
    "reduce_scatter": lambda whole, rank: lambda: reduce_scatter_single(whole.chunk(2)[rank].clone(), whole),
    "all_reduce": lambda whole, _: lambda: dist.all_reduce(whole),
    "all_to_all": lambda whole, _: lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    "send": _send_or_receive,
}
"""Functions of the larger tensor of a collective and the rank that return a function that runs it, by name."""
BY_MESSAGES: dict[str, Callable[[torch.Tensor, int], Callable[[], object]]] = {
    "all_gather": lambda whole, rank: lambda: all_gather(whole.chunk(2)[rank], group=dist.GroupMember.WORLD),
    "reduce_scatter": lambda whole, _: lambda: reduce_scatter(whole.chunk(2), group=dist.GroupMember.WORLD),
    "all_to_all": lambda whole, _: lambda: all_to_all(whole.chunk(2), group=dist.GroupMember.WORLD),
    "send": lambda whole, rank: lambda: _message(whole, rank).wait(),
}
"""The same for messages, as which a CPU runs them, but for a few of DTensor's."""
if not CUDA:
    COLLECTIVES |= {f"{name} by messages": build for name, build in BY_MESSAGES.items()}


def _compare(first: Running, second: Running, two: Running, *, rounds: int, links: dict) -> dict[str, Any]:
    """Returns the steps' times in turn, the time that two ranks should take, and how much more processor time."""
    ones, twos = [], []
    for number in range(1 + rounds):
        if number % 2:
            twos.append(two.step())
        for run in (first, second):
            run.begin()
        pair = [run.end() for run in (first, second)]
        cpu = statistics.mean(step["cpu"] for step in pair)
        ones.append({"wall": max(step["wall"] for step in pair), "cpu": cpu})
        if not number % 2:
            twos.append(two.step())
    del ones[0], twos[0]  # the first round warms up
    one, seconds = (statistics.median(step["wall"] for step in steps) for steps in (ones, twos))
    calls = [row for row in two.ready["collectives"] if row["collective"] in links]
    cost = 0.0
    for row in calls:
        link = links.get(f"{row['collective']} by messages") or links[row["collective"]]
        cost += link["call"] * row["count"] + link["byte"] * row["bytes"]
    return {
        "seconds": seconds,
        "one_rank_seconds": one,
        "ratio": asdict(ratio_of(twos, ones)),
        "busy_ratio": asdict(ratio_of(twos, ones, clock="cpu")),
        "expected_ratio": 1 / (1 - two.ready["idle"]) + cost / one,
        "collective_seconds": cost,
        "calls": sum(row["count"] for row in calls),
        "bytes": sum(row["bytes"] for row in calls),
        "collectives": calls,
    }


def _print_links(links: dict) -> None:
    print(processor_name())
    print(f"{'between two ranks':27}{'microseconds a call':>20}{'MB/s':>10}")
    for name, link in links.items():
        print(f"{name:27}{link['call'] * 1e6:20,.0f}{1e-6 / max(link['byte'], 1e-15):10,.0f}")


def _print_case(name: str, case: dict) -> None:
    ratios = "".join(f"{Ratio(**case[key])!s:>20}" for key in ("ratio", "busy_ratio"))
    times = f"{case['one_rank_seconds']:9.3f}{case['seconds']:9.3f}{ratios}"
    sizes = f"{case['calls']:7,}{case['bytes'] / 2**20:8.1f}{case['collective_seconds']:9.3f}"
    print(f"{name:20}{times}{case['expected_ratio']:11.3f}{sizes}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2:])
    main()
