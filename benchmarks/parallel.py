"""Measures what each axis of the mesh costs: two ranks against one, at the same work per rank.

    python benchmarks/parallel.py
    python benchmarks/parallel.py shard tensor --json result.json -- --training.seq_len=1024

One rank is measured as two runs at once, so that each has half of the machine, as each of two ranks has. The expected
time of a step on two ranks is that of one rank, plus the bubble of a pipeline and the time of its collectives: their
number and bytes at the latency and bandwidth that are measured first, as if nothing overlapped. Times are those of the
fastest step, which other processes disturb least. "busy" is the ratio of processor seconds of a rank, medians of all
steps: what the time exceeds it by are ranks that wait for each other. The last table measures training.freeze_schedule.
Arguments after `--` are options of all runs. With fewer than two GPUs the ranks run on the CPU;
`benchmarks/trainer.py --compile` compares one GPU with a plain compiled loop.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
import torch.distributed as dist

from benchmarks.turns import processor_name
from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.pipeline import bubble_fraction
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.parallel.trace import CollectiveTrace
from torchtitan_clone.run import preflight
from torchtitan_clone.testing.harness import collect, start_ranks
from torchtitan_clone.testing.runs import make_corpus
from torchtitan_clone.testing.trainers import open_trainer

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
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")} if CUDA else None


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", help="words of which a case has one; all without any")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run that count")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    with tempfile.TemporaryDirectory() as folder:
        results = _measure_all(Path(folder), arguments, words[split + 1 :])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def _measure_all(folder: Path, arguments: argparse.Namespace, others: list[str]) -> dict:
    logging.disable()
    os.environ["PYTHONWARNINGS"] = "ignore"
    common = _options(folder, arguments.steps) | dict(word.removeprefix("--").split("=", 1) for word in others)

    def run(changes: dict, *, ranks: int) -> list[dict]:
        argv = [f"--{key}={value}" for key, value in (common | changes).items()]
        # One rank would have the machine to itself: two such runs at once, each in its own folder.
        started = [
            start_ranks(measure_steps, ranks, [*argv, f"--job.run_name={run}"], arguments.steps, env=ENVIRONMENT)
            for run in range(3 - ranks)
        ]
        return [answer for some in started for answer in collect(some, timeout=400)]

    links = collect(start_ranks(measure_links, 2, env=ENVIRONMENT))[0]
    _print_links(links)
    columns = f"{'one rank':>9}{'two':>9}{'ratio':>8}{'busy':>8}{'should be':>11}{'calls':>7}{'MiB':>8}{'seconds':>9}"
    print(f"\n{'seconds a step':20}{columns}")
    cases = {}
    for name, changes in CASES.items():
        if not arguments.axes or any(word in name for word in arguments.axes):
            # Measured again for each case, because a machine's speed drifts.
            ones = run({"training.global_batch_size": ROWS}, ranks=1)
            cases[name] = _compare(run(changes, ranks=2), ones=ones, links=links)
            _print_case(name, cases[name])
    if not arguments.axes or "freezing" in arguments.axes:
        print(f"\n{'':28}{'seconds a step':>15}")
        for name, changes in FREEZING.items():
            cases[name] = {"seconds": max(answer["seconds"] for answer in run(changes, ranks=2))}
            print(f"{name:28}{cases[name]['seconds']:15.3f}", flush=True)
    return {"processor": processor_name(), "torch": torch.__version__, "links": links, "cases": cases}


def _options(folder: Path, steps: int) -> dict:
    return {
        "job.dump_folder": folder,
        "training.dataset_path": make_corpus(folder / "data" / "corpus"),
        "data.cache_folder": folder / "cache",
        "training.seq_len": 512,
        "training.local_batch_size": ROWS,
        "training.global_batch_size": 2 * ROWS,
        "training.mixed_precision_param": "bfloat16" if CUDA else "float32",
        "training.steps": steps + 10,
        "lr_scheduler.warmup_steps": 1,
        "activation_checkpoint.mode": "none",
        "checkpoint.enable": "false",
        "parallelism.pipeline_parallel_schedule": "1F1B",
    }


def measure_steps(argv: list[str], steps: int) -> dict:
    """Returns a rank's seconds of its fastest step, its processor seconds, its collectives, and a pipeline's bubble."""
    config = load_config(argv)
    with open_trainer(argv) as trainer:
        plan = preflight.resolve(config, world_size=dist.get_world_size(), device_type="cuda" if CUDA else "cpu")
        numbers = range(1, WARM_UP_STEPS + steps + 1)
        seconds, busy = [], []
        for number in numbers:
            start = time.process_time()
            seconds.append(_seconds(partial(trainer.train_step, number)))
            busy.append(time.process_time() - start)
        with CollectiveTrace(trainer.engine.mesh.group_axes()) as trace:
            trainer.train_step(len(seconds) + 1)
    rows = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    idle = 0.0
    if config.parallelism.pipeline_parallel_degree > 1:
        idle = bubble_fraction(config.parallelism, stages=plan.stages, microbatches=rows)
    found = {"seconds": min(seconds[WARM_UP_STEPS:]), "busy_seconds": statistics.median(busy[WARM_UP_STEPS:])}
    return {**found, "collectives": trace.rows(), "idle": idle}


def measure_links() -> dict:
    """Returns, for each collective between two ranks, seconds of a small one and seconds per byte of a large one."""
    launch = Launch.from_environment()
    device = pick_device(launch)
    found = {}
    with process_group(load_config([]).comm, launch=launch, device=device):
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


COLLECTIVES: dict[str, Callable[[torch.Tensor, int], Callable[[], object]]] = {
    "all_gather": lambda whole, rank: lambda: dist.all_gather_into_tensor(whole, whole.chunk(2)[rank].clone()),
    "reduce_scatter": lambda whole, rank: lambda: dist.reduce_scatter_tensor(whole.chunk(2)[rank].clone(), whole),
    "all_reduce": lambda whole, _: lambda: dist.all_reduce(whole),
    "all_to_all": lambda whole, _: lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    "send": _send_or_receive,
}
"""Functions of the larger tensor of a collective and the rank that return a function that runs it, by name."""


def _compare(answers: list[dict], *, ones: list[dict], links: dict) -> dict:
    """Returns the slower rank's step, the time it should take, and how much more processor time ranks need."""
    one = min(answer["seconds"] for answer in ones)
    busy = [statistics.mean(answer["busy_seconds"] for answer in some) for some in (ones, answers)]
    calls = [row for row in max(answers, key=_bytes)["collectives"] if row["collective"] in links]
    costs = (links[row["collective"]]["call"] * row["count"] + links[row["collective"]]["byte"] * row["bytes"]
             for row in calls)  # fmt: skip
    cost = sum(costs)
    return {
        "seconds": max(answer["seconds"] for answer in answers),
        "one_rank_seconds": one,
        "busy_ratio": busy[1] / busy[0],
        "expected_seconds": one / (1 - answers[0]["idle"]) + cost,
        "collective_seconds": cost,
        "calls": sum(row["count"] for row in calls),
        "bytes": sum(row["bytes"] for row in calls),
        "collectives": calls,
    }


def _bytes(answer: dict) -> int:
    return sum(row["bytes"] for row in answer["collectives"])


def _print_links(links: dict) -> None:
    print(processor_name())
    print(f"{'between two ranks':20}{'microseconds a call':>20}{'MB/s':>10}")
    for name, link in links.items():
        print(f"{name:20}{link['call'] * 1e6:20,.0f}{1e-6 / max(link['byte'], 1e-15):10,.0f}")


def _print_case(name: str, case: dict) -> None:
    one, two, expected = case["one_rank_seconds"], case["seconds"], case["expected_seconds"]
    sizes = f"{case['calls']:7,}{case['bytes'] / 2**20:8.1f}{case['collective_seconds']:9.3f}"
    print(
        f"{name:20}{one:9.3f}{two:9.3f}{two / one:8.3f}{case['busy_ratio']:8.3f}{expected / one:11.3f}{sizes}",
        flush=True,
    )


if __name__ == "__main__":
    main()
