"""Tests of load.py, format.py and offline.py: states load on any mesh and elsewhere, or are refused."""

from itertools import count

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load

from tests.support.checkpoint_states import (
    build_manager,
    load,
    make_state,
    rank_of_a_group,
    read_tensors,
    save,
    values_at,
)
from tests.support.harness import run_ranks
from tests.support.runs import options
from tests.support.trainers import full_copies, open_trainers
from torchtitan_clone.config import ConfigError


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_resharding_is_bit_identical(tmp_path, world_size):
    save(tmp_path, [1], world_size=world_size)
    for ranks in (1, 2, 3, 4):
        loaded = load(tmp_path, world_size=ranks)
        assert (loaded.step, loaded.error) == (1, None)
        assert loaded.progress.data == {"samples": 8}


def test_safetensors_and_torch_can_read_the_files(tmp_path):
    save(tmp_path, [3], world_size=2)
    folder = tmp_path / "step-3"
    shards = [load_file(folder / f"rank-{rank}.safetensors")["model/matrix"] for rank in (0, 1)]
    assert torch.equal(torch.cat(shards), values_at("model/matrix", step=3))
    state = {"model/matrix": torch.zeros(7, 5), "model/wide": torch.zeros(4, 33, dtype=torch.bfloat16)}
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, values_at(name, step=3))


def resume_changed(folder, options):
    """Resumes into a state that differs from the saved one in every way; what it loads, or the error."""
    with rank_of_a_group():
        state = make_state(step=0)
        state["model/new"] = torch.full((2,), 7.0)
        del state["optimizer/counts"]
        state["optimizer/flags"] = torch.zeros(8, dtype=torch.bool)
        state["optimizer/matrix/step"] = torch.zeros((), dtype=torch.float64)
        try:
            manager = build_manager(folder, state, **options)
            progress = manager.find_resume_point()
            manager.load()
        except ConfigError as error:
            return str(error)
        full = {name: tensor.full_tensor() for name, tensor in state.items() if hasattr(tensor, "full_tensor")}
        return progress.step, state | full


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder of one step of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, [3], world_size=2)
    return folder


def test_a_mismatch_is_refused_by_name_and_not_treated_as_corruption(saved):
    for error in run_ranks(resume_changed, 2, saved, {}):
        assert "missing in the checkpoint: model/new" in error
        assert "only in the checkpoint: optimizer/counts" in error
        assert "different shape: optimizer/flags (6,) -> (8,)" in error
        assert "different dtype: optimizer/matrix/step float32 -> float64" in error
        assert "checkpoint.allow_partial" in error
    assert [path.name for path in saved.iterdir()] == ["step-3"]


def test_allow_partial_loads_what_matches(saved):
    for step, state in run_ranks(resume_changed, 2, saved, {"allow_partial": True}):
        assert step == 3
        assert torch.equal(state["model/matrix"], values_at("model/matrix", step=3))
        assert torch.equal(state["model/new"], torch.full((2,), 7.0))
        assert not state["optimizer/flags"].any()
        assert state["optimizer/matrix/step"] == values_at("optimizer/matrix/step", step=3)


MODES = ("disabled", "async", "async_with_pinned_mem")
TENSOR = {"parallelism__tensor_parallel_degree": 2}
PIPELINE = {"parallelism__pipeline_parallel_degree": 2}
UNDIVIDED = {"training__local_batch_size": 12, "parallelism__pipeline_parallel_microbatch_size": 6}
SHARDS = {"training__local_batch_size": 4}
REPLICAS = {"parallelism__data_parallel_replicate_degree": 2, "training__local_batch_size": 3}
CONTEXT = {"parallelism__context_parallel_degree": 2}
# One run that changes its mesh after every step; successive meshes shard along different dimensions.
MESHES = ((3, [SHARDS]), (1, [{}]), (4, [TENSOR | PIPELINE, REPLICAS]), (2, [TENSOR, CONTEXT, PIPELINE]))


def full_state(trainer):
    """Returns copies of the full tensors that this rank has a shard of."""
    return full_copies(trainer.state_tensors().items())


def train_on(runs):
    """Returns the state that this rank resumes with, and the state after its last step, for each run."""
    found = []
    for trainer in open_trainers(runs):
        before = full_state(trainer)
        trainer.train()
        found.append((before, full_state(trainer)))
    return found


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in found)


@pytest.mark.many_ranks
def test_a_run_resumes_bit_identically_on_every_other_mesh(corpus, tmp_path):
    expected, steps = None, count(1)

    def argv(step, parallelism):
        return options(
            corpus, tmp_path, **UNDIVIDED | parallelism, training__steps=step, training__global_batch_size=12,
            training__seq_len=32, lr_scheduler__warmup_steps=0,
            model__args__hidden_dim=101, checkpoint__async_mode=MODES[step % 3],
        )  # fmt: skip

    for world_size, meshes in MESHES:
        numbers = [next(steps) for _ in meshes]
        of_ranks = run_ranks(train_on, world_size, [argv(*run) for run in zip(numbers, meshes, strict=True)])
        for step, answers in zip(numbers, zip(*of_ranks, strict=True), strict=True):
            before, after = ({n: t for answer in answers for n, t in answer[when].items()} for when in (0, 1))
            if expected is not None:
                assert_same(before, expected)
                assert not torch.equal(before["model/output.weight"], after["model/output.weight"])
            expected = after
            saved = read_tensors(tmp_path / "run" / "checkpoint" / f"step-{step}")
            assert_same({name: t for name, t in saved.items() if not name.startswith("rng/")}, expected)
    assert {name.rpartition("/")[2] for name in expected if name.startswith("optimizer/")} >= {"exp_avg", "exp_avg_sq"}
