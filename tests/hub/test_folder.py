"""Weights of all ranks are exported to and imported from folders of files."""

import json
import os
import resource
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.test_tensor_file import assert_same, mixed_tensors
from tests.support.harness import run_ranks
from torchtitan_clone.checkpoint.tensor_file import entry_for
from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.export import export_weights, plan_files, write_weights
from torchtitan_clone.hub.folder import CONFIG_FILE, INDEX_FILE, open_weight_folder
from torchtitan_clone.ops.tensor_slices import TensorSlice

FILES = {CONFIG_FILE: b'{"model_type": "x"}', "tokenizer.json": b"{}"}
PLACEMENTS = {
    "rows": lambda tensor: [Shard(0) if tensor.ndim else Replicate()],
    "columns": lambda tensor: [Shard(tensor.ndim - 1) if tensor.ndim else Replicate()],
    "copies": lambda _tensor: [Replicate()],
}
UNCHANGED = {name: [TensorSlice(source=name, shape=tuple(t.shape))] for name, t in mixed_tensors().items()}


def split(tensors, how):
    """Returns what this rank holds: its shard by a placement, or every other tensor, as under a pipeline."""
    if how == "stages":
        rank, size = dist.get_rank(), dist.get_world_size()
        return {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % size == rank}
    if how == "rows and columns":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        placements = [Shard(0), Shard(1)]
        return {
            name: distribute_tensor(tensor, mesh, placements if tensor.ndim == 2 else [Replicate()] * 2)
            for name, tensor in tensors.items()
        }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, PLACEMENTS[how](tensor)) for name, tensor in tensors.items()}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def export_and_fill(how_written, how_read, folder, dtype):
    """Writes mixed tensors and fills zeros, split in another way, from the folder; returns report and filled."""
    dist.init_process_group("gloo")
    tensors = split(mixed_tensors(), how_written)
    report = export_weights(folder, tensors=tensors, slices=UNCHANGED, dtype=dtype, files=lambda: FILES, file_bytes=200)
    if report.error is not None:
        return report, {}
    filled = split({name: torch.zeros_like(tensor) for name, tensor in mixed_tensors().items()}, how_read)
    open_weight_folder(folder).fill(filled, slices=UNCHANGED)
    return report, {name: full(tensor) for name, tensor in filled.items()}


@pytest.mark.parametrize(
    ("how_written", "how_read", "world_size"),
    [
        ("rows", "columns", 2),
        ("columns", "stages", 2),
        ("stages", "rows", 3),
        ("copies", "rows and columns", 4),
        ("rows and columns", "copies", 4),
    ],
)
def test_tensors_are_read_back_in_another_layout(tmp_path, how_written, how_read, world_size):
    folder = tmp_path / "hf" / "step-3"
    answers = run_ranks(export_and_fill, world_size, how_written, how_read, folder, torch.float32)
    expected = {name: t.float() if t.is_floating_point() else t for name, t in mixed_tensors().items()}
    index = json.loads((folder / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(expected)
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert sorted(p.name for p in folder.iterdir()) == sorted([*files, *FILES, INDEX_FILE])
    assert [p.name for p in folder.parent.iterdir()] == ["step-3"]
    found = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert_same(found, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    filled = {name: tensor for _, some in answers for name, tensor in some.items()}
    # Read into the original types: exact for types narrower than float32; a double is rounded.
    originals = mixed_tensors()
    assert_same(filled, {name: tensor.to(originals[name].dtype) for name, tensor in expected.items()})


def test_export_dtype_changes_floats_only(tmp_path):
    run_ranks(export_and_fill, 2, "rows", "rows", tmp_path / "x", torch.bfloat16)
    found = {name: t for file in tmp_path.glob("x/*.safetensors") for name, t in load_file(file).items()}
    assert_same(found, {n: t.bfloat16() if t.is_floating_point() else t for n, t in mixed_tensors().items()})


def export_to_a_full_disk(folder, limit):
    if os.environ["RANK"] == "2":
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return export_and_fill("stages", "rows", folder, torch.float32)[0]


def test_a_full_disk_of_one_rank_is_reported_by_all_and_leaves_nothing(tmp_path):
    """The rank still receives what others send, so that none of them waits forever."""
    for report in run_ranks(export_to_a_full_disk, 3, tmp_path / "hf" / "step-1", 150):
        assert "File too large" in report.error
    assert list((tmp_path / "hf").iterdir()) == []


def test_a_folder_is_replaced_as_a_unit(tmp_path):
    entries = [entry_for("a", dtype=torch.float32, shape=(4,)), entry_for("b", dtype=torch.bool, shape=(3,))]
    values = {"a": torch.arange(4.0), "b": torch.tensor([True, False, True])}
    folder = tmp_path / "out"
    for file_bytes, files in ((8, FILES), (10**9, {CONFIG_FILE: b"{}"})):
        write_weights(
            folder, entries=entries, read=lambda entry: values[entry.name], files=files, file_bytes=file_bytes
        )
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG_FILE, "model.safetensors"]
    assert_same(load_file(folder / "model.safetensors"), values)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_files_are_filled_in_order_and_aligned():
    entries = [entry_for(name, dtype=dtype, shape=(5,)) for name, dtype in
               (("a", torch.bool), ("b", torch.float32), ("c", torch.int64), ("d", torch.int8))]  # fmt: skip
    layout = plan_files(entries, file_bytes=65)
    assert [[entry.name for entry in group] for group in layout.values()] == [["c", "b", "a"], ["d"]]
    assert list(layout) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def make_folder(path):
    path.mkdir()
    (path / CONFIG_FILE).write_text("{}")
    save_file({"a": torch.arange(3)}, path / "one.safetensors")
    save_file({"b": torch.arange(4.0)}, path / "two.safetensors")
    return path


def test_folders_with_and_without_an_index(tmp_path):
    folder = make_folder(tmp_path / "x")
    assert {name: entry.shape for name, entry in open_weight_folder(folder).entries.items()} == {"a": (3,), "b": (4,)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"b": "two.safetensors"}}))
    found = open_weight_folder(folder)
    assert list(found.entries) == ["b"]
    filled = torch.zeros(4)
    found.fill({"b": filled}, slices={"b": [TensorSlice(source="b", shape=(4,))]})
    assert torch.equal(filled, torch.arange(4.0))


