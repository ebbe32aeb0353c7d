"""Tests of offline.py: averages of checkpoints have the same bits whatever mesh wrote them, and start runs."""

import shutil

import pytest
import torch

from tests.support.checkpoint_states import read_tensors
from tests.support.harness import run_ranks
from tests.support.runs import options, train
from tests.support.trainers import train_all
from torchtitan_clone.commands import average_checkpoints

STEPS = (2, 4, 6)
EXPERTS = {
    "model__name": "deepseek_v3", "model__args__n_kv_heads": None, "model__args__multiple_of": None,
    "model__args__hidden_dim": 96, "model__args__moe__hidden_dim": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(corpus, tmp_path_factory):
    """Returns the folder of three checkpoints of a run whose routers have biases."""
    folder = tmp_path_factory.mktemp("run")
    argv = options(corpus, folder, **EXPERTS, training__steps=6, checkpoint__interval=2, ema__enable=True)
    run_ranks(train_all, 1, [argv])
    return folder / "run" / "checkpoint"


@pytest.fixture
def script():
    """Returns what runs the command in this process, and returns its exit code."""

    def run(*arguments):
        return average_checkpoints.main([*map(str, arguments)])

    return run


def seed(corpus, folder, source, *, world_size):
    """Starts a run from weights on a mesh and saves them; returns the folder of that checkpoint."""
    changes = {"checkpoint__initial_load_path": source, "checkpoint__create_seed_checkpoint": True}
    code, output = train(options(corpus, folder, **EXPERTS, **changes), world_size=world_size, log_folder=folder)
    assert code == 0, output
    return folder / "run" / "checkpoint" / "step-0"


def test_an_average_is_rounded_once_and_starts_a_run_on_any_mesh(corpus, tmp_path, checkpoints, script):
    assert script(checkpoints, tmp_path / "all", "--last=3") == 0
    found = read_tensors(tmp_path / "all" / "step-0")
    steps = [read_tensors(checkpoints / f"step-{step}") for step in STEPS]
    assert found.keys() == {name for name in steps[0] if name.startswith("model/")}
    for name, average in found.items():
        if name.endswith(("expert_bias", "expert_load")):
            assert torch.equal(average, steps[-1][name])
        else:
            assert torch.equal(average, torch.stack([each[name].double() for each in steps]).mean(dim=0).float()), name
    started = seed(corpus, tmp_path / "started", tmp_path / "all", world_size=2)
    of_run = read_tensors(started)
    assert all(torch.equal(of_run[name], average) for name, average in found.items())


def test_an_average_has_the_same_bits_whatever_mesh_wrote_the_checkpoints(corpus, tmp_path, checkpoints, script):
    on_two_ranks = seed(corpus, tmp_path / "two", checkpoints / "step-2", world_size=2)
    assert len([*on_two_ranks.glob("*.safetensors")]) == 2
    later = [checkpoints / f"step-{step}" for step in (6, 4)]
    assert script(*later, on_two_ranks, tmp_path / "mixed") == 0
    assert script(checkpoints / "step-2", *later, tmp_path / "same") == 0
    file = "rank-0.safetensors"
    assert (tmp_path / "mixed/step-0" / file).read_bytes() == (tmp_path / "same/step-0" / file).read_bytes()


def test_moving_averages_can_be_averaged(tmp_path, checkpoints, script):
    assert script(checkpoints, tmp_path / "ema", "--last=2", "--ema") == 0
    found = read_tensors(tmp_path / "ema" / "step-0")
    older, newer = (read_tensors(checkpoints / f"step-{step}") for step in STEPS[1:])
    name = "layers.0.attention.wo.weight"
    expected = (older[f"ema/{name}"].double() + newer[f"ema/{name}"].double()) / 2
    assert torch.equal(found[f"model/{name}"], expected.float())


def test_what_cannot_be_averaged_is_one_error_and_leaves_nothing(corpus, tmp_path, checkpoints, script, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoints / "step-2", damaged)
    with next(damaged.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    other = options(corpus, tmp_path / "other", training__steps=1)
    run_ranks(train_all, 1, [other])
    dense = tmp_path / "other" / "run" / "checkpoint" / "step-1"
    first = checkpoints / "step-2"
    cases = {
        (checkpoints,): "has 3 complete checkpoints, not 5; lower --last",
        (first,): "an average is that of two checkpoints or more",
        (first, first): "each named once",
        (first, damaged): "is not a checkpoint or is corrupted",
        (first, tmp_path / "nothing"): "is not a checkpoint or is corrupted",
        (first, dense): "differ in layers.0.attention",
        (first, checkpoints / "step-4", "--last=2"): "--last=2: is for one folder",
        (dense.parent, "--last=1"): "must be at least 2",
        (dense, tmp_path / "other/run/checkpoint/step-1/../step-1", "--ema"): "each named once",
    }
    for number, (arguments, message) in enumerate(cases.items()):
        flags = [each for each in arguments if str(each).startswith("--")]
        sources = [each for each in arguments if each not in flags]
        try:
            code = script(*sources, tmp_path / "out" / str(number), *flags)
        except SystemExit as end:
            code = end.code
        assert (code, message in capsys.readouterr().err) == (2, True), arguments
    assert not (tmp_path / "out").exists()
    assert script(first, checkpoints / "step-4", checkpoints) == 2
    assert "which is kept; give another folder" in capsys.readouterr().err
