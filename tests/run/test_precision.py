"""Tests of precision.py and notices.py: the default data type follows the processor, and warnings at the start."""

import platform

import pytest

from tests.support.harness import run_ranks
from tests.support.runs import exit_codes, options
from torchtitan_clone.config import load_config
from torchtitan_clone.models.moe import MoEArgs, MoEModelArgs
from torchtitan_clone.ops.kernels import has_bfloat16_units
from torchtitan_clone.run.plan import resolved_precision
from torchtitan_clone.run.preflight import find_model_notices, find_notices

WITHOUT_UNITS = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Makes torch compute like a processor without bfloat16 units: products take 50 times longer."""


def resolved(*argv: str, device_type: str = "cpu") -> str:
    return resolved_precision(load_config(list(argv)), device_type=device_type).training.mixed_precision_param


def test_the_default_is_fast_here():
    assert resolved() == ("bfloat16" if has_bfloat16_units() else "float32")
    assert resolved(device_type="cuda") == "bfloat16"
    assert resolved("--training.mixed_precision_param=float32", device_type="cuda") == "float32"
    assert resolved("--training.mixed_precision_param=bfloat16") == "bfloat16"


def test_master_weights_in_bfloat16_are_never_computed_in_float32():
    assert resolved("--training.dtype=bfloat16") == "bfloat16"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs oneDNN's limit of instruction sets")
def test_a_processor_without_units_computes_in_float32_unless_asked(corpus, tmp_path):
    unset = options(corpus, tmp_path, training__mixed_precision_param=None)
    emulated = options(corpus, tmp_path, training__mixed_precision_param="bfloat16", training__steps=2)
    cases = [[*unset, "--dry-run"], emulated]
    (((planned, plan), (trained, output)),) = run_ranks(exit_codes, 1, cases, tmp_path / "log", env=WITHOUT_UNITS)
    assert (planned, trained) == (0, 0), output
    assert 'mixed_precision_param = "float32"' in plan
    assert 'mixed_precision_param = "bfloat16"' in (tmp_path / "run" / "config.toml").read_text()
    assert output.count("this processor has no bfloat16 units") == 1


def test_points_of_a_schedule_have_no_warmup_to_warn_of():
    warmup = ["--training.steps=3", "--lr_scheduler.warmup_steps=200"]
    (line,) = find_notices(load_config(warmup), device_type="cuda")
    assert "only a warmup, of 3 steps" in line
    points = load_config([*warmup, "--lr_scheduler.points=[[0, 0.0], [3, 1.0]]"])
    assert not any(find_notices(points, device_type="cuda"))


@pytest.mark.parametrize(
    ("changes", "is_trained"),
    [({}, False), ({"top_k": 2}, True), ({"normalize_scores": False}, True), ({"router_z": 0.1}, True)],
)
def test_a_router_that_is_not_trained_is_announced(changes, is_trained):
    args = MoEModelArgs(moe=MoEArgs(**{"top_k": 1, **changes}))
    assert ["the router is not trained" in line for line in find_model_notices(args)] == [True] * (not is_trained)


def test_weights_that_are_not_saved_are_announced():
    asked = ["--checkpoint.last_save_model_only", "--checkpoint.enable=false"]
    (line,) = find_notices(load_config(asked), device_type="cuda")
    assert "nothing is saved" in line
    assert not any(find_notices(load_config(asked[:1]), device_type="cuda"))
