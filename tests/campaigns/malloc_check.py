"""Runs short freezing runs on two ranks many times under glibc's checks of the heap.

    python tests/campaigns/malloc_check.py --runs 200

Each run trains 5 steps, freezes one of four layers before step 2, and moves from two pipeline ranks to two
data-parallel ones before step 3. A run is wrong if a rank ends with another exit code than 0, or if its losses differ
from those of the first run with the same setting; its folder is kept and printed. The exit code is 1 if a run was
wrong. Needs glibc 2.34 or newer with libc_malloc_debug.so.0.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

from benchmarks.turns import processor_name
from tests.support.harness import RankFailed
from tests.support.runs import losses, make_short_documents, options, train

CHECKED = {"LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
ONE_THREAD, PINNED = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4", "OMP_PROC_BIND": "true"}
SETTINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "checked, all ranks on one core": (CHECKED | ONE_THREAD, ["taskset", "-c", "0"]),
    "checked, threads not pinned": (CHECKED | {"OMP_NUM_THREADS": "4"}, []),
    "checked, threads pinned": (CHECKED | PINNED, []),
    "checked, Python's objects too": (CHECKED | ONE_THREAD | {"PYTHONMALLOC": "malloc"}, []),
    "freed memory overwritten": ({"MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "4"}, []),
    "large thread caches, one arena": (
        PINNED | {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=10000:glibc.malloc.arena_max=1"},
        [],
    ),
}
"""Variables of the environment and the command before Python's, by name. Checking replaces the thread caches."""
STEPS = 5
FREEZING = {
    "model__args__n_layers": 4,
    "training__steps": STEPS,
    "training__local_batch_size": 8,
    "parallelism__pipeline_parallel_degree": 2,
    "training__freeze_schedule": "[{step = 2, layers = 1}, "
    "{step = 3, layers = 3, pipeline_parallel_degree = 1, local_batch_size = 2}]",
}


def repeat(folder: Path, *, runs: int) -> int:
    """Runs in this process's environment; returns how many were right."""
    corpus = make_short_documents(folder / "corpus")
    passed, expected = 0, {}
    for number in range(runs):
        run_folder = folder / str(number)
        start = time.perf_counter()
        try:
            code, output = train(
                options(corpus, run_folder, **FREEZING), world_size=2, log_folder=run_folder, timeout=600
            )
        except (AssertionError, RankFailed) as error:
            code, output = -1, str(error)
        found = losses(run_folder)
        expected = expected or found
        is_right = code == 0 and found == expected and len(found) == STEPS
        passed += is_right
        seconds = time.perf_counter() - start
        print(
            f"  run {number + 1:4}{seconds:7.1f} s{'' if is_right else f'  WRONG, see {run_folder}: {output}'}",
            flush=True,
        )
        if is_right:
            shutil.rmtree(run_folder)
    return passed


def main() -> int:
    """Runs all settings, each in a process of its own; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=len(SETTINGS), help="divided among the settings")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # makes this process run in its own environment
    args = parser.parse_args()
    if args.folder is not None:
        return 0 if repeat(args.folder, runs=args.runs) == args.runs else 1
    print(processor_name())
    base = Path(tempfile.mkdtemp(prefix="malloc_check."))
    codes = []
    for number, (name, (env, prefix)) in enumerate(SETTINGS.items()):
        runs = args.runs // len(SETTINGS) + (number < args.runs % len(SETTINGS))
        print(f"{runs} runs, {name}", flush=True)
        command = [*prefix, sys.executable, __file__, f"--runs={runs}", f"--folder={base / str(number)}"]
        # Without ALLOCATOR malloc would not see large tensors.
        env = os.environ | {"PYTHONFAULTHANDLER": "1", "ALLOCATOR": "default"} | env
        codes.append(subprocess.run(command, env=env, check=False).returncode)
    print("all right" if not any(codes) else f"exit codes by setting: {codes}")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
