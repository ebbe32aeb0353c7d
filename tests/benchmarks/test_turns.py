"""Programs that take turns (benchmarks/turns.py), and what benchmarks/peers.py and benchmarks/regress.py conclude."""

import json
import subprocess
import sys

import pytest

from benchmarks.regress import is_slower
from benchmarks.turns import ROOT, Program, Running, ratio_of, take_turns

PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.turns import serve_turns
turn = serve_turns()
name, steps = sys.argv[1], int(sys.argv[2])
print("noise on stdout")
for _ in range(steps):
    turn()
    with open(sys.argv[3], "a") as log:
        log.write(name)
sys.exit("out of steps")
"""


@pytest.fixture
def program(tmp_path):
    """Returns a program that writes its name to a file in each step, and ends after some."""

    def build(name: str, *, steps: int) -> Program:
        command = [sys.executable, "-c", PROGRAM, name, str(steps), str(tmp_path / "order")]
        return Program(name=name, command=command, environment={}, log=tmp_path / f"{name}.log")

    return build


def test_programs_step_one_at_a_time_in_changing_order(program, tmp_path):
    with Running(program("a", steps=9)) as a, Running(program("b", steps=9)) as b:
        steps = take_turns([a, b], rounds=3)
    assert (tmp_path / "order").read_text() == "abbaab"
    assert {name: len(of_program) for name, of_program in steps.items()} == {"a": 3, "b": 3}
    assert all(step["wall"] > 0 and step["cpu"] > 0 and step["gib"] > 0 for step in steps["a"])


def test_a_program_that_ends_early_is_named_with_its_last_lines(program):
    with Running(program("short", steps=1)) as short, pytest.raises(SystemExit) as error:
        take_turns([short], rounds=2)
    assert "error: short ended early" in str(error.value)
    assert "out of steps" in str(error.value)


def steps_of(seconds: list[float]) -> list[dict]:
    return [{"wall": value, "cpu": 1.0} for value in seconds]


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [(1.10, 0.01, True), (1.10, 0.50, False), (1.02, 0.0, False), (0.90, 0.0, False)],
)
def test_slower_is_what_exceeds_three_percent_and_its_noise(factor, noise, expected):
    drift = [1.0 + number / 10 for number in range(20)]  # of the machine: the same for both
    before = steps_of(drift)
    after = steps_of([value * (factor + noise * (-1) ** number) for number, value in enumerate(drift)])
    ratio = ratio_of(after, before)
    assert is_slower(ratio) is expected
    assert ratio_of(after, before, clock="cpu").median == 1.0


def test_peers_compute_the_same_and_are_compared_with_ours(python, tmp_path):
    """Runs the smallest comparison, which counts the FLOPs of all programs and refuses different ones."""
    result = tmp_path / "result.json"
    command = [python, "benchmarks/peers.py", "--size=tiny", "--rounds=2", "--threads=1", f"--json={result}", "--only"]
    done = subprocess.run(
        [*command, "ours", "ours, micro-batches", "ours, tied, selective", "products", "nanoGPT"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    parameters = {row["name"]: row["parameters"] for row in found["rows"]}
    blocks, embedding = 2 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64) + 64, 2048 * 64
    assert parameters == {
        "ours": blocks + 2 * embedding,
        "ours, micro-batches": blocks + 2 * embedding,
        "ours, tied, selective": blocks + embedding,
        "products": 0,
        "nanoGPT": blocks + embedding + 64 * 64,  # positions
    }
    assert found["flops"] == 6 * 128 * (2 * (4 * 64**2 + 3 * 64 * 192) + 64 * 2048)
    assert found["processor"] in done.stdout
