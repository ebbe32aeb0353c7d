"""What benchmarks/golden.py resumes from."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import golden

ROOT = Path(__file__).parents[2]


def test_a_run_that_does_not_resume_differs(tmp_path):
    recorded = tmp_path / "record" / "one rank fp32" / "run"
    for step in (10, 20):
        (recorded / "checkpoint" / f"step-{step}").mkdir(parents=True)
    rows = [{"step": step, "loss": 1.0, "grad_norm": 2.0} for step in range(1, 21)]
    (recorded / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "numbers.json").write_text(
        json.dumps({"one rank fp32": golden.read_numbers(recorded / "metrics.jsonl")})
    )
    (tmp_path / "corpus").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run_train.sh").write_text("#!/bin/sh\nexit 1\n")
    (broken / "run_train.sh").chmod(0o755)
    command = [sys.executable, ROOT / "benchmarks" / "golden.py", "resume", tmp_path, f"--repo={broken}"]
    done = subprocess.run([*command, "--only=one rank fp32"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "one rank fp32: 10 steps, 20 expected" in done.stdout
