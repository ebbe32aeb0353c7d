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
