"""Runs with two optimizers: on one rank, on a pipeline whose ranks hold different groups, and resumed."""

import pytest

from torchtitan_clone.testing.runs import losses, options, train

GROUPS = "[{pattern='layers.0.*', name='Adam', lr=1e-2, weight_decay=0.5}, {pattern='norm.weight', beta1=0.5}]"
PIPELINE = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 2}


def test_groups_train_on_a_pipeline_as_on_one_rank_and_resume_exactly(corpus, tmp_path):
    def run(name, world_size, **changes):
        changes = {"training__steps": 6, "optimizer__groups": GROUPS, "lr_scheduler__min_lr_factor": 1.0} | changes
        code, output = train(options(corpus, tmp_path / name, **changes), world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
        return [*losses(tmp_path / name).values()]

    expected = run("one", 1)
    assert run("default", 1, optimizer__groups="[]") != pytest.approx(expected, rel=1e-3)
    uninterrupted = run("pipeline", 2, **PIPELINE)
    assert uninterrupted == pytest.approx(expected, rel=1e-5)
    run("resumed", 2, **PIPELINE, training__steps=3)
    assert run("resumed", 2, **PIPELINE) == uninterrupted
