"""Checkpoints of torch.distributed.checkpoint as plain data: dcp.py and plain_pickle.py.

Files are made by torch, and changed; those that name code name harmless code, which would leave a trace.
"""

import os
import pickle
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.harness import run_ranks
from torchtitan_clone.checkpoint.dcp import METADATA_FILE, DcpCheckpoint
from torchtitan_clone.checkpoint.plain_pickle import parse_pickle
from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def tensors() -> dict[str, torch.Tensor]:
    """Returns one of each type, and views that are not contiguous or have no elements or dimensions."""
    torch.manual_seed(0)
    base = torch.randn(6, 5)
    typed = {str(dtype): (base * 50).to(dtype) for dtype in DTYPES}
    return {**typed, "transposed": base.T, "strided": base[::2, 1:4], "scalar": torch.tensor(3.5), "empty": base[:0]}


def save_sharded(folder: Path) -> None:
    """Saves as one of several ranks, of which some have no row of a tensor, and with rows and columns sharded."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        f"{name}/{dim}": distribute_tensor(tensor, mesh, [Shard(dim)])
        for name, tensor in tensors().items()
        for dim in range(tensor.ndim)
    }
    state["one row/0"] = distribute_tensor(torch.ones(1, 5), mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def save(folder: Path, **values: object) -> Path:
    dcp.save({**tensors(), **values}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("dcp") / "step-1", number=7, pair=(0.5, 2), text="seven")


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """Returns a copy of a checkpoint that a test may change."""
    copy = tmp_path / "step-1"
    copy.mkdir()
    for file in original.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    saved = DcpCheckpoint(folder)
    return {name: saved.read(name) for name in saved.tensors}


def test_tensors_and_numbers_are_what_was_saved(original):
    found, expected = read_all(original), tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    saved = DcpCheckpoint(original)
    assert saved.values == {"number", "pair", "text"}
    assert (saved.numbers("number"), saved.numbers("pair")) == ((7,), (0.5, 2))
    with pytest.raises(DocumentError, match=r"__0_0.distcp: text is no number"):
        saved.numbers("text")
    with pytest.raises(DocumentError, match=r"\.metadata: has no value other"):
        saved.numbers("other")


def test_shards_of_ranks_are_put_together(tmp_path):
    run_ranks(save_sharded, 3, tmp_path / "step-1")
    found, expected = read_all(tmp_path / "step-1"), tensors()
    assert len(found) == 2 * (len(expected) - 1) + 1
    assert torch.equal(found.pop("one row/0"), torch.ones(1, 5))
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name.rpartition("/")[0]]), name


class Call:
    """Pickled, it calls a function where it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_code_runs_that_metadata_names(folder, protocol, tmp_path):
    content = pickle.dumps(Metadata(state_dict_metadata={}, planner_data=Call(os.mkdir, tmp_path / "x")), protocol)
    (folder / METADATA_FILE).write_bytes(content)
    pickle.loads(content)
    (tmp_path / "x").rmdir()
    with pytest.raises(DocumentError, match=r"\.metadata: is not plain data: the pickle (names|has the instruction) "):
        DcpCheckpoint(folder)
    assert not (tmp_path / "x").exists()


def test_the_error_says_what_the_pickle_names(folder):
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Call(os.system, "true")))
    what = "is not plain data: the pickle names posix.system; nothing of it is executed"
    with pytest.raises(DocumentError, match=f"^{folder / METADATA_FILE}: {what}$"):
        DcpCheckpoint(folder)


def test_no_code_runs_that_a_record_names(tmp_path):
    folder = save(tmp_path / "step-1", number=Call(os.mkdir, tmp_path / "x"))
    with pytest.raises(DocumentError, match=r"__0_0.distcp: number: is not plain data: the pickle names posix.mkdir"):
        DcpCheckpoint(folder).numbers("number")
    assert not (tmp_path / "x").exists()


