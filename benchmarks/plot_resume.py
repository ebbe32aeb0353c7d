"""Draws the loss curve of a run that is killed and resumed over the curve of an uninterrupted run.

    python benchmarks/plot_resume.py --image=docs/images/resume.svg --kill_after=70 -- --training.seq_len=256

Trains the debug model twice in --folder, sends SIGKILL to the second run after it has logged step --kill_after, and
runs the same command again. Arguments after -- are overrides of both runs. Exit code 1 if the losses differ.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

Rows = dict[int, dict[str, float]]
LEFT, TOP, WIDTH, HEIGHT = 60, 50, 630, 290
CURVES = {"uninterrupted": ("#c4c4c4", 9.0), "until SIGKILL": ("#d95f02", 4.5), "resumed": ("#1f77b4", 1.8)}
LAUNCHER = Path(__file__).resolve().parent.parent / "run_train.sh"
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400"><rect width="720" height="400" fill="#fff"/>
<style>text{font:13px sans-serif;fill:#333} polyline{fill:none;stroke-linejoin:round}</style>"""


def start(folder: Path, name: str, *, overrides: list[str]) -> subprocess.Popen[bytes]:
    command = [LAUNCHER, f"--job.dump_folder={folder}", f"--job.run_name={name}", "--metrics.log_freq=1", *overrides]
    return subprocess.Popen(command, env={**os.environ, "NGPU": "1"}, start_new_session=True)


def read_rows(folder: Path, name: str) -> Rows:
    file = folder / name / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {row["step"]: row for row in map(json.loads, filter(str.strip, lines)) if "grad_norm" in row}


def kill_after(step: int, *, process: subprocess.Popen[bytes], folder: Path) -> Rows:
    while step not in read_rows(folder, "killed"):
        assert process.poll() is None, "the run ended before step --kill_after"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return read_rows(folder, "killed")


def draw(curves: dict[str, Rows], *, caption: str) -> str:
    whole, killed = curves["uninterrupted"], max(curves["until SIGKILL"])
    low, high = int(min(row["loss"] for row in whole.values())), max(row["loss"] for row in whole.values()) + 0.3

    def x(step: float) -> float:
        return round(LEFT + WIDTH * step / max(whole), 1)

    def y(loss: float) -> float:
        return round(TOP + HEIGHT * (high - loss) / (high - low), 1)

    def line(*points: tuple[float, float], color: str, width: float = 1.0, more: str = "") -> str:
        path = " ".join(f"{x},{y}" for x, y in points)
        return f'<polyline points="{path}" stroke="{color}" stroke-width="{width}" {more}/>'

    def text(x: float, y: float, words: object, anchor: str = "start") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'

    image = [HEAD, text(LEFT, 28, caption), text(LEFT + WIDTH / 2, 384, "step", "middle"), text(20, 54, "loss")]
    for loss in range(low, int(high) + 1):
        image += [line((x(0), y(loss)), (LEFT + WIDTH, y(loss)), color="#ddd"), text(46, y(loss) + 4, loss, "end")]
    image += [text(x(step), TOP + HEIGHT + 20, step, "middle") for step in range(0, max(whole) + 1, 20)]
    image += [line((x(killed), TOP), (x(killed), TOP + HEIGHT), color="#d95f02", more='stroke-dasharray="5 4"')]
    image += [text(x(killed) + 6, TOP + 150, f"SIGKILL after step {killed}")]
    for (name, rows), key in zip(curves.items(), range(80, 200, 24), strict=False):
        color, width = CURVES[name]
        image += [line(*((x(step), y(row["loss"])) for step, row in rows.items()), color=color, width=width)]
        image += [line((440, key), (480, key), color=color, width=width)]
        image += [text(490, key + 4, f"{name}: steps {min(rows)} to {max(rows)}")]
    return "\n".join([*image, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, default=LAUNCHER.parent / "docs" / "images" / "resume.svg")
    parser.add_argument("--kill_after", type=int, default=70)
    parser.add_argument("--folder", type=Path, default=Path("outputs/plot_resume").absolute())
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    assert start(options.folder, "uninterrupted", overrides=options.overrides).wait() == 0
    killed = start(options.folder, "killed", overrides=options.overrides)
    before = kill_after(options.kill_after, process=killed, folder=options.folder)
    assert start(options.folder, "killed", overrides=options.overrides).wait() == 0
    whole, found = read_rows(options.folder, "uninterrupted"), read_rows(options.folder, "killed")
    after = {step: row for step, row in found.items() if row["time"] != before.get(step, {}).get("time")}
    equal = sum(step in found and found[step]["loss"] == row["loss"] for step, row in whole.items())
    caption = f"Debug model: {equal} of {len(whole)} losses are bit-identical to the uninterrupted run"
    curves = {"uninterrupted": whole, "until SIGKILL": before, "resumed": after}
    options.image.parent.mkdir(parents=True, exist_ok=True)
    options.image.write_text(draw(curves, caption=caption))
    return int(equal < len(whole))


if __name__ == "__main__":
    sys.exit(main())
