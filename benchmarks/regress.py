"""Compares the speed of two commits: the same small runs with the code of each, their steps taken in turn.

    python benchmarks/regress.py HEAD~1
    python benchmarks/regress.py v1 v2 --only tensor pipeline --rounds 60 --clock cpu

Each commit is checked out into a temporary worktree; the second is by default this checkout as it is. For each of eight
configurations both programs live at once, so that the machine's drift affects both. A configuration got slower if the
median of the ratios is above 1.03 by more than two standard errors. The exit code is 1 if one did.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.turns import ROOT, Program, Ratio, Running, processor_name, ratio_of, serve_turns_of_ranks, take_turns

SERVE = "serve"
MOST = 1.03
ERRORS = 2
WARM_UP_STEPS = 3
COMMON = {
    "training.seq_len": 128, "training.local_batch_size": 4, "training.global_batch_size": 4, "model.args.dim": 128,
    "model.args.n_layers": 4, "model.args.n_heads": 4, "training.mixed_precision_param": "float32",
    "training.steps": 1_000_000, "checkpoint.enable": "false", "validation.enable": "false",
    "activation_checkpoint.mode": "none", "training.document_masking": "false",
}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "one rank": {},
    "documents": {"training.document_masking": "true"},
    "recomputation": {"activation_checkpoint.mode": "full", "training.global_batch_size": 8},
    "compile": {"compile.enable": "true", "model.args.n_layers": 2},
    "shard 2": {"parallelism.data_parallel_shard_degree": 2, "training.global_batch_size": 8},
    "tensor 2": {"parallelism.tensor_parallel_degree": 2},
    "pipeline 2": {"parallelism.pipeline_parallel_degree": 2},
    "context 2": {"parallelism.context_parallel_degree": 2},
}


def main() -> int:
    """Compares the configurations; returns the exit code."""
    options = _parse()
    compared = f"{options.before} and {options.after or 'this checkout'}"
    print(f"{processor_name(uses_gpu=True)}; {compared}, {options.clock} time")
    slower = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        commits = {"before": options.before, "after": options.after}
        checkouts = {name: stack.enter_context(_checkout(commit, folder / name)) for name, commit in commits.items()}
        for name in options.only:
            ratio = _compare(name, checkouts, folder=folder, rounds=options.rounds, clock=options.clock)
            slower += [name] if is_slower(ratio) else []
            print(f"{name:16}{ratio}  error {ratio.error:.3f}{'  SLOWER' if is_slower(ratio) else ''}", flush=True)
    print(f"slower by more than {MOST - 1:.0%}: {', '.join(slower) or 'none'}")
    return int(bool(slower))


def is_slower(ratio: Ratio) -> bool:
    """Returns whether the time of "after" over that of "before" shows a loss of more than 3 % beyond its noise."""
    return ratio.median - ERRORS * ratio.error > MOST


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="commit to compare with")
    parser.add_argument("after", nargs="?", help="commit (default: this checkout, with changes not committed)")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--rounds", type=int, default=40, help="measured steps of each commit")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: time of rank 0 without waiting")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: must be at least 2")
    for commit in filter(None, (options.before, options.after)):
        command = ["git", "-C", ROOT, "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            parser.error(f"{commit} is not a commit of this repository")
    return options


@contextmanager
def _checkout(commit: str | None, folder: Path) -> Iterator[Path]:
    """Yields a worktree of the commit, or this checkout."""
    if commit is None:
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def _compare(name: str, checkouts: dict[str, Path], *, folder: Path, rounds: int, clock: str) -> Ratio:
    """Returns the time of "after" over that of "before" in one configuration."""
    values = {**COMMON, **CONFIGURATIONS[name]}
    argv = [f"--{key}={value}" for key, value in values.items()]
    with ExitStack() as stack:
        programs = [
            Program(
                name=side,
                command=[sys.executable, __file__, SERVE, str(checkout), *argv, f"--job.dump_folder={folder / 'runs'}",
                         f"--job.run_name={side}"],
                environment={"OMP_NUM_THREADS": "1"},
                log=folder / f"{side}.log",
            )
            for side, checkout in checkouts.items()
        ]  # fmt: skip
        running = [stack.enter_context(Running(program)) for program in programs]
        take_turns(running, rounds=WARM_UP_STEPS)
        steps = take_turns(running, rounds=rounds)
    return ratio_of(steps["after"], steps["before"], clock=clock)


# ---------------------------------------------------------------- a program: all ranks of one run


def ranks_of(argv: list[str]) -> int:
    """Returns how many ranks a program with these options has."""
    return 2 if any(option.endswith("_degree=2") for option in argv) else 1


def serve(argv: list[str]) -> None:
    """Trains with the package of a checkout; rank 0 serves the turns, and rank 1 follows it in every collective."""
    checkout, *argv = argv
    sys.path.insert(0, checkout)
    try:  # before checkouts had tests/support, whose trainers here need the package as it is now
        from torchtitan_clone.testing.trainers import open_trainer
    except ImportError:
        from tests.support.trainers import open_trainer

    turn = serve_turns_of_ranks(ranks_of(argv))
    with open_trainer(argv) as trainer:
        for step in itertools.count(1):
            turn()
            trainer.train_step(step)


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2:])
    sys.exit(main())