NAMES = {("torch", "Size")}
MALFORMED = {
    "nothing": b"",
    "only a stop": b".",
    "no value in the memo": b"h\x01.",
    "no mark": b"t.",
    "half an item": b"}(K\x01u.",
    "an unknown instruction": b"\xff.",
    "text that is not UTF-8": b"X\x01\x00\x00\x00\xff.",
}
REFUSED = {
    "an instance of protocol 0": (b"(ios\nsystem\n.", "instruction INST"),
    "an extension": (b"\x82\x01.", "instruction EXT1"),
    "another name of a module": (b"ctorch\nload\n.", "names torch.load"),
    "a name with dots": (b"\x8c\x05torch\x8c\x0dSize.__init__\x93.", r"names torch.Size.__init__"),
    "a name that is no text": (b"K\x01\x8c\x04Size\x93.", "names what is no text"),
    "a call of a list": (b"])R.", "calls what it does not name"),
    "a call of a result": (b"ctorch\nSize\n)R)R.", "calls what it does not name"),
    "a state of a list": (b"]}b.", "sets the state of what it did not build"),
    "an item of a number": (b"K\x01K\x02a.", "appends to what is no list"),
    "a nested key": (b"}" + b")" + b"\x85" * 200_000 + b"K\x01s.", "sets items"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_pickle_is_refused(kind):
    with pytest.raises(DocumentError, match=r"^file: is no complete pickle"):
        parse_pickle(MALFORMED[kind], where="file", names=NAMES)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_pickle_of_more_than_data_is_refused(kind):
    content, what = REFUSED[kind]
    with pytest.raises(DocumentError, match=f"^file: is not plain data: the pickle .*{what}"):
        parse_pickle(content, where="file", names=NAMES)


def test_each_shorter_file_is_refused(folder):
    for file, stops in ((METADATA_FILE, 400), ("__0_0.distcp", 20)):
        content = (folder / file).read_bytes()
        for stop in range(0, len(content), len(content) // stops):
            (folder / file).write_bytes(content[:stop])
            with pytest.raises(
                DocumentError, match=rf"{file}: (is no complete pickle|has [\d,]+ bytes, and .metadata)"
            ):
                DcpCheckpoint(folder)
        (folder / file).write_bytes(content)


def change(folder, changes) -> None:
    """Changes what the metadata of a checkpoint says."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    records = {index.fqn: info for index, info in metadata.storage_data.items()}
    changes(metadata.state_dict_metadata["transposed"], records)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def larger(tensor, records):
    tensor.size = tensor.chunks[0].sizes = torch.Size([2**20, 2**20])


CHANGES = {
    "a tensor larger than its file": (larger, r"no record of transposed at .* with room for \[1048576, 1048576\]"),
    "a chunk too small": (lambda t, r: setattr(t, "size", torch.Size([6, 6])), "its parts have 30 of the 36"),
    "a chunk outside": (lambda t, r: setattr(t, "size", torch.Size([4, 6])), "a chunk of transposed outside of it"),
    "a chunk twice": (lambda t, r: t.chunks.append(t.chunks[0]), "its parts have 60 of the 30"),
    "no shape": (lambda t, r: setattr(t, "size", (5, 6)), "no shape"),
    "negative sizes": (lambda t, r: setattr(t, "size", torch.Size([-5, -6])), "no shape"),
    "no chunks": (lambda t, r: setattr(t, "chunks", None), "without name, type or chunks"),
    "a path": (lambda t, r: setattr(r["strided"], "relative_path", "../x"), r"names \.\./x, and .* has no such file"),
    "no such file": (lambda t, r: setattr(r["strided"], "relative_path", "x"), "names x, and .* has no such file"),
    "a record of another": (lambda t, r: vars(r["strided"]).update(vars(r["scalar"])), "overlap"),
    "a record before the file": (lambda t, r: setattr(r["strided"], "offset", -1), "without file, offset and length"),
    "a compressed record": (
        lambda t, r: setattr(r["strided"], "transform_descriptors", ["zstd"]), "extension of DCP, .* wrote strided",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_metadata_that_does_not_fit_the_files_is_refused(folder, kind):
    changes, what = CHANGES[kind]
    change(folder, changes)
    with pytest.raises(DocumentError, match=what):
        DcpCheckpoint(folder)


def test_a_record_of_another_tensor_is_refused(folder):
    """Both have as many elements of as many bytes."""

    def swap(_, records):
        first, second = (vars(records[name]) for name in ("torch.int32", "torch.float32"))
        kept = dict(first)
        first.update(second)
        second.update(kept)

    change(folder, swap)
    saved = DcpCheckpoint(folder)
    for name in ("torch.int32", "torch.float32"):
        with pytest.raises(
            DocumentError, match=rf"__0_0.distcp: {name} is not the tensor of {name[6:]} \[6, 5\] that "
        ):
            saved.read(name)


def rewrite(content: bytes, members: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Returns an archive of torch.save with other members."""
    result = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as old, zipfile.ZipFile(result, "w", compression) as new:
        for info in old.infolist():
            new.writestr(info.filename, members.get(info.filename.partition("/")[2], old.read(info)))
    return result.getvalue()


def archive_of(tensor: torch.Tensor) -> bytes:
    torch.save(tensor, content := BytesIO())
    return content.getvalue()


ROWS = torch.ones(4, 2)
OUT_OF_BOUNDS = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08tQK\x01K\x04K\x02\x86K\x02K\x01\x86\x89ccollections\nOrderedDict\n)RtR."
)
"""The pickle of 8 values as 4 rows of 2, from the second value on."""
ARCHIVES = {
    "a view that ends behind its values": lambda c: rewrite(c, {"data.pkl": OUT_OF_BOUNDS}),
    "too few values": lambda c: rewrite(c, {"data/0": b"\0" * 28}),
    "half a value": lambda c: rewrite(c, {"data/0": b"\0" * 33}),
    "values of the other byte order": lambda c: rewrite(c, {"byteorder": b"big"}),
    "compressed values": lambda c: rewrite(c, {"data/0": b"\0" * 32}, compression=zipfile.ZIP_DEFLATED),
    "a changed bit": lambda c: c.replace(ROWS.numpy().tobytes(), b"\1" + ROWS.numpy().tobytes()[1:]),
    "no archive": lambda c: b"\0" * len(c),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_record_that_is_damaged_is_refused(kind, tmp_path):
    folder = tmp_path / "step-1"
    dcp.save({"rows": ROWS}, checkpoint_id=folder, no_dist=True)
    assert torch.equal(DcpCheckpoint(folder).read("rows"), ROWS)
    content = ARCHIVES[kind](archive_of(ROWS))
    (folder / "__0_0.distcp").write_bytes(content)
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    (record,) = metadata.storage_data.values()
    record.length = len(content)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    with pytest.raises(DocumentError, match=rf"^{folder}/__0_0.distcp: rows "):
        DcpCheckpoint(folder).read("rows")


def test_a_folder_without_metadata_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no .metadata; give the step-N folder that torchtitan has saved"):
        DcpCheckpoint(tmp_path)