@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: [file.unlink() for file in folder.glob("*.safetensors")], "no .safetensors file"),
        (lambda folder: (folder / CONFIG_FILE).unlink(), "no config.json"),
        (lambda folder: (folder / CONFIG_FILE).write_text("{"), "not valid JSON"),
        (lambda folder: (folder / CONFIG_FILE).write_text("[]"), "must be a table"),
        (lambda folder: (folder / INDEX_FILE).write_text("{}"), "no weight_map"),
        (lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": {"a": "three"}}'), "three stand in"),
        (lambda folder: os.truncate(folder / "two.safetensors", 70), "two.safetensors cannot be read"),
        (lambda folder: os.truncate(folder / "two.safetensors", 0), "two.safetensors cannot be read"),
    ],
)
def test_an_incomplete_folder_is_refused(tmp_path, damage, fragment):
    folder = make_folder(tmp_path / "x")
    damage(folder)
    with pytest.raises(ConfigError, match=fragment):
        open_weight_folder(folder)


@pytest.mark.parametrize(
    ("name", "foreign"),
    [("out", "notes/mine"), ("out", "code.py"), ("out", "config.json"), ("out.partial", "mine/notes.txt")],
)
def test_a_folder_with_other_files_is_not_replaced(tmp_path, name, foreign):
    (tmp_path / name / foreign).parent.mkdir(parents=True)
    (tmp_path / name / foreign).write_text("{}")
    (tmp_path / name / "a.json").write_text("{}")
    entries = [entry_for("a", dtype=torch.float32, shape=(4,))]
    with pytest.raises(FileExistsError, match="is no file of an export"):
        write_weights(tmp_path / "out", entries=entries, read=lambda _: torch.zeros(4), files=FILES)
    assert (tmp_path / name / foreign).read_text() == "{}"


def test_what_a_killed_export_has_left_is_replaced(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "config.json").write_text("{}")
    entries = [entry_for("a", dtype=torch.float32, shape=(4,))]
    write_weights(tmp_path / "out", entries=entries, read=lambda _: torch.zeros(4), files=FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)], ids=str)
def test_tensors_of_a_folder_are_compared_bit_by_bit(tmp_path, shape):
    (tmp_path / CONFIG_FILE).write_text("{}")
    ones = torch.ones(shape, dtype=torch.bfloat16)
    tensors = {"a": ones, "same": ones.clone(), "negative": -ones, "other type": ones.half(), "longer": torch.ones(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = open_weight_folder(tmp_path)
    equal = {name for name in tensors if folder.has_equal_values("a", name)}
    assert equal == {"a", "same"} | ({"negative"} if not ones.numel() else set())
