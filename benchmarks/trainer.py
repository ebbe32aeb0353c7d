"""Measures the trainer against a plain PyTorch loop of the same model, alternating in one run.

    python benchmarks/trainer.py --rounds 3 --dtype float32 bfloat16
    python benchmarks/trainer.py --compile --json result.json -- --model.flavor=1B --training.seq_len=4096

Every round starts each as a process of its own, in changing order. Tokens per second come from the median step of a
process after its first; the ratio is the median over rounds of the trainer's rate over the plain loop's in that round.
The row "in turn" is more exact where a machine's speed drifts: trainer and plain loop live in one process, where both
allocate tensors as the trainer does, and train their steps alternately; its ratio is the median over pairs of steps.
Arguments after `--` are options of the run, for both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import ROOT, alternate, processor_name

PLAIN, TRAINER, LAUNCHED, IN_TURN = "plain loop", "trainer", "run_train.sh", "in turn"
WARM_UP_STEPS = 2


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps of one process; the first is not counted")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("options", nargs="*", help="--table.key=value for both, after --")
    arguments = parser.parse_args()
    if arguments.steps < (least := WARM_UP_STEPS + 2):
        parser.error(f"--steps {arguments.steps}: must be at least {least}, {WARM_UP_STEPS} of which warm up")
    results = {"rounds": arguments.rounds, "torch": version("torch"), "processor": processor_name(uses_gpu=True)}
    for dtype in arguments.dtype:
        results[dtype] = _compare(dtype, arguments)
    _print_table(results, arguments.dtype)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def _compare(dtype: str, arguments: argparse.Namespace) -> dict:
    names = (PLAIN, TRAINER, LAUNCHED)
    runs = alternate({name: partial(_run, name, dtype, arguments) for name in names}, rounds=arguments.rounds)
    figures: dict = {name: _medians(runs_of) for name, runs_of in runs.items()}
    for name in (TRAINER, LAUNCHED):
        pairs = zip(runs[name], runs[PLAIN], strict=True)
        rates = [ours["tokens_per_second"] / plain["tokens_per_second"] for ours, plain in pairs]
        figures[name]["ratio"] = statistics.median(rates)
        figures[name]["ratios"] = rates
    figures[IN_TURN] = _run(IN_TURN, dtype, arguments)
    return figures


def _train_plainly(options: list[str]) -> None:
    """Trains with the plain loop; prints a JSON row for each step."""
    import torch

    from tests.support.plain_loop import PlainLoop

    loop = PlainLoop(options)
    for step in range(1, loop.steps + 1):
        start = time.perf_counter()
        loss, _ = loop.train_step(step)
        row = {"step": step, "loss": loss, "step_seconds": time.perf_counter() - start, "time": time.time()}
        if torch.cuda.is_available():
            row["memory_gib"] = torch.cuda.max_memory_reserved() / 2**30
        _print_row(row)


def _print_row(row: dict) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _train_in_turn(options: list[str]) -> None:
    """Trains with trainer and plain loop alternately; prints a JSON row for each pair of steps."""
    from tests.support.plain_loop import PlainLoop
    from tests.support.trainers import open_trainer

    loop = PlainLoop(options)
    with open_trainer(options) as trainer:
        turns = [(TRAINER, lambda step: trainer.train_step(step).loss), (PLAIN, lambda step: loop.train_step(step)[0])]
        for step in range(1, loop.steps + 1):
            seconds, loss = {}, {}
            for name, train_step in turns if step % 2 else reversed(turns):
                start = time.perf_counter()
                loss[name] = train_step(step)
                seconds[name] = time.perf_counter() - start
            ratio = seconds[PLAIN] / seconds[TRAINER]
            row = {"loss": loss[TRAINER], "step_seconds": seconds[TRAINER], "time": time.time(), "ratio": ratio}
            _print_row(row)


def _medians(runs: list[dict]) -> dict:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _run(name: str, dtype: str, arguments: argparse.Namespace) -> dict:
    """Runs one process; returns its tokens per second, seconds to the end of step 1, peak memory and last loss."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}",
            f"--job.dump_folder={folder}",
            "--job.run_name=bench",
            f"--training.steps={arguments.steps}",
            "--lr_scheduler.warmup_steps=1",
            f"--training.mixed_precision_param={dtype}",
            "--metrics.log_freq=1",
            "--metrics.enable_tensorboard=false",
            "--checkpoint.enable=false",
            "--validation.enable=false",
            f"--compile.enable={str(arguments.compile).lower()}",
            *arguments.options,
        ]
        command = {
            PLAIN: [sys.executable, "benchmarks/trainer.py", PLAIN],
            TRAINER: [sys.executable, "-m", "torchtitan_clone.train"],
            LAUNCHED: ["./run_train.sh"],
            IN_TURN: [sys.executable, "benchmarks/trainer.py", IN_TURN],
        }[name]
        start = time.time()
        rows, memory_gib = _execute([*command, *options], rows_file=Path(folder) / "bench" / "metrics.jsonl")
    tokens = _tokens_per_step(options)
    steps = [row["step_seconds"] for row in rows[1:]]
    return {
        "tokens_per_second": tokens / statistics.median(steps),
        "first_step_seconds": rows[0]["time"] - start,
        "memory_gib": rows[-1]["memory_gib"] if "memory_gib" in rows[-1] and _has_gpu() else memory_gib,
        "loss": rows[-1]["loss"],
    } | ({"ratio": statistics.median(row["ratio"] for row in rows[WARM_UP_STEPS:])} if name == IN_TURN else {})


def _execute(command: list[str], *, rows_file: Path) -> tuple[list[dict], float]:
    """Runs the command; returns its rows, from its output or else the file, and its peak resident memory in GiB."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "NGPU": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{output}")
    rows = list(_rows(output)) or list(_rows(rows_file.read_text()))
    return rows, usage.ru_maxrss / 2**20


def _rows(text: str) -> Iterator[dict]:
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            if "loss" in row:
                yield row


def _tokens_per_step(options: list[str]) -> int:
    from torchtitan_clone.config import load_config

    training = load_config(options).training
    return training.seq_len * max(training.local_batch_size, training.global_batch_size)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _print_table(results: dict, dtypes: list[str]) -> None:
    print(f"{results['processor']}; torch {results['torch']}, medians of {results['rounds']} rounds")
    print(f"{'':10}{'':14}{'tokens/s':>10}{'ratio':>8}{'first step s':>14}{'memory GiB':>12}{'last loss':>11}")
    for dtype in dtypes:
        for name, figures in results[dtype].items():
            ratio = f"{figures['ratio']:.3f}" if "ratio" in figures else ""
            print(
                f"{dtype:10}{name:14}{figures['tokens_per_second']:10,.0f}{ratio:>8}"
                f"{figures['first_step_seconds']:14.1f}{figures['memory_gib']:12.2f}{figures['loss']:11.4f}"
            )


if __name__ == "__main__":
    if sys.argv[1:2] in ([PLAIN], [IN_TURN]):
        (_train_in_turn if sys.argv[1] == IN_TURN else _train_plainly)(sys.argv[2:])
        os._exit(0)
    main()
