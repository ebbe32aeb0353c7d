"""A dry run prints the resolved run and trains nothing."""

import re
from importlib.util import find_spec

import pytest

from tests.marks import needs_door
from tests.support.runs import options, train
from torchtitan_clone.config import load_config
from torchtitan_clone.run import preflight
from torchtitan_clone.run.describe import one_line_summary, summary


@needs_door("planner")
def test_a_dry_run_prints_how_weights_are_sharded(corpus, tmp_path):
    changes = {"parallelism__tensor_parallel_degree": 2, "training__local_batch_size": 2}
    # Weights are the same in float8, whose package a dry run does not need.
    argv = options(corpus, tmp_path, model__converters='["float8"]', **changes)
    code, text = train([*argv, "--dry-run"], log_folder=tmp_path, env={"WORLD_SIZE": "8"})
    assert code == 0, text
    assert ("torchao is not installed; to train, pip install" in text) == (find_spec("torchao") is None)
    lines = {re.sub(" +", " ", line).strip() for line in text.split("weights of rank 0\n")[1].splitlines()}
    assert lines == {
        "dim 0 over tp 2, dim 0 over fsdp 4 tok_embeddings.weight [2048, 64] -> [256, 64], and 6 more",
        "dim 0 over fsdp 4 layers.*.attention_norm.weight [64] -> [16], and 2 more",
        "dim 1 over tp 2, dim 0 over fsdp 4 layers.*.attention.wo.weight [64, 64] -> [16, 32], and 1 more",
    }


def test_a_dry_run_prints_what_differs_from_the_defaults(corpus, tmp_path):
    argv = ["--dry-run", *options(corpus, tmp_path, training__steps=7, validation__enable=False)]
    (some, everything) = (train([*argv, *more], log_folder=tmp_path)[1] for more in ((), ("--all",)))
    assert "steps = 7\n" in some
    assert 'flavor = "debugmodel"' in some
    assert "[validation]" not in some
    assert "[validation]\nenable = false\n" in everything
    assert some.partition("data  ")[2] == everything.partition("data  ")[2]


def described(argv):
    """Returns the lines of a dry run by their first words, and the line of a start."""
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    lines = [re.split(" {2,}", line, maxsplit=1) for line in summary(plan).splitlines() if "  " in line.strip()]
    return {line[0]: line[1] for line in lines}, one_line_summary(plan)


def test_a_dry_run_describes_the_phase_of_the_first_step(corpus, tmp_path):
    plain, _ = described(options(corpus, tmp_path))
    assert plain["tokenizer"] == "2,048 ids; <|end_of_text|> (0) after each text"
    frozen, _ = described(options(corpus, tmp_path, training__freeze_schedule="[{step = 1, layers = 1}]"))
    assert frozen["frozen"] == "tok_embeddings, layers.0"
    flops = [int(lines["FLOPs per token"].replace(",", "")) for lines in (frozen, plain)]
    assert flops[0] < flops[1]
    stage = "[{first_step = 1, seq_len = 32, global_batch_size = 32}]"
    staged, line = described(options(corpus, tmp_path, data__stages=stage))
    assert staged["tokens per step"] == "1,024 in 4 micro-batches a rank"
    assert "10 steps of 32 sequences x 32 = 10,240 tokens" in line


def test_a_dry_run_counts_steps_without_those_passed_over(corpus, tmp_path):
    stage, skipped = "[{first_step = 5, seq_len = 32}]", "[[2, 3]]"
    freeze = "[{step = 4, layers = 1}]"
    changes = {"data__stages": stage, "data__skip_steps": skipped, "training__freeze_schedule": freeze}
    plan = preflight.resolve(load_config(options(corpus, tmp_path, **changes)), world_size=1, device_type="cpu")
    found = re.findall(r"^(from step \d+)\n  frozen +(.*)\n.* (\d+) sequences", summary(plan), flags=re.MULTILINE)
    assert found == [("from step 3", "none", "16"), ("from step 4", "tok_embeddings, layers.0", "16")]


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({}, []),
        ({"optimizer__lr": 3}, ["optimizer.lr = 3: Adam changes a weight by about the learning rate in a step, "]),
        ({"optimizer__lr": 1e-9}, ["optimizer.lr = 1e-09: Adam changes a weight by about the learning rate in a step"]),
        (
            {"optimizer__groups": '[{pattern = "*", lr = 0.5}]'},
            ['optimizer.groups, pattern "*": lr = 0.5: Adam changes a weight by about the learning rate in a step, '],
        ),
        (
            {"optimizer__weight_decay": 20},
            ["optimizer.weight_decay = 20: with optimizer.lr = 0.003 each step takes 6% of every weight; "],
        ),
        (
            {"training__local_batch_size": 1_000_000_000, "training__global_batch_size": -1},
            [
                "training.local_batch_size = 1000000000: a step has 64,000,000,000 tokens, and the largest published ",
                "not on this machine: training.local_batch_size = 1000000000: the inputs of the layers need at least ",
            ],
        ),
    ],
)
@needs_door("planner")
def test_a_dry_run_prints_memory_and_warns_of_values_that_nobody_uses(corpus, tmp_path, changes, warnings):
    argv = options(corpus, tmp_path, **changes)
    code, text = train([*argv, "--dry-run"], log_folder=tmp_path)
    assert code == 0, text
    assert re.search(r"^memory of a rank  about [\d,.]+ GiB: weights, optimizer state and", text, re.MULTILINE)
    found = [line.partition("[rank 0] ")[2] for line in text.splitlines() if "WARNING" in line]
    assert len(found) >= len(warnings)
    assert (len(found) == 0) == (not warnings)
    for start in warnings:
        assert any(line.startswith(start) for line in found)


@needs_door("planner")
def test_the_estimate_of_a_dry_run_is_that_of_a_simulation(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__seq_len=512, training__local_batch_size=8)
    _, text = train([*argv, "--dry-run"], log_folder=tmp_path)
    (estimated,) = re.findall(r"^memory of a rank  about ([\d.]+) GiB", text, re.MULTILINE)
    _, text = train([*argv, "--comm.mode=fake_backend"], log_folder=tmp_path)
    (simulated,) = re.findall(r"^   0 .* ([\d.]+)  most:", text, re.MULTILINE)
    assert float(estimated) == pytest.approx(float(simulated), rel=0.1, abs=0.011)


@needs_door("planner")
def test_a_device_that_is_too_small_is_named(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__local_batch_size=10_000_000, training__global_batch_size=-1)
    _, text = train([*argv, "--dry-run", "--device=h100"], log_folder=tmp_path)
    assert re.search(r"^memory of a rank .*; more than the 79 GiB of the device$", text, re.MULTILINE)


def test_without_the_planner_a_dry_run_prints_no_prediction(corpus, tmp_path):
    closed = {"TORCHTITAN_CLONE_PLANNER": "0", "WORLD_SIZE": "2"}
    argv = ["--dry-run", *options(corpus, tmp_path)]
    code, text = train(argv, log_folder=tmp_path, env=closed)
    assert code == 0, text
    assert "parameters" in text
    assert "memory of a rank" not in text
    for more in ("--job.dry_run_device=h100", "--comm.mode=fake_backend", "--debug.trace_collectives"):
        code, text = train([*argv, more], log_folder=tmp_path, env=closed)
        assert code == 2
        assert "$TORCHTITAN_CLONE_PLANNER = 0 closes the package torchtitan_clone.planner; unset it" in text
