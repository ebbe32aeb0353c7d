"""Hostile checkpoint folders are damage like any other: refused with one error, nothing outside is opened.

Tests of torchtitan_clone/checkpoint/load.py and torchtitan_clone/checkpoint/folder.py, and of the fuzzer
tests/campaigns/hostile_folders.py.
"""

import json
import os
import random
import shutil

import pytest

from tests.support.checkpoint_states import save
from tests.support.hostile_checkpoints import CheckpointTarget, part_changes, read, seal, sign
from tests.support.hostile_folders import HOSTILE_VALUES, garble_random_state, read_header, run_case, write_header
from torchtitan_clone.checkpoint.folder import (
    CorruptCheckpointError,
    committed_steps,
    finished_step,
    mark_finished,
    newest_complete_step,
    quarantine,
)
from torchtitan_clone.checkpoint.load import verify

HUGE = 2**70


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Returns the folder of step 10, saved by two ranks."""
    folder = tmp_path_factory.mktemp("clean")
    save(folder, [10], world_size=2, config="ten")
    verify(folder / "step-10", step=10, digests=True)
    return folder / "step-10"


@pytest.fixture
def step(clean, tmp_path):
    """Returns a copy of step 10."""
    return shutil.copytree(clean, tmp_path / "run" / "step-10")


def reason(step, *, digests=True):
    """Returns why a checkpoint is refused; fails if it is not."""
    with pytest.raises(CorruptCheckpointError) as error:
        verify(step, step=10, digests=digests)
    assert str(error.value).isprintable()
    return str(error.value)


def put(document, path, value):
    """Changes the value at a path of keys; `...` in place of a value deletes it."""
    *folders, last = path
    for key in folders:
        document = document[key]
    if value is ...:
        del document[last]
    else:
        document[last] = value


SPIKES = {"stage": 0, "in_a_row": 1, "first_step": 9, "losses": [3.0], "grad_norms": [1.0]}
REWIND = {"step": 4, "from_step": 8, "first_batch": 5, "last_batch": 8}
PROGRESS = [
    (["step"], 999), (["step"], -1), (["step"], HUGE), (["step"], True), (["step"], "10"), (["step"], 10.0),
    (["tokens_seen"], -1), (["tokens_seen"], None), (["skipped_steps"], 11), (["skipped_steps"], []), (["data"], []),
    (["data"], ...), (["other"], 1), (["data", "samples"], "8"), (["data", "samples"], HUGE), (["data"], {"seed": 1}),
    (["data", "seed"], HUGE), (["data", "held_out_fraction"], 2), (["data", "cursors"], []), (["data", "seq_len"], -1),
    (["data", "cursors"], [[0, 0]]), (["data", "bookmark"], [0, 0, 0]), (["data", "document_masking"], "yes"),
    (["spikes"], []), (["spikes"], {}), (["spikes"], SPIKES | {"in_a_row": -1}), (["spikes"], SPIKES | {"other": 1}),
    (["spikes"], SPIKES | {"losses": ["3"]}), (["spikes"], SPIKES | {"losses": [1e300]}),
    (["rewinds"], {}), (["rewinds"], [1]), (["rewinds"], [REWIND | {"from_step": 4}]),
    (["rewinds"], [REWIND | {"last_batch": 4}]), (["rewinds"], [REWIND | {"first_batch": 0}]),
    (["rewinds"], [REWIND | {"step": "4"}]), (["rewinds"], [REWIND | {"other": 1}]),
    (["spikes"], SPIKES | {"grad_norms": [1.0, 2.0]}), (["spikes"], SPIKES | {"stage": True}),
]  # fmt: skip
MATRIX = ["tensors", "model/matrix"]
PART = [*MATRIX, "parts", 0]
INDEX = [
    (["tensors"], []), (["tensors"], ...), (["other"], {}), (MATRIX, []), ([*MATRIX, "dtype"], "F128"),
    ([*MATRIX, "dtype"], ["F32"]), ([*MATRIX, "dtype"], "F64"), ([*MATRIX, "shape"], [7]),
    ([*MATRIX, "shape"], [HUGE, 5]),
    ([*MATRIX, "shape"], [-7, -5]), ([*MATRIX, "shape"], [7, 5.0]), ([*MATRIX, "shape"], [1] * 100),
    ([*MATRIX, "shape"], [2**60, 2**60, 0]), ([*MATRIX, "parts"], {}), ([*MATRIX, "parts"], "parts"), (PART, []),
    ([*PART, 0], [0]), ([*PART, 0], [-1, 0]), ([*PART, 0], [True, 0]), ([*PART, 1], [HUGE, 5]), ([*PART, 3], -8),
    ([*PART, 3], HUGE), ([*PART, 3], None), ([*PART, 2], "../step-5/rank-0.safetensors"), ([*PART, 2], "config.toml"),
    ([*PART, 2], "/dev/zero"), ([*PART, 2], 7), ([*PART, 2], "manifest.json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), [("progress.json", PROGRESS), ("index.json", INDEX)])
def test_values_of_documents(step, name, changes):
    clean_text = (step / name).read_text()
    for path, value in changes:
        document = json.loads(clean_text)
        put(document, path, value)
        (step / name).write_text(json.dumps(document))
        seal(step)
        assert "digest" not in reason(step, digests=False), (path, value)


MANIFEST = [
    (["format"], 2), (["format"], "1"), (["step"], 999), (["step"], HUGE), (["step"], "10"), (["algorithm"], "md5"),
    (["algorithm"], []), (["files"], []), (["files"], {}), (["files", "progress.json"], ...), (["other"], 1),
    (["files", "progress.json", "bytes"], -1), (["files", "progress.json", "bytes"], HUGE),
    (["files", "progress.json", "bytes"], 1e300), (["files", "progress.json", "digest"], None),
    (["files", "progress.json", "digest"], "x" * 5000), (["files", "index.json"], ...),
    (["files", "rank-1.safetensors"], ...),
    *((["files", name], {"bytes": 1, "digest": "0"}) for name in (
        "../config.toml", "/etc/passwd", "/dev/zero", "..", ".", "", "a/b", "a\0", "a\n", "x" * 300, "manifest.json",
        "\x1b[2J",
    )),
]  # fmt: skip


def test_what_a_run_knows_of_spikes(step):
    document = read(step / "progress.json")
    (step / "progress.json").write_text(json.dumps(document | {"spikes": SPIKES, "rewinds": [REWIND]}))
    seal(step)
    verify(step, step=10, digests=True)


def test_values_of_the_manifest(step):
    manifest = read(step / "manifest.json")["manifest"]
    for path, value in MANIFEST:
        changed = json.loads(json.dumps(manifest))
        put(changed, path, value)
        sign(step, changed)
        assert "its own digest" not in reason(step), (path, value)


def test_text_that_is_no_document(step):
    for name in ("progress.json", "index.json", "manifest.json"):
        content = (step / name).read_text()
        for text in HOSTILE_VALUES:
            (step / name).write_text(text)
            if name != "manifest.json":
                seal(step)
            assert name in reason(step), text
        (step / name).write_text(content)
        if name != "manifest.json":
            seal(step)
    verify(step, step=10, digests=True)


def test_files_that_are_not_regular(step, tmp_path):
    """A pipe would block for ever, a device never end; no link is followed, although it leads to equal bytes."""
    for path in sorted(step.iterdir()):
        kept = path.rename(tmp_path / path.name)
        for kind in ("pipe", "folder", "/dev/zero", kept):
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to(kind)
            assert "regular file" in reason(step)
            path.rmdir() if kind == "folder" else path.unlink()
        kept.rename(path)
    verify(step, step=10, digests=True)


def test_a_step_that_is_a_link(step, tmp_path):
    moved = step.rename(tmp_path / "moved")
    step.symlink_to(moved)
    assert reason(step) == "step-10 is a link and not a folder"


MATRIX_NAME, MOMENT_NAME = "model/matrix", "optimizer/matrix/exp_avg"
OTHER_CHANGES = {
    "random state missing": lambda tensors: tensors.pop("rng/cpu/0"),
    "tensor of nothing": lambda tensors: tensors.update({"a": {"dtype": "F32", "shape": [1], "parts": []}}),
}
PARTS = [
    "drop a part", "drop all parts", "repeat a part", "replace a part by the other", "halve a part", "shift a part",
    "shift the bytes", "swap the bytes", "swap the files", "swap the offsets", "swap parts of two tensors",
    "drop the tensor", "add a tensor", "another dtype", "transpose", *OTHER_CHANGES,
]  # fmt: skip


@pytest.mark.parametrize("change", PARTS)
def test_parts_that_do_not_cover_each_tensor_once(step, change):
    """All of these are of the right types and have matching digests."""
    index = read(step / "index.json")
    tensors = index["tensors"]
    changes = part_changes(tensors, MATRIX_NAME, MOMENT_NAME, source=random.Random(0))
    OTHER_CHANGES[change](tensors) if change in OTHER_CHANGES else changes[change]()
    (step / "index.json").write_text(json.dumps(index))
    seal(step)
    assert "index.json" in reason(step, digests=False)


HEADERS = [
    (["model/matrix", "dtype"], "F128"), (["model/matrix", "dtype"], "I32"), (["model/matrix", "dtype"], 7),
    (["model/matrix", "shape"], [5, 4]), (["model/matrix", "shape"], [-4, -5]), (["model/matrix", "shape"], [HUGE, 0]),
    (["model/matrix", "data_offsets"], [HUGE, HUGE]), (["model/matrix", "data_offsets"], [-8, 8]),
    (["model/matrix", "data_offsets"], [0]), (["model/matrix", "data_offsets"], None), (["model/matrix"], []),
    (["other"], {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), (["__metadata__"], []),
    (["__metadata__"], ...), (["model/matrix"], ...),
    (["__metadata__", "DCP_SHARDING_INFO"], "{}"), (["__metadata__", "DCP_SHARDING_INFO"], "[" * 200_000),
    (["__metadata__", "DCP_SHARDING_INFO"], 7), (["model/matrix", "other"], 1),
]  # fmt: skip


def test_headers(step):
    path = step / "rank-0.safetensors"
    content = path.read_bytes()
    for place, value in HEADERS:
        path.write_bytes(content)
        header, data = read_header(path)
        put(header, place, value)
        write_header(path, header, data)
        seal(step)
        assert "rank-0.safetensors" in reason(step, digests=False), (place, value)
    length = len(content) - len(data) - 8
    for wrong in (0, 1, length - 8, length + 8, len(content), 2**31, 2**63, 2**64 - 1):
        path.write_bytes(wrong.to_bytes(8, "little") + content[8:])
        seal(step)
        assert "rank-0.safetensors" in reason(step, digests=False), wrong


def test_a_random_state_that_no_generator_accepts(step):
    garble_random_state(step / "rank-0.safetensors", lambda size: b"\xff" * size)
    seal(step)
    assert "rng/cpu/0 is not the state of a random number generator" in reason(step)


def test_a_document_of_a_terabyte_is_not_read(step):
    os.truncate(step / "config.toml", 1 << 40)
    seal(step)
    assert "config.toml has 1,099,511,627,776 bytes, too many" in reason(step)


def test_finished_claims_no_more_than_a_step_shows(step):
    folder = step.parent
    mark_finished(folder, step=10)
    assert finished_step(folder) == 10
    for text in ('{"step": 999}', '{"step": "10"}', "[]", "[" * 200_000, "9" * 5000, '{"step": 1e400}', ""):
        (folder / "finished.json").write_text(text)
        assert finished_step(folder) == 0
    (folder / "finished.json").unlink()
    os.mkfifo(folder / "finished.json")
    assert finished_step(folder) == 0
    (folder / "finished.json").unlink()
    (folder / "finished.json").mkdir()
    mark_finished(folder, step=10)
    assert finished_step(folder) == 0


def test_names_that_are_no_steps(step):
    folder = step.parent
    for name in ("step-0007", "step-\u0667", f"step-{'9' * 240}", "step--1", "step-1e3", "step-10\n"):
        (folder / name).mkdir()
    (folder / "step-11").write_text("a file")
    os.mkfifo(folder / "step-12")
    (folder / "step-13").symlink_to("nowhere")
    assert committed_steps(folder) == [10, 11, 12, 13]
    assert newest_complete_step(folder) == 10
    for number in (11, 12, 13):
        target = quarantine(folder, step=number, suffix="bad", reason="\n\x1b " * 1000 + "x" * 1000)
        assert len(target.name) < 255
        assert target.name.isprintable()
    assert committed_steps(folder) == [10]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Returns a run with two committed steps, and what clean resumes from each give."""
    return CheckpointTarget(tmp_path_factory.mktemp("target"))


KINDS = ["parts", "header", "steps", "names", "file", "random state"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_refuses_falls_back_or_loads_the_same(target, tmp_path, kind):
    number = list(target.kinds).index(kind)
    case = run_case(target, tmp_path, number=number, seed=random.Random(kind).randrange(1000), timeout=120)
    assert case.is_good, f"{case.kind}: {case.damage}: {case.finding}\n{case.output}"
