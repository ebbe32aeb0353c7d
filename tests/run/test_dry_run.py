"""A dry run prints the resolved run and trains nothing."""

import re
from importlib.util import find_spec

from torchtitan_clone.testing.runs import options, train


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


def test_a_complete_run_says_how_to_go_on(corpus, tmp_path):
    code, text = train(options(corpus, tmp_path, training__steps=1), log_folder=tmp_path)
    assert code == 0, text
    end = text.partition("training is complete")[2]
    for line in (
        f"metrics      {tmp_path / 'run' / 'metrics.jsonl'}",
        f"checkpoint   {tmp_path / 'run' / 'checkpoint' / 'step-1'}",
        f"report       python scripts/report.py {tmp_path / 'run'}\n",
        f"generate     python scripts/generate.py {tmp_path / 'run'} --prompt=",
        "extend       rerun the same command with --training.steps=2",
    ):
        assert line in end
    assert "TensorBoard" not in end
