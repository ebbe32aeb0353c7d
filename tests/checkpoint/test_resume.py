"""Corruption of every kind, in every kind of file, is found; all ranks resume from the same older step.

Tests of load.py, agree.py and folder.py; tests/attacks/test_checkpoint_folders.py has documents that were forged.
"""

import os
import pickle
import re
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_states import (
    build_manager,
    load,
    load_all,
    make_state,
    progress_at,
    rank_of_a_group,
    save,
    step_of,
    values_at,
)
from tests.support.harness import run_ranks
from tests.support.runs import losses, options, train
from torchtitan_clone.checkpoint.folder import read_manifest, write_manifest
from torchtitan_clone.checkpoint.offline import Weights
from torchtitan_clone.checkpoint.writer import DIGEST, FileRecord, digest_of
from torchtitan_clone.config import ConfigError

FILES = (
    "rank-0.safetensors", "rank-1.safetensors", "index.json", "progress.json", "config.toml", "versions.json",
    "manifest.json",
)  # fmt: skip


def flip_a_bit(path, *_):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path, *_):
    os.truncate(path, path.stat().st_size - 1)


def truncate_to_half(path, *_):
    os.truncate(path, path.stat().st_size // 2)


def zero_a_page(path, *_):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    path.write_bytes(content)


def copy_from_another_step(path, other, _):
    shutil.copy(other, path)


def copy_from_a_similar_step(path, _, twin):
    """The other step has as many ranks, so that files of tensors have the same size."""
    shutil.copy(twin, path)


def remove(path, *_):
    path.unlink()


def empty(path, *_):
    path.write_bytes(b"")


def plant_a_payload(path, *_):
    """Inserts a pickle that would run code; the file keeps its length, so that sizes do not reveal it."""
    payload = pickle.dumps(Payload())
    content = path.read_bytes()
    path.write_bytes((payload + content)[: max(len(content), len(payload))])


class Payload:
    """Makes a file in the working folder when it is unpickled."""

    def __reduce__(self):
        return open, ("payload_ran", "w")


REASONS = {
    flip_a_bit: "digest",
    truncate: "bytes instead of",
    truncate_to_half: "bytes instead of",
    zero_a_page: "digest",
    copy_from_another_step: "bytes instead of|digest|belongs to step 5",
    copy_from_a_similar_step: "bytes instead of|digest|belongs to step 9",
    remove: "is missing",
    empty: "bytes instead of",
    plant_a_payload: "digest|bytes instead of|not a safetensors file",
}
"""What is reported for each kind of damage; a manifest may also be "not valid JSON"."""
SAME_IN_ALL_STEPS = ("index.json", "versions.json")
"""Equal in all steps of as many ranks: copying one from another step is no damage."""
CASES = [
    (name, damage)
    for name in FILES
    for damage in REASONS
    if not (damage is copy_from_a_similar_step and name in SAME_IN_ALL_STEPS)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a folder with two steps that have no equal files."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, [5], world_size=3, config="five")
    save(folder, [10], world_size=2, config="ten")
    return folder


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Returns a step with the same shapes and number of ranks as step 10."""
    folder = tmp_path_factory.mktemp("twin")
    save(folder, [9], world_size=2, config="two")
    return folder / "step-9"


def copies(saved, folder, count):
    """Yields copies of the saved steps."""
    for number in range(count):
        shutil.copytree(saved, folder / str(number))
        yield folder / str(number)


def test_corruption_of_any_file_is_found_and_the_older_step_loaded(saved, twin, tmp_path):
    for name in FILES:
        same = (saved / "step-10" / name).read_bytes() == (twin / name).read_bytes()
        assert same == (name in SAME_IN_ALL_STEPS)
    folders = list(copies(saved, tmp_path, len(CASES)))
    for folder, (name, damage) in zip(folders, CASES, strict=True):
        damage(folder / "step-10" / name, folder / "step-5" / name, twin / name)
    for folder, (name, damage), found in zip(folders, CASES, load_all(folders, world_size=2), strict=True):
        case = f"{damage.__name__} {name}: {found}"
        assert found.error is None, case
        assert (found.step, found.progress.step) == (5, 5), case
        assert "checkpoint of step 10 is corrupted" in found.log, case
        assert re.search(
            f"{name}.*({REASONS[damage]}{'|not valid JSON' if name == 'manifest.json' else ''})", found.log
        ), case
        (bad,) = folder.glob("step-10*")
        assert bad.name.startswith("step-10.bad-"), case
        assert name.replace(".", "-") in bad.name, case
        assert not os.path.exists("payload_ran")


def test_verify_sizes_finds_wrong_sizes_and_corrupt_metadata(saved, tmp_path):
    cases = [(name, flip_a_bit) for name in FILES if not name.endswith(".safetensors")]
    tensors = "rank-1.safetensors"
    cases += [(tensors, truncate), (tensors, plant_a_payload), ("rank-0.safetensors", remove)]
    folders = list(copies(saved, tmp_path, len(cases)))
    for folder, (name, damage) in zip(folders, cases, strict=True):
        damage(folder / "step-10" / name)
    assert [found.step for found in load_all(folders, world_size=2, verify="sizes")] == [5] * len(cases)


def update_manifest(folder):
    """Rewrites the manifest to match the files, as an attacker could."""
    records = {}
    for name in read_manifest(folder).files:
        with (folder / name).open("rb", buffering=0) as file:
            records[name] = FileRecord(bytes=(folder / name).stat().st_size, digest=digest_of(file, name=DIGEST))
    write_manifest(folder, step=10, files=records)


def test_a_payload_with_a_matching_manifest_never_runs(saved, tmp_path):
    names = [name for name in FILES if name != "manifest.json"]
    folders = list(copies(saved, tmp_path, len(names)))
    for folder, name in zip(folders, names, strict=True):
        plant_a_payload(folder / "step-10" / name)
        update_manifest(folder / "step-10")
    for name, found in zip(names, load_all(folders, world_size=2), strict=True):
        if name in ("config.toml", "versions.json"):  # for information: nothing reads them
            assert found.step == 10
        else:
            assert found.step == 5
            assert re.search(f"{name}: not (valid JSON|a safetensors file)", found.log)
        assert not os.path.exists("payload_ran")


@pytest.mark.parametrize("make", [lambda saved, step: step.mkdir(), shutil.copytree])
def test_empty_and_copied_folders_are_not_checkpoints(saved, tmp_path, make):
    shutil.copytree(saved, tmp_path / "run")
    make(saved / "step-10", tmp_path / "run" / "step-20")
    found = load(tmp_path / "run", world_size=2)
    assert (found.step, found.error) == (10, None)
    assert "manifest.json is missing" in found.log or "manifest.json belongs to step 10" in found.log
    assert [path.name for path in (tmp_path / "run").glob("step-20.bad-manifest-json-*")]


def test_without_a_complete_step_resuming_fails_unless_start_fresh(saved, tmp_path):
    folders = list(copies(saved, tmp_path, 2))
    for folder in folders:
        for step in (5, 10):
            flip_a_bit(folder / f"step-{step}" / "rank-1.safetensors")
    found = load(folders[0], world_size=2)
    assert "no checkpoint is complete" in found.error
    assert "checkpoint.start_fresh" in found.error
    # The next start fails too, although only quarantined steps are left.
    assert "no checkpoint is complete" in load(folders[0], world_size=2).error
    found = load(folders[1], world_size=2, start_fresh=True)
    assert (found.progress, found.error) == (None, None)


def test_two_corrupted_saves_of_one_step_are_both_kept(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for _ in range(2):
        shutil.rmtree(run / "step-10", ignore_errors=True)
        shutil.copytree(saved / "step-10", run / "step-10")
        (run / "step-10" / "config.toml").unlink()
        assert load(run).step == 5
    assert sorted(path.name for path in run.glob("step-10*")) == [
        "step-10.bad-config-toml-is-missing", "step-10.bad-config-toml-is-missing-2",
    ]  # fmt: skip


def test_resuming_uses_the_newest_step(tmp_path):
    save(tmp_path, [1, 5, 10], world_size=2)
    assert load(tmp_path, world_size=2).step == 10


def resume_each(folder, choices):
    """Resumes with each of these options: progress, and the steps of the model, the vector and the optimizer."""
    found = []
    with rank_of_a_group():
        for chosen in choices:
            state = make_state(step=0)
            manager = build_manager(**{"folder": folder, "state": state, **chosen})
            progress = manager.find_resume_point()
            manager.load()
            model = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
            counts = state["optimizer/counts"]
            step = next(s for s in range(20) if torch.equal(counts, values_at("optimizer/counts", step=s)))
            found.append((progress, step_of(model), step_of({"model/vector": state["model/vector"]}), step))
    return found


def test_an_excluded_tensor_that_nobody_has_is_an_error(tmp_path):
    save(tmp_path, [5], world_size=2)
    for world_size in (1, 2):
        error = load(tmp_path, world_size=world_size, exclude_from_loading=["model/vectr"]).error or ""
        assert 'checkpoint.exclude_from_loading = ["model/vectr"]: neither the checkpoint nor this run has' in error
        assert not load(tmp_path, world_size=world_size, exclude_from_loading=["model/vector"]).error


def test_options_choose_the_step_and_the_tensors_to_load(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    save(run, [5, 10, 15])
    choices = [
        {"exclude_from_loading": ["optimizer", "data"]},
        {"exclude_from_loading": ["model/vector"]},
        {"folder": other, "initial_load_path": str(run)},
        {"folder": other, "initial_load_path": str(run / "step-10"), "initial_load_model_only": False},
        {"load_step": 10, "load_only": True},
        {"load_step": 15},
        {"load_step": 10},
    ]
    (answers,) = run_ranks(resume_each, 1, run, choices)
    steps = [(progress and progress.step, model, optimizer) for progress, model, _, optimizer in answers]
    assert steps == [(15, 15, 0), (15, None, 15), (None, 15, 0), (10, 10, 10), (10, 10, 10), (15, 15, 15), (10, 10, 10)]
    assert [progress.data for progress, *_ in answers[:2]] == [{}, {"samples": 120}]
    assert answers[1][2] == 0
    assert not other.exists()
    assert sorted(path.name for path in run.glob("step-*")) == ["step-10", "step-15.left-for-step-10", "step-5"]
    (run / "finished.json").write_text('{"step": 18}')
    save(run, [18])
    choices = [
        {"load_step": 10},  # again, as by a scheduler
        {"load_step": 10, "load_only": True, "identity": "another"},
        {"load_step": 10},
        {"load_step": 10, "identity": "another"},
        {"load_step": 10},
    ]
    (answers,) = run_ranks(resume_each, 1, run, choices)
    assert [progress.step for progress, *_ in answers] == [18, 10, 18, 10, 10]
    assert sorted(path.name for path in run.glob("step-*")) == [
        "step-10", "step-15.left-for-step-10", "step-18.left-for-step-10", "step-5",
    ]  # fmt: skip
    assert not (run / "finished.json").exists()
    error = load(run, load_step=15).error or ""
    assert "has no complete checkpoint of this step; saved steps: 5, 10; choose one of them" in error


def test_a_run_resumes_before_a_corrupted_step_with_its_data(corpus, tmp_path):
    def run(name, steps=12):
        changes = {"training__steps": steps, "lr_scheduler__decay_ratio": 0.01, "checkpoint__interval": 4}
        return options(corpus, tmp_path / name, **changes)

    assert train(run("complete"), log_folder=tmp_path)[0] == 0
    assert train(run("corrupted", steps=8), world_size=2, log_folder=tmp_path)[0] == 0
    folder = tmp_path / "corrupted" / "run" / "checkpoint"
    flip_a_bit(folder / "step-8" / "rank-1.safetensors")
    code, output = train(run("corrupted"), world_size=2, log_folder=tmp_path)
    assert code == 0, output
    assert "the checkpoint of step 8 is corrupted: rank-1.safetensors does not match its digest" in output
    assert "resumed after step 4" in output
    assert losses(tmp_path / "corrupted")[12] == pytest.approx(losses(tmp_path / "complete")[12], rel=1e-4)
    for step in folder.glob("step-*"):
        (step / "manifest.json").unlink()
    (folder / "finished.json").unlink()
    code, output = train(run("corrupted"), world_size=2, log_folder=tmp_path)
    assert code == 2
    assert "no checkpoint is complete" in output
    assert "Traceback" not in output


def resume_with_few_files(folder):
    """Resumes while rank 1 can open no further file; the error."""
    with rank_of_a_group():
        state = make_state(step=0)
        if os.environ["RANK"] == "1":
            os.close(lowest := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with pytest.raises(ConfigError) as error:
            build_manager(folder, state).find_resume_point()
        return str(error.value)


def test_a_step_that_one_rank_cannot_read_is_not_renamed(saved, tmp_path):
    (folder,) = copies(saved, tmp_path, 1)
    for error in run_ranks(resume_with_few_files, 2, folder):
        assert re.search("step-10 cannot be read or changed: .*Too many open files.*; try again", error)
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-5"]


def resume_on_two_nodes(folders):
    """Resumes from the folder of this rank, as on nodes that do not share it; the error."""
    with rank_of_a_group():
        with pytest.raises(ConfigError) as error:
            build_manager(folders[dist.get_rank()], make_state(step=0)).find_resume_point()
        return str(error.value)


def test_a_folder_that_only_rank_0_finds_is_an_error_and_not_renamed(saved, tmp_path):
    (folder,) = copies(saved, tmp_path, 1)
    for error in run_ranks(resume_on_two_nodes, 2, [folder, tmp_path / "not" / "mounted"]):
        assert "step-10, but ranks [1] do not; all nodes must share job.dump_folder" in error
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-5"]


def test_load_only_renames_no_corrupted_step(saved, tmp_path):
    (folder,) = copies(saved, tmp_path, 1)
    flip_a_bit(folder / "step-10" / "rank-1.safetensors")
    found = load(folder, world_size=2, load_only=True)
    assert (found.step, "step 10 is corrupted" in found.log) == (5, True)
    assert sorted(path.name for path in folder.iterdir()) == ["step-10", "step-5"]


def resume_as_a_guest(parent, name):
    """Resumes from a folder that this user can read only; the error."""
    with rank_of_a_group():
        os.chdir(parent)  # whose parents a guest may not enter
        if os.geteuid() == 0:
            os.seteuid(65534)
        with pytest.raises(ConfigError) as error:
            build_manager(Path(name), make_state(step=0)).find_resume_point()
        return str(error.value)


def test_a_corrupted_step_that_cannot_be_renamed_is_an_error_of_all_ranks(saved, tmp_path):
    (folder,) = copies(saved, tmp_path, 1)
    flip_a_bit(folder / "step-10" / "rank-1.safetensors")
    tmp_path.chmod(0o755)
    folder.chmod(0o555)
    for error in run_ranks(resume_as_a_guest, 2, tmp_path, folder.name):
        assert re.search("cannot be read or changed: .*Permission denied.*; try again", error)


def resume_while_steps_are_deleted(folder, moment):
    """Resumes while another replica group deletes step 10 as it saves a newer one; the progress and the values."""
    newest, newer = folder / "step-10", folder / "newer"
    with rank_of_a_group():
        state = make_state(step=0)
        manager = build_manager(folder, state)
        if moment == "load":
            assert manager.find_resume_point() == progress_at(10)
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.5 if moment == "verify" else 0)  # until rank 0 has listed the steps
            newer.rename(folder / "step-15")
            newest.rename(folder / "step-10.purged")
        if moment == "load":
            dist.barrier()
        else:
            manager.find_resume_point()
        return manager.load(), step_of(state)


@pytest.mark.parametrize("moment", ["verify", "load"])
def test_a_step_that_is_deleted_during_the_start_is_not_missed(saved, tmp_path, moment):
    save(tmp_path / "newer", [15])
    (folder,) = copies(saved, tmp_path, 1)
    (tmp_path / "newer" / "step-15").rename(folder / "newer")
    assert run_ranks(resume_while_steps_are_deleted, 2, folder, moment) == [(progress_at(15), 15)] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-15", "step-5"]


def test_weights_that_change_while_they_are_read_are_an_error(saved, tmp_path):
    (folder,) = copies(saved, tmp_path, 1)
    weights = Weights(folder / "step-10")
    for file in (folder / "step-10").glob("*.safetensors"):
        empty(file)
    with pytest.raises(ConfigError, match=r"step-10 changed while it was read: rank-\d.safetensors ends early"):
        weights.read("wide")
    shutil.rmtree(folder / "step-10")
    with pytest.raises(ConfigError, match="step-10 does not exist; try again"):
        weights.read("wide")
