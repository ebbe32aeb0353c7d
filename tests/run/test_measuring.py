"""The metrics of a run: tokens, learning rate and FLOPs of each step follow from its plan."""

import statistics
from pathlib import Path

import pytest

from tests.support.runs import Row, options, rows, train
from torchtitan_clone.config import load_config
from torchtitan_clone.run import preflight

COLUMNS = [
    "step", "loss", "grad_norm", "clipped", "lr", "tokens_seen", "step_seconds", "data_seconds", "memory_gib",
    "skipped_steps", "tokens_per_second", "tflops_per_second", "time",
]  # fmt: skip
"""In the order of a row, which scripts of users may rely on."""
SHORT = {"training__steps": 4, "lr_scheduler__warmup_steps": 4}


def steps_of_a_run(argv: list[str], folder: Path) -> list[Row]:
    code, output = train(argv, world_size=2, log_folder=folder)
    assert code == 0, output
    return [row for row in rows(folder) if "loss" in row]


def test_rows_of_steps_follow_from_the_plan(corpus, tmp_path):
    unclipped = options(corpus, tmp_path / "unclipped", **SHORT, training__max_norm=100.0)
    norms = [row["grad_norm"] for row in steps_of_a_run(unclipped, tmp_path / "unclipped")]
    max_norm = statistics.mean(norms)
    argv = options(corpus, tmp_path / "clipped", **SHORT, training__max_norm=max_norm)
    steps = steps_of_a_run(argv, tmp_path / "clipped")
    config = load_config(argv)
    plan = preflight.resolve(config, world_size=2, device_type="cpu")
    assert [row["tokens_seen"] for row in steps] == [step * plan.tokens_per_step for step in range(1, 5)]
    assert [row["skipped_steps"] for row in steps] == [0] * 4
    assert [row["lr"] for row in steps] == pytest.approx([config.optimizer.lr * step / 4 for step in range(1, 5)])
    assert [row["clipped"] for row in steps] == [row["grad_norm"] > max_norm for row in steps]
    assert {row["clipped"] for row in steps} == {True, False}
    for row in steps:
        assert list(row) == COLUMNS
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(plan.tokens_per_step)
        flops = plan.tokens_per_step * plan.flops_per_token
        assert row["tflops_per_second"] * row["step_seconds"] == pytest.approx(flops / 1e12)
        assert "mfu_percent" not in row  # the peak of a CPU is unknown
        assert row["memory_gib"] > 0
