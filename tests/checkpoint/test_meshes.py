"""Model and optimizer of a run are bit-identical after resuming on another mesh, in every mode."""

import torch

from torchtitan_clone.testing.checkpoint_states import read_tensors
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options
from torchtitan_clone.testing.trainers import full_copies, open_trainer

MODES = ("disabled", "async", "async_with_pinned_mem")
TENSOR = {"parallelism__tensor_parallel_degree": 2}
PIPELINE = {"parallelism__pipeline_parallel_degree": 2}
REPLICAS = {"parallelism__data_parallel_replicate_degree": 2}
# One run that changes its mesh after every step; successive meshes shard along different dimensions.
MESHES = (
    (3, {}), (2, TENSOR), (2, PIPELINE), (1, {}), (4, TENSOR | PIPELINE), (2, {}), (4, REPLICAS),
    (2, {"parallelism__context_parallel_degree": 2}), (4, {}), (2, REPLICAS),
)  # fmt: skip


def full_state(trainer):
    """Copies of the full tensors that this rank has a shard of."""
    return full_copies(trainer.state_tensors().items())


def train_on(argv):
    """The state that this rank resumes with, and the state after its last step."""
    with open_trainer(argv) as trainer:
        before = full_state(trainer)
        trainer.train()
        return before, full_state(trainer)


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in found)


def test_a_run_resumes_bit_identically_on_every_other_mesh(corpus, tmp_path):
    expected = None
    for step, (world_size, parallelism) in enumerate(MESHES, start=1):
        argv = options(
            corpus, tmp_path, **parallelism, training__steps=step, training__local_batch_size=2,
            training__global_batch_size=24, training__seq_len=32, lr_scheduler__warmup_steps=0,
            model__args__hidden_dim=101, checkpoint__async_mode=MODES[step % 3],
        )  # fmt: skip
        answers = run_ranks(train_on, world_size, argv)
        before, after = ({n: t for answer in answers for n, t in answer[when].items()} for when in (0, 1))
        if expected is not None:
            assert_same(before, expected)
            assert not torch.equal(before["model/output.weight"], after["model/output.weight"])
        expected = after
        saved = read_tensors(tmp_path / "run" / "checkpoint" / f"step-{step}")
        assert_same({name: t for name, t in saved.items() if not name.startswith("rng/")}, expected)
    assert {name.rpartition("/")[2] for name in expected if name.startswith("optimizer/")} >= {"exp_avg", "exp_avg_sq"}
