"""The safetensors library reads what was written, for every kind of tensor."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchtitan_clone.checkpoint.tensor_file import entry_for, exported_dtype, read_header, write_tensor_file


def mixed_tensors():
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(7, 5),
        "transposed": torch.randn(4, 6).T,
        "half": torch.randn(3, 3).to(torch.bfloat16),
        "double": torch.randn(2, 1, 3, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(2**40 + 1),
        "ids": torch.arange(9, dtype=torch.int32),
        "small": torch.tensor([-3, 7, 1], dtype=torch.int8),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def write(path, tensors, *, then=lambda: None):
    """Writes the file; calls `then` after the last tensor, before the file is read back."""

    def one_by_one():
        yield from tensors.values()
        then()

    entries = [entry_for(name, dtype=tensor.dtype, shape=tensor.shape) for name, tensor in tensors.items()]
    write_tensor_file(path, entries=entries, tensors=one_by_one())


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def test_every_kind_of_tensor_is_read_back(tmp_path):
    tensors = dict(sorted(mixed_tensors().items(), key=lambda item: -item[1].itemsize))
    write(tmp_path / "ours", tensors)
    assert_same(load_file(tmp_path / "ours"), tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    by_name = [sorted(read_header(tmp_path / file).entries.items()) for file in ("ours", "theirs")]
    assert by_name[0] == by_name[1]


@pytest.mark.parametrize("damage", ["bit", "tail", "header"])
def test_corruption_is_found_before_writing_returns(tmp_path, damage):
    path = tmp_path / "file"

    def harm():
        with path.open("r+b") as file:
            if damage == "tail":
                file.truncate(600_000)
            else:
                file.seek(500_000 if damage == "bit" else 20)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))

    with pytest.raises(OSError, match="does not read back"):
        write(path, {"a": torch.randn(300_000), "b": torch.randn(10)}, then=harm)


def test_an_unsupported_type_is_refused_by_name():
    with pytest.raises(TypeError, match=r"model/freqs: .* torch.complex64 cannot be saved, only .*float32"):
        entry_for("model/freqs", dtype=torch.complex64, shape=(2,))


def test_biases_of_routers_are_exported_as_they_are():
    wanted = torch.bfloat16
    assert exported_dtype("layers.0.feed_forward.router.expert_bias", torch.float32, wanted=wanted) == torch.float32
    assert exported_dtype("layers.0.attention.wq.bias", torch.float32, wanted=wanted) == wanted
    assert exported_dtype("layers.0.feed_forward.router.expert_load", torch.int64, wanted=wanted) == torch.int64
