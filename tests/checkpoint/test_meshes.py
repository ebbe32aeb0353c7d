"""Model, optimizer and random numbers of a run, through the files of every mode, from mesh to mesh, bit by bit."""

import pytest
import torch

from tests.checkpoint.states import make_state, manager_of, progress_at, rank_of_a_group
from torchtitan_clone.checkpoint.loading import read_tensors
from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.run import preflight
from torchtitan_clone.run.stopping import StopRequest
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options
from torchtitan_clone.trainer import Trainer

MODES = ("disabled", "async", "async_with_pinned_mem")
TENSOR, PIPELINE = {"parallelism__tensor_parallel_degree": 2}, {"parallelism__pipeline_parallel_degree": 2}
REPLICAS = {"parallelism__data_parallel_replicate_degree": 2}
# One run that moves on after every step; each mesh has neighbours that split along other dimensions.
MESHES = (
    (3, {}), (2, TENSOR), (2, PIPELINE), (1, {}), (4, TENSOR | PIPELINE), (2, {}), (4, REPLICAS),
    (2, {"parallelism__context_parallel_degree": 2}), (4, {}), (2, REPLICAS),
)  # fmt: skip


def whole_state(trainer):
    """Copies of the whole tensors, as far as this rank has them."""
    state = trainer._state().items()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in state}


def train_on(argv):
    """What this rank goes on from, and what it has after its last step."""
    config, launch, device = load_config(argv), Launch.from_environment(), torch.device("cpu")
    plan = preflight.resolve(config, world_size=launch.world_size, device_type="cpu")
    run = preflight.prepare(plan, launch=launch)
    with process_group(config.comm, launch=launch, device=device):
        trainer = Trainer(run, launch=launch, device=device, stop=StopRequest())
        before = whole_state(trainer)
        trainer.train()
        return before, whole_state(trainer)


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in found)


def test_a_run_moves_from_mesh_to_mesh_without_a_changed_bit(corpus, tmp_path):
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


def save_and_draw(folder, mode):
    """What this rank draws after a save."""
    with rank_of_a_group():
        torch.manual_seed(torch.distributed.get_rank())
        torch.rand(7)
        manager = manager_of(folder, make_state(step=1), async_mode=mode)
        manager.save(progress_at(1))
        drawn = torch.rand(5)
        manager.finish()
        return drawn


def resume_and_draw(folder):
    """What it draws after going on from it."""
    with rank_of_a_group():
        torch.manual_seed(100 + torch.distributed.get_rank())
        manager = manager_of(folder, make_state(step=0))
        manager.find()
        manager.load()
        return torch.rand(5)


@pytest.mark.parametrize("mode", MODES)
def test_every_rank_gets_its_own_random_numbers_back(tmp_path, mode):
    drawn = run_ranks(save_and_draw, 2, tmp_path, mode)
    assert not torch.equal(*drawn)
    again = run_ranks(resume_and_draw, 3, tmp_path)
    assert torch.equal(torch.stack(again[:2]), torch.stack(drawn))
    assert torch.equal(again[2], torch.rand(5, generator=torch.Generator().manual_seed(102)))  # there was no such rank
