"""Damage of every kind, on every kind of file: noticed, named, set aside, and the older step taken by all ranks."""

import os
import pickle
import re
import shutil

import pytest

from tests.checkpoint.states import load, load_all, save
from torchtitan_clone.checkpoint.commit import read_manifest, write_manifest
from torchtitan_clone.checkpoint.writer import DIGEST, FileRecord, digest_of_file

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


def tear(path, *_):
    os.truncate(path, path.stat().st_size // 2)


def zero_a_page(path, *_):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    path.write_bytes(content)


def take_that_of_another_step(path, other, _):
    shutil.copy(other, path)


def take_that_of_a_step_like_it(path, _, twin):
    """Of as many ranks, so that files of tensors have the same size."""
    shutil.copy(twin, path)


def remove(path, *_):
    path.unlink()


def empty(path, *_):
    path.write_bytes(b"")


def plant_a_payload(path, *_):
    """What would run if it were unpickled; the file keeps its length, so that only reading it finds out."""
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
    tear: "bytes instead of",
    zero_a_page: "digest",
    take_that_of_another_step: "bytes instead of|digest|is that of step 5",
    take_that_of_a_step_like_it: "bytes instead of|digest|is that of step 9",
    remove: "is missing",
    empty: "bytes instead of",
    plant_a_payload: "digest|bytes instead of",
}
"""Of every damage what is said about it; a manifest may also be "torn"."""
SAME_IN_ALL_STEPS = ("index.json", "versions.json")
"""Of as many ranks: to take that of another step is no damage."""
CASES = [
    (name, damage)
    for name in FILES
    for damage in REASONS
    if not (damage is take_that_of_a_step_like_it and name in SAME_IN_ALL_STEPS)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps, of which no file is the same."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, [5], world_size=3, config="five")
    save(folder, [10], world_size=2, config="ten")
    return folder


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A step much like step 10."""
    folder = tmp_path_factory.mktemp("twin")
    save(folder, [9], world_size=2, config="two")
    return folder / "step-9"


def copies(saved, folder, count):
    """The saved steps, again and again."""
    for number in range(count):
        shutil.copytree(saved, folder / str(number))
        yield folder / str(number)


def test_every_damage_to_every_file_is_noticed_and_passed_over(saved, twin, tmp_path):
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
        assert "checkpoint of step 10 is damaged" in found.log, case
        assert re.search(f"{name}.*({REASONS[damage]}{'|is torn' if name == 'manifest.json' else ''})", found.log), case
        (bad,) = folder.glob("step-10*")
        assert bad.name.startswith("step-10.bad-"), case
        assert name.replace(".", "-") in bad.name, case
        assert not os.path.exists("payload_ran")


def test_sizes_alone_find_what_changes_sizes_and_all_that_is_not_numbers(saved, tmp_path):
    cases = [(name, flip_a_bit) for name in FILES if not name.endswith(".safetensors")]
    tensors = "rank-1.safetensors"
    cases += [(tensors, truncate), (tensors, plant_a_payload), ("rank-0.safetensors", remove)]
    folders = list(copies(saved, tmp_path, len(cases)))
    for folder, (name, damage) in zip(folders, cases, strict=True):
        damage(folder / "step-10" / name)
    assert [found.step for found in load_all(folders, world_size=2, verify="sizes")] == [5] * len(cases)


def seal_again(folder):
    """Makes the manifest agree with what stands in the folder, as somebody could who wants it to be read."""
    files = {name: folder / name for name in read_manifest(folder).files}
    records = {
        name: FileRecord(bytes=path.stat().st_size, digest=digest_of_file(path, name=DIGEST))
        for name, path in files.items()
    }
    write_manifest(folder, step=10, files=records)


def test_a_payload_under_a_fitting_manifest_never_runs(saved, tmp_path):
    names = [name for name in FILES if name != "manifest.json"]
    folders = list(copies(saved, tmp_path, len(names)))
    for folder, name in zip(folders, names, strict=True):
        plant_a_payload(folder / "step-10" / name)
        seal_again(folder / "step-10")
    for name, found in zip(names, load_all(folders, world_size=2), strict=True):
        if name in ("config.toml", "versions.json"):  # for people: nothing reads them
            assert found.step == 10
        elif name == "index.json":
            assert "index.json is torn" in found.error
        else:
            assert found.step == 5
            assert f"{name} is no file of tensors" in found.log or f"{name} cannot be read" in found.log
        assert not os.path.exists("payload_ran")


@pytest.mark.parametrize("make", [lambda saved, step: step.mkdir(), shutil.copytree])
def test_empty_and_copied_folders_are_no_checkpoints(saved, tmp_path, make):
    shutil.copytree(saved, tmp_path / "run")
    make(saved / "step-10", tmp_path / "run" / "step-20")
    found = load(tmp_path / "run", world_size=2)
    assert (found.step, found.error) == (10, None)
    assert "manifest.json is missing" in found.log or "manifest.json is that of step 10" in found.log
    assert [path.name for path in (tmp_path / "run").glob("step-20.bad-manifest-json-is-*")]


def test_without_a_whole_step_it_is_an_error_unless_asked_for(saved, tmp_path):
    folders = list(copies(saved, tmp_path, 2))
    for folder in folders:
        for step in (5, 10):
            flip_a_bit(folder / f"step-{step}" / "rank-1.safetensors")
    found = load(folders[0], world_size=2)
    assert "none of them is whole" in found.error
    assert "checkpoint.start_fresh" in found.error
    # What is bad stays bad: the next start is no silent fresh one either.
    assert "none of them is whole" in load(folders[0], world_size=2).error
    found = load(folders[1], world_size=2, start_fresh=True)
    assert (found.progress, found.error) == (None, None)


def test_two_damaged_steps_of_one_name_are_both_kept(saved, tmp_path):
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
