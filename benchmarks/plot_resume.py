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

FOLDER = Path("outputs", f"plot_resume_{os.getpid()}").absolute()
CURVES = {"uninterrupted": ("#c4c4c4", 9.0), "until SIGKILL": ("#d95f02", 4.5), "resumed": ("#1f77b4", 1.8)}
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" style="background:#fff; font:13px sans-serif">'


def start(name: str, *, overrides: tuple[str, ...]) -> subprocess.Popen[bytes]:
    options = [f"--job.dump_folder={FOLDER}", f"--job.run_name={name}", "--metrics.log_freq=1", *overrides]
    launcher = Path(__file__).resolve().parents[1] / "run_train.sh"
    return subprocess.Popen([launcher, *options], env={**os.environ, "NGPU": "1"}, start_new_session=True)


def read_rows(name: str) -> dict[int, dict[str, float]]:
    file = FOLDER / name / "metrics.jsonl"
    complete_lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return {row["step"]: row for row in map(json.loads, complete_lines) if "grad_norm" in row}


def draw(curves: dict[str, dict[int, dict[str, float]]], *, caption: str) -> str:
    last, killed, _ = map(max, curves.values())
    losses = [row["loss"] for row in curves["uninterrupted"].values()]
    low, high = int(min(losses)), max(losses) + 0.3

    def at(step: float, loss: float) -> tuple[float, float]:
        return round(60 + 630 * step / last, 1), round(50 + 290 * (high - loss) / (high - low), 1)

    def line(points: list[tuple[float, float]], color: str = "#ddd", width: float = 1.0) -> str:
        path = " ".join(f"{x},{y}" for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    def text(words: object, *, x: float, y: float) -> str:
        return f'<text x="{x}" y="{y}" stroke="#fff" stroke-width="4" paint-order="stroke">{words}</text>'

    image = [HEAD, text(caption, x=60, y=28), text("step", x=360, y=384), text("loss", x=20, y=54)]
    for loss in range(low, int(high) + 1):
        image += [line([at(0, loss), at(last, loss)]), text(loss, x=36, y=at(0, loss)[1] + 4)]
    image += [text(step, x=at(step, low)[0] - 8, y=360) for step in range(0, last + 1, 20)]
    image += [line([at(killed, low), at(killed, high)], "#d95f02"), text("SIGKILL", x=at(killed, low)[0] + 6, y=200)]
    for (name, rows), y in zip(curves.items(), (80, 104, 128), strict=True):
        image += [line([at(step, row["loss"]) for step, row in rows.items()], *CURVES[name])]
        key = text(f"{name}: steps {min(rows)} to {max(rows)}", x=490, y=y + 4)
        image += [line([(440, y), (480, y)], *CURVES[name]), key]
    return "\n".join([*image, "</svg>\n"])


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
    image.write_text(draw(dict(zip(CURVES, (expected, before, resumed), strict=True)), caption=caption))
    return int(equal < len(expected))


if __name__ == "__main__":
    sys.exit(main())
