"""Collects what scripts/gpu_suite.sh has written: all figures into results.json, and prints the tables, a summary last.

    python benchmarks/gpu_results.py outputs/gpu_suite

A section that was stopped may have left a part of its figures, which are then null.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch

from benchmarks.turns import processor_name

RESULTS = "results.json"
LINES = 40


def main(folder: Path) -> None:
    """Writes results.json and prints the tables."""
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
        state = "FAILED" if section["seconds"] is None else f"{section['seconds']} s"
        print(f"{name:12}{state:>8}  {(section['output'] or [''])[-1]}")


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text())
    except ValueError:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
