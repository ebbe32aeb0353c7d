"""Compares losses and gradient norms of this checkout with those of another, to the last bit.

    python benchmarks/golden.py record golden --repo=../before
    python benchmarks/golden.py compare golden
    python benchmarks/golden.py resume golden

Trains 20 steps of a small model for each of several configurations, with the code of the checkout in --repo, and writes
every loss and gradient norm to golden/numbers.json. `compare` trains the same with this checkout; `resume` does so from
the recorded checkpoints of step 10. Bits differ between processors: record and compare on one machine. The exit code is
1 if a number differs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import processor_name
from tests.support.runs import make_corpus

ROOT = Path(__file__).resolve().parents[1]
COMMON = {
    "training.seq_len": 64, "training.local_batch_size": 2, "training.global_batch_size": 8,
    "training.mixed_precision_param": "float32", "training.steps": 20, "optimizer.lr": 3e-3,
    "lr_scheduler.warmup_steps": 2, "metrics.log_freq": 1, "data.held_out_fraction": 0.1, "model.args.dim": 64,
    "model.args.n_layers": 4, "model.args.n_heads": 4, "model.args.n_kv_heads": 2, "model.args.multiple_of": 32,
    "checkpoint.interval": 10,
}  # fmt: skip
PIPELINE = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 4}
CONTEXT = {"parallelism.context_parallel_degree": 2}
SHARD = {"parallelism.data_parallel_shard_degree": 2}
CASES = {
    "one rank fp32": (1, {}),
    "one rank bf16": (1, {"training.mixed_precision_param": "bfloat16"}),
    "compile": (1, {"compile.enable": "true", "compile.components": '["model", "loss"]'}),
    "fsdp 2": (2, SHARD),
    "hsdp 2x2": (4, SHARD | {"parallelism.data_parallel_replicate_degree": 2}),
    "tensor 2": (2, {"parallelism.tensor_parallel_degree": 2}),
    "pipeline 2 1f1b": (2, PIPELINE | {"parallelism.pipeline_parallel_schedule": "1F1B"}),
    "pipeline 2 interleaved": (2, PIPELINE | {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}),
    **{
        f"context 2 {method}": (2, CONTEXT | {"parallelism.context_parallel_rotate_method": method})
        for method in ("allgather", "alltoall", "ring")
    },
    "freezing": (2, SHARD | {"training.freeze_schedule": "[{step = 8, layers = 1}, {step = 14, layers = 2}]"}),
}
# Runs in the other checkout, which may be an old one: the same classes have been in three places.
REPLICAS = """
import sys
from pathlib import Path
try:
    from tests.support.cluster import Cluster
    from tests.support.faults import Fault
except ImportError:
    try:
        from torchtitan_clone.testing.cluster import Cluster
        from torchtitan_clone.testing.faults import Fault
    except ImportError:
        from tests.fault_tolerance.cluster import Cluster
        from tests.fault_tolerance.faults import Fault
if __name__ == "__main__":
    changes = {"training__local_batch_size": 2, "training__steps": 20, "checkpoint__enable": False}
    with Cluster(Path(sys.argv[1]), Path(sys.argv[2]), groups=2, revive_seconds=1e9, **changes) as cluster:
        cluster.start_all(faults=[Fault(kind="kill", place="forward", step=8, group=1, rank=0)])
        cluster.watch_over(until=lambda: cluster.step_of(0) == 20)
"""
Numbers = list[list[int | str]]  # step, loss and gradient norm of each step, the latter two as hexadecimal floats


def main() -> int:
    """Records or compares; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "resume"])
    parser.add_argument("folder", type=Path, help="folder for numbers, text and runs")
    parser.add_argument("--repo", type=Path, default=ROOT, help="checkout whose code trains (this one)")
    parser.add_argument("--only", default="", help="configurations with this text in their name")
    options = parser.parse_args()
    print(processor_name())
    folder = options.folder.resolve()
    corpus = folder / "corpus"
    if not corpus.exists():
        make_corpus(corpus)
    shutil.rmtree(folder / options.action, ignore_errors=True)
    found: dict[str, Numbers] = {}
    for name, (ranks, changes) in CASES.items():
        if options.only in name:
            if options.action == "resume":
                copy_step_10(folder / "record" / name, folder / "resume" / name)
            argv = {**COMMON, **changes, "training.dataset_path": corpus, "data.cache_folder": folder / "cache"}
            found[name] = train(options.repo.resolve(), folder / options.action / name, ranks=ranks, options=argv)
            print(f"{name}: {len(found[name])} steps", flush=True)
    if options.only in "replicas" and options.action != "resume":
        found["replicas"] = train_replicas(options.repo.resolve(), folder / options.action, corpus=corpus)
    if options.action == "record":
        (folder / "numbers.json").write_text(json.dumps(found, indent=1))
        return int(any(len(numbers) != COMMON["training.steps"] for numbers in found.values()))
    expected: dict[str, Numbers] = json.loads((folder / "numbers.json").read_text())
    different = [name for name in found if found[name] != expected[name]]
    for name in different:
        pairs = [(a, b) for a, b in zip(found[name], expected[name], strict=False) if a != b]
        print(f"{name}: {len(found[name])} steps, {len(expected[name])} expected; first difference {pairs[:1]}")
    print(f"{len(found)} configurations, {len(different)} differ")
    return int(bool(different))


def copy_step_10(recorded: Path, folder: Path) -> None:
    """Copies a recorded run without its later checkpoint and numbers, so that training resumes after step 10."""
    shutil.copytree(recorded, folder)
    metrics = folder / "run" / "metrics.jsonl"
    rows = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line).get("step", 0) <= 10]
    metrics.write_text("".join(rows))
    for path in (folder / "run" / "checkpoint").glob("*"):
        if path.is_dir() and path.name != "step-10":
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()


def train(repo: Path, folder: Path, *, ranks: int, options: dict[str, object]) -> Numbers:
    """Trains one configuration with the code of `repo`."""
    argv = [f"--{key}={value}" for key, value in options.items()]
    env = {**os.environ, "NGPU": str(ranks), "PYTHON": sys.executable, "NO_SETUP": "1"}
    command: list[str | Path] = [repo / "run_train.sh", f"--job.dump_folder={folder}", "--job.run_name=run", *argv]
    run_command(command, env=env, cwd=repo)
    return read_numbers(folder / "run" / "metrics.jsonl")


def run_command(command: list[str | Path], *, env: dict[str, str], cwd: Path) -> None:
    """Runs the command; prints the end of its output if it fails."""
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:])


def train_replicas(repo: Path, folder: Path, *, corpus: Path) -> Numbers:
    """Trains two replica groups, one of which is killed; again if one came late, which is another run."""
    numbers: Numbers = []
    for attempt in range(6):
        place = folder / f"replicas{attempt}"
        place.mkdir(parents=True)
        (place / "replicas.py").write_text(REPLICAS)
        command = [sys.executable, place / "replicas.py", corpus, place]
        run_command(command, env={**os.environ, "PYTHONPATH": str(repo)}, cwd=repo)
        numbers = read_numbers(place / "run" / "replica-0" / "metrics.jsonl")
        if len(numbers) == COMMON["training.steps"]:
            break
    return numbers


def read_numbers(file: Path) -> Numbers:
    """Returns the numbers of each step that a run has logged."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [[row["step"], row["loss"].hex(), row["grad_norm"].hex()] for row in rows if "loss" in row]


if __name__ == "__main__":
    sys.exit(main())
