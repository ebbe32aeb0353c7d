"""Collects what scripts/gpu_suite.sh has written: all figures into results.json, and prints the tables, a summary last.

    python benchmarks/gpu_results.py outputs/gpu_suite

A section that was stopped may have left a part of its figures, which are then null.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch

from benchmarks.turns import processor_name

RESULTS = "results.json"
FAILED = "FAILED"
SKIPPED = "not run: "
"""What the output of a section begins with that this machine cannot run."""
LINES = 40


def main(folder: Path) -> int:
    """Writes results.json and prints the tables; returns 1 if a section failed, else 0."""
    sections = {
        file.stem: {
            "seconds": int(done.read_text()) if (done := file.with_suffix(".done")).exists() else None,
            "output": file.with_suffix(".txt").read_text().splitlines(),
            "errors": file.read_text().splitlines()[-LINES:],
        }
        for file in sorted(folder.glob("*.err"), key=lambda file: file.stat().st_mtime)
    }
    figures = {file.stem: _read(file) for file in folder.glob("*.json") if file.name != RESULTS}
    about = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": processor_name(),
        "torch": str(torch.__version__),
    }
    (folder / RESULTS).write_text(json.dumps({**about, "sections": sections, "figures": figures}, indent=1))
    for name, section in sections.items():
        print(f"--- {name}", *section["output"][-LINES:], sep="\n")
        if section["seconds"] is None:
            print(*section["errors"][-LINES:], sep="\n")
    print("===", *about.values())
    for name, section in sections.items():
        print(f"{name:12}{_state(section):>8}  {(section['output'] or [''])[-1].removeprefix(SKIPPED)}")
    return int(any(_state(section) == FAILED for section in sections.values()))


def _state(section: Mapping[str, Any]) -> str:
    if section["seconds"] is not None:
        return f"{section['seconds']} s"
    return "not run" if "".join(section["output"]).startswith(SKIPPED) else FAILED


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text())
    except ValueError:
        return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the suite")
    sys.exit(main(parser.parse_args().folder))
