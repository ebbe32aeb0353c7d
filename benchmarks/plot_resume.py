"""Draws the loss curve of a run that is killed and resumed over the curve of an uninterrupted run.

    python benchmarks/plot_resume.py docs/images/resume.svg 70 --training.seq_len=256

Trains the debug model twice in outputs/plot_resume_PID, kills the second run with SIGKILL after it has logged that
step, and repeats its command. Further arguments are overrides of both runs. Exit code 1 if any loss differs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.curves import Curve, draw

FOLDER = Path("outputs", f"plot_resume_{os.getpid()}").absolute()
CURVES = {"uninterrupted": ("#c4c4c4", 9.0), "until SIGKILL": ("#d95f02", 4.5), "resumed": ("#1f77b4", 1.8)}


def start(name: str, *, overrides: tuple[str, ...]) -> subprocess.Popen[bytes]:
    options = [f"--job.dump_folder={FOLDER}", f"--job.run_name={name}", "--metrics.log_freq=1", *overrides]
    launcher = Path(__file__).resolve().parents[1] / "run_train.sh"
    return subprocess.Popen([launcher, *options], env={**os.environ, "NGPU": "1"}, start_new_session=True)


def read_rows(name: str) -> dict[int, dict[str, float]]:
    file = FOLDER / name / "metrics.jsonl"
    complete_lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return {row["step"]: row for row in map(json.loads, complete_lines) if "grad_norm" in row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path, help="the figure, an .svg file")
    parser.add_argument("kill_after", type=int, help="step after which the second run is killed")
    choices, overrides = parser.parse_known_args()
    return compare(choices.image, choices.kill_after, *overrides)


def compare(image: Path, kill_after: int, *overrides: str) -> int:
    assert start("uninterrupted", overrides=overrides).wait() == 0
    process = start("killed", overrides=overrides)
    while kill_after not in read_rows("killed"):
        assert process.poll() is None, f"the run ended before step {kill_after}"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = read_rows("killed")
    assert start("killed", overrides=overrides).wait() == 0
    expected, found = read_rows("uninterrupted"), read_rows("killed")
    equal = sum(found[s]["loss"] == row["loss"] == before.get(s, row)["loss"] for s, row in expected.items())
    resumed = {step: row for step, row in found.items() if row != before.get(step)}
    caption = f"Debug model: {equal} of {len(expected)} losses are bit-identical to the uninterrupted run"
    curves = [
        Curve(
            name=f"{name}: steps {min(rows)} to {max(rows)}", color=color, width=width,
            values={step: row["loss"] for step, row in rows.items()},
        )
        for (name, (color, width)), rows in zip(CURVES.items(), (expected, before, resumed), strict=True)
    ]  # fmt: skip
    image.write_text(draw(curves, caption=caption, mark=(max(before), "SIGKILL")))
    return int(equal < len(expected))


if __name__ == "__main__":
    sys.exit(main())
