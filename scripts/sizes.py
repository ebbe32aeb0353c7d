"""Prints sizes of the project: lines of each package, of what an import loads, and of what a training step executes.

    python scripts/sizes.py

The step is the third of train_configs/debug_model.toml on one CPU process; a file counts if a function of it is called.
Lines are those of Python and C++, with comments and blank lines.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan_clone"
DOORS = ("cpu", "planner", "tools", "torchft", "commands", "api")
LOADED = """
import sys, {0}
files = (module.__file__ for name, module in sys.modules.items() if name.startswith("torchtitan_clone"))
print(*filter(None, files))
"""
STEP = """
import sys
from torchtitan_clone import train, trainer
seen, steps = set(), 0
def see(frame, event, _):
    global steps
    is_step = frame.f_code is trainer.Trainer.train_step.__code__
    steps += is_step and event == "call"
    if steps == 3 and event == "call" and frame.f_code.co_filename.startswith({package!r}):
        seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))
    if steps == 3 and is_step and event == "return":
        sys.setprofile(None)
sys.setprofile(see)
train.main(sys.argv[1:])
print(*(file for file, _ in sorted(seen)))
"""


def main() -> None:
    sizes = {
        path: len(path.read_bytes().splitlines()) for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cpp", ".h")
    }
    packages = Counter[str]()
    for path, lines in sizes.items():
        packages[path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "(files)"] += lines
    for name, lines in sorted(packages.items()):
        print(f"{name:12} {lines:6,}")
    doors = sum(packages[name] for name in DOORS)
    print(f"core {sum(packages.values()) - doors:,}, doors {doors:,}, total {sum(packages.values()):,}")
    print(f"largest file: {max(sizes.values()):,}")
    for folder in ("tests", "benchmarks", "scripts"):
        print(f"{folder:12} {sum(len(path.read_bytes().splitlines()) for path in (ROOT / folder).rglob('*.py')):6,}")
    for module in ("torchtitan_clone.models", "torchtitan_clone.trainer"):
        loaded = {Path(file) for file in run(LOADED.format(module)).split()}
        print(f"import {module}: {sum(sizes[path] for path in loaded):,} lines in {len(loaded)} files")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"--job.config_file={ROOT}/train_configs/debug_model.toml", f"--job.dump_folder={folder}")
        output = run(STEP.format(package=str(PACKAGE)), *arguments, "--training.steps=4")
    functions = Counter(Path(file) for file in output.splitlines()[-1].split())
    lines = sum(sizes[path] for path in functions)
    print(f"a step: {functions.total()} functions of {len(functions)} files, {lines:,} lines")
    for path, count in functions.most_common():
        print(f"    {count:3} {path.relative_to(PACKAGE)}")


def run(code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        sys.exit(process.stderr)
    return process.stdout


if __name__ == "__main__":
    main()
