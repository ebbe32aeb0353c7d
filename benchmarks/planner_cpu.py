"""Compares predicted with measured step times of the debug model on this machine's CPU, on 1, 2 and 4 ranks.

    python benchmarks/planner_cpu.py
    python benchmarks/planner_cpu.py --rounds=20 --ranks=1 --ranks=2 -- --training.seq_len=1024

All runs and the small models that the machine is measured with live at once and train in turn, some steps each, since
the speed of a virtual machine changes by a third from minute to minute; medians are compared. All ranks share the
processor. Nothing else should run. Arguments after `--` are options of all.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
import torch.distributed as dist

from benchmarks.turns import Program, Running, Step, Turn, processor_name, serve_turns_of_ranks, take_turns
from torchtitan_clone.config import load_config
from torchtitan_clone.planner.hardware import Cpu, Fitted, Hardware
from torchtitan_clone.planner.measure import (
    SmallModels,
    fit_rounds,
    measure_hardware,
    measure_links,
    seconds_of,
    threads,
    turn_seconds,
)
from torchtitan_clone.planner.time_model import StepTime, predict_step_time
from torchtitan_clone.run import preflight
from torchtitan_clone.testing.runs import make_corpus
from torchtitan_clone.testing.trainers import open_trainer

SERVE = "serve"
WARM_UP_ROUNDS = 1
MEASURED_RANKS = (1, 2)
"""Numbers of ranks of the small models."""
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


def predicted(argv: list[str], *, ranks: int, hardware: Hardware) -> StepTime:
    return predict_step_time(
        preflight.resolve(load_config(argv), world_size=ranks, device_type="cpu"), hardware=hardware
    )


def main(words: list[str]) -> int:
    """Measures, trains and prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=8, help="measured turns; a single one is one step of each run, without a warm-up"
    )
    parser.add_argument("--ranks", type=int, action="append", choices=CASES, help="number of ranks; default: all")
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        corpus = make_corpus(folder / "data" / "corpus")
        common = [
            f"--job.dump_folder={folder}", f"--training.dataset_path={corpus}", f"--data.cache_folder={folder}/cache",
            "--training.seq_len=512", "--training.local_batch_size=4", "--checkpoint.enable=false",
            "--lr_scheduler.warmup_steps=1", "--training.steps=1000000", "--activation_checkpoint.mode=none",
            "--comm.train_timeout_seconds=3600", *words[split + 1 :],
        ]  # fmt: skip
        runs = {
            (ranks, name): [*common, *(f"--{key}={value}" for key, value in options.items())]
            for ranks in arguments.ranks or CASES
            for name, options in CASES[ranks].items()
        }
        program = partial(_program, warm_up=arguments.rounds > 1, folder=folder)
        programs = [
            *(program(f"small models {ranks}", ranks, []) for ranks in MEASURED_RANKS),
            *(program(_run_name(*run), run[0], [*argv, f"--job.run_name={_run_name(*run)}"])
              for run, argv in runs.items()),
        ]  # fmt: skip
        running = [stack.enter_context(Running(program)) for program in programs]
        if arguments.rounds > 1:
            take_turns(running, rounds=WARM_UP_ROUNDS)
        steps = take_turns(running, rounds=arguments.rounds)
        hardware = fit_rounds(list(_rounds(*(steps[f"small models {ranks}"] for ranks in MEASURED_RANKS))))
        print(f"{processor_name()}\n{hardware}")
        print(f"{'ranks':>5}  {'mesh':16}{'measured s':>11}{'predicted s':>12}{'error':>8}  parts of the prediction")
        for (ranks, name), argv in runs.items():
            step = predicted(argv, ranks=ranks, hardware=hardware)
            parts = ", ".join(f"{part} {each / step.seconds:.0%}" for part, each in step.parts.items())
            seconds = median(each["seconds"] for each in steps[_run_name(ranks, name)])
            print(f"{ranks:5}  {name:16}{seconds:11.3f}{step.seconds:12.3f}{step.seconds / seconds - 1:+8.1%}  {parts}")
    return 0


def _run_name(ranks: int, name: str) -> str:
    return f"{ranks}-{name.replace(', ', '-')}"


def _program(name: str, ranks: int, argv: Sequence[str], *, warm_up: bool, folder: Path) -> Program:
    environment = {"OMP_NUM_THREADS": str(max(1, threads() // ranks)), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, SERVE, str(ranks), str(int(warm_up)), *argv]
    return Program(name=name, command=command, environment=environment, log=folder / f"{name}.log")


def _rounds(alone: Sequence[Step], both: Sequence[Step]) -> Iterator[tuple[Hardware, list[Mapping[str, float]]]]:
    """Yields what fit_rounds() gets, from the reports of one and of two ranks."""
    for one, two in zip(alone, both, strict=True):
        link_us, link_gbps = two["links"]
        links = {"link_us": link_us, "link_gbps": link_gbps, "network_us": link_us, "network_gbps": link_gbps}
        values = {
            **one["table"],
            **links,
            "cpu": Cpu(**one["table"]["cpu"]),
            "fitted": Fitted(**one["table"]["fitted"]),
        }
        yield Hardware(**values), [one["seconds"], two["seconds"]]


# ---------------------------------------------------------------- a program: all ranks of one run, or of small models


def serve(ranks: int, argv: list[str], *, warm_up: bool) -> None:
    """Trains a run or, without options, the small models of as many ranks, whose times it reports."""
    turn = serve_turns_of_ranks(ranks)
    if not argv:
        _serve_small_models(turn, warm_up=warm_up)
    with open_trainer(argv) as trainer:
        steps = seconds_of(trainer.train_step)
        turn()
        while True:
            turn(seconds=turn_seconds(steps, warm_up=warm_up))


def _serve_small_models(turn: Turn, *, warm_up: bool) -> None:
    dist.init_process_group("gloo")
    models = SmallModels()
    report: dict[str, object] = {}
    while True:
        turn(**report)
        dist.barrier()
        if dist.get_world_size() > 1:
            report = {"links": measure_links()}
        else:
            table = measure_hardware(torch.device("cpu"), name="this machine", links=(0.0, 1.0))
            report = {"table": asdict(table)}
        report["seconds"] = models.step_seconds(warm_up=warm_up)


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(int(sys.argv[2]), sys.argv[4:], warm_up=sys.argv[3] == "1")
    sys.exit(main(sys.argv[1:]))
