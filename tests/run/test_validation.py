"""Validation computes the same loss on any number of ranks."""

import pytest

from torchtitan_clone.testing.runs import options, rows, train


def test_validation_loss_does_not_depend_on_the_number_of_ranks(corpus, tmp_path):
    found = []
    for world_size in (1, 2):
        changes = {"validation__enable": True, "validation__freq": 5, "validation__local_batch_size": 3}
        argv = options(corpus, tmp_path / str(world_size), **changes)
        code, output = train(argv, world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
        found.append([row for row in rows(tmp_path / str(world_size)) if "validation_loss" in row])
    assert [row["step"] for row in found[0]] == [5, 10]
    assert found[0][1]["validation_loss"] < found[0][0]["validation_loss"]
    for one, two in zip(*found, strict=True):
        assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-5)
        assert two["validation_targets"] == one["validation_targets"]
