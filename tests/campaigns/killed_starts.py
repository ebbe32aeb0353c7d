"""Kills starts at random moments while they compile C++ into an empty cache, and looks for what they leave.

    python tests/campaigns/killed_starts.py --starts 200
    python tests/campaigns/killed_starts.py --starts 20 --run

Each start loads the libraries of C++ that a CPU trains with; with `--run` it is one step of
train_configs/debug_model.toml. It is killed by SIGKILL at a random moment of the time that the first one took. Prints
processes that are alive 5 s later, files that are left among temporary files then, files that are left in the cache
after the next start, which is not killed in one of ten cases, and starts of those that failed. Exits with 1 if any.
Linux only.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

from benchmarks.turns import ROOT, processor_name

SECONDS_TO_END = 5
LIBRARIES = """
from torchtitan_clone.cpu.library import is_loaded, start_compiling
from torchtitan_clone.cpu.tensor_region import use_tensor_region
start_compiling()
use_tensor_region()
assert is_loaded()
"""
RUN = [
    "-m", "torchtitan_clone.train", f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}",
    "--training.steps=1", "--lr_scheduler.warmup_steps=1", "--checkpoint.enable=false", "--validation.enable=false",
]  # fmt: skip


class Starts:
    """Starts with caches and temporary files of their own, by which their processes are found."""

    def __init__(self, folder: Path, *, arguments: list[str]) -> None:
        self.cache, self.temporary = folder / "cache" / "torchtitan_clone" / "cpp", folder / "tmp"
        self.temporary.mkdir()
        self._mark = f"XDG_CACHE_HOME={folder / 'cache'}".encode()
        self._command = [sys.executable, *arguments]
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(self.temporary)}

    def start(self) -> "subprocess.Popen[bytes]":
        """Starts a process in the root of the repository, whose output is discarded."""
        null = subprocess.DEVNULL
        return subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stdout=null, stderr=null)

    def processes(self) -> list[str]:
        """Returns the command lines of all processes that belong to a start."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
            except OSError:  # it has ended, or belongs to another user
                continue
        return found

    def leftovers(self, folder: Path) -> list[str]:
        """Returns files below a folder, and what is in it, without libraries, locks and the folder that torch makes."""
        paths = {*folder.glob("*"), *(path for path in folder.rglob("*") if path.is_file())}
        kept = [path for path in paths if path.suffix not in (".so", ".lock") and "torchinductor_" not in path.name]
        return sorted(str(path.relative_to(folder)) for path in kept)


def try_start(starts: Starts, *, seconds: float) -> list[str]:
    """Kills a start with an empty cache after some time; returns what is wrong 5 s later."""
    shutil.rmtree(starts.cache, ignore_errors=True)
    process = starts.start()
    time.sleep(seconds)
    process.kill()
    process.wait()
    end = time.monotonic() + SECONDS_TO_END
    while starts.processes() and time.monotonic() < end:
        time.sleep(0.05)
    orphans = [f"orphan: {line}" for line in starts.processes()]
    return orphans + [f"left: {path}" for path in starts.leftovers(starts.temporary)]


def check_next_start(starts: Starts) -> list[str]:
    """Starts once more with the cache as it is; returns what is wrong then."""
    status = starts.start().wait()
    left = [path for path in starts.leftovers(starts.cache) if Path(path).suffix]
    libraries = len(list(starts.cache.rglob("*.so")))
    return (
        [f"next start: status {status}, {libraries} libraries, left {left}"] if status or left or not libraries else []
    )


def main() -> None:
    """Prints what is wrong after each start, and a line with the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200, help="number of starts that are killed")
    parser.add_argument("--run", action="store_true", help="start a run instead of loading the libraries")
    parser.add_argument("--seed", type=int, default=0)
    choices = parser.parse_args()
    draw = random.Random(choices.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*RUN, f"--job.dump_folder={folder}/outputs"] if choices.run else ["-c", LIBRARIES]
        starts = Starts(Path(folder), arguments=arguments)
        begin = time.monotonic()
        problems = check_next_start(starts)
        whole = time.monotonic() - begin
        print(f"{processor_name()}; a whole start with an empty cache: {whole:.1f} s", *problems, flush=True)
        for number in range(choices.starts):
            found = try_start(starts, seconds=draw.uniform(0, whole))
            if number % 10 == 9:
                found += check_next_start(starts)
            for line in found:
                print(f"start {number + 1}: {line}", flush=True)
            problems += found
    print(f"{choices.starts} starts killed, {choices.starts // 10} next starts whole: {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
