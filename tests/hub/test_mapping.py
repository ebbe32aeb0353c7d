"""Rules between our tensors and those of the hub, in both directions, through files and shards."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.harness import run_ranks
from torchtitan_clone.hub.export import export_weights
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.mapping import fused, joined, same, slices_of, stacked, transposed
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of

E, F, D = 4, 6, 8
# As families write them: one file of each kind.
RULES = {
    "norm.weight": same("model.norm.weight"),
    "layers.*.router_bias": same("model.layers.*.mlp.gate.e_score_correction_bias"),
    "layers.*.per_expert": stacked(same, "model.layers.*.mlp.experts.{index}.up_proj.weight"),
    "layers.*.down": transposed("model.layers.*.mlp.experts.down_proj"),
    "layers.*.gate": fused(transposed("model.layers.*.mlp.experts.gate_up_proj"), dim=2, index=0),
    "layers.*.up": fused(transposed("model.layers.*.mlp.experts.gate_up_proj"), dim=2, index=1),
    "layers.*.woven_gate": fused(same("model.layers.*.woven"), dim=1, index=0, interleaved=True),
    "layers.*.woven_up": fused(same("model.layers.*.woven"), dim=1, index=1, interleaved=True),
    "layers.*.ours_fused": joined("model.layers.*.a_proj.weight", "model.layers.*.b_proj.weight"),
    "layers.*.ours_woven": joined("model.layers.*.c.weight", "model.layers.*.d.weight", dim=1, interleaved=True),
}
SHAPES = {
    "norm.weight": (D,), "layers.7.router_bias": (E,), "layers.7.per_expert": (E, F, D), "layers.7.down": (E, D, F),
    "layers.7.gate": (E, F, D), "layers.7.up": (E, F, D), "layers.7.woven_gate": (E, F), "layers.7.woven_up": (E, F),
    "layers.7.ours_fused": (2 * F, D), "layers.7.ours_woven": (D, 2 * F),
}  # fmt: skip


def ours():
    """Returns values for all of our tensors."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def theirs():
    """Returns the same values as the hub has them, by indexing."""
    t = {name.removeprefix("layers.7."): tensor for name, tensor in ours().items()}
    found = {f"mlp.experts.{e}.up_proj.weight": t["per_expert"][e] for e in range(E)}
    found |= {
        "mlp.gate.e_score_correction_bias": t["router_bias"],
        "mlp.experts.down_proj": t["down"].mT,
        "mlp.experts.gate_up_proj": torch.cat((t["gate"].mT, t["up"].mT), dim=2),
        "woven": torch.stack((t["woven_gate"], t["woven_up"]), dim=2).flatten(1),
        "a_proj.weight": t["ours_fused"][:F],
        "b_proj.weight": t["ours_fused"][F:],
        "c.weight": t["ours_woven"][:, ::2],
        "d.weight": t["ours_woven"][:, 1::2],
    }
    return {"model.norm.weight": t["norm.weight"], **{f"model.layers.7.{n}": x.contiguous() for n, x in found.items()}}


def slices():
    return {name: slices_of(RULES, name, shape=shape) for name, shape in SHAPES.items()}


def assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_rules_give_the_hubs_tensors():
    values = ours()
    sources = sources_of(slices())
    found = {name: assemble_source(users, read=values.get, dtype=torch.float32) for name, users in sources.items()}
    assert_equal(found, theirs())


def test_a_name_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match=r"layers\.\*\.bias"):
        slices_of(RULES, "layers.3.bias", shape=(3,))


def sharded(tensors, dim):
    """Returns each tensor as a shard of all ranks along a dimension, or as a copy where it has none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(dim) if dim < tensor.ndim else Replicate()])
        for name, tensor in tensors.items()
    }


def fill_shards(folder, dim):
    dist.init_process_group("gloo")
    found = sharded({name: torch.zeros_like(tensor) for name, tensor in ours().items()}, dim)
    open_weight_folder(folder).fill(found, slices=slices())
    return {name: tensor.full_tensor() for name, tensor in found.items()}


@pytest.mark.parametrize(("dim", "world_size"), [(0, 3), (1, 2), (2, 3)])
def test_shards_are_filled_from_files(tmp_path, dim, world_size):
    save_file(theirs(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for found in run_ranks(fill_shards, world_size, tmp_path, dim):
        assert_equal(found, ours())


def export_shards(folder, dim):
    dist.init_process_group("gloo")
    tensors = sharded(ours(), dim)
    if dim == 0:  # as under a pipeline: each of them on one rank
        rank, size = dist.get_rank(), dist.get_world_size()
        tensors = {name: tensor for i, (name, tensor) in enumerate(ours().items()) if i % size == rank}
    files = {"config.json": b"{}"}
    report = export_weights(
        folder, tensors=tensors, slices=slices(), dtype=torch.float32, files=lambda: files, file_bytes=800
    )
    return report.error


@pytest.mark.parametrize(("dim", "world_size"), [(0, 2), (1, 2), (2, 3)])
def test_shards_are_exported_to_files(tmp_path, dim, world_size):
    folder = tmp_path / "step-1"
    assert run_ranks(export_shards, world_size, folder, dim) == [None] * world_size
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert_equal(found, theirs())
    assert len(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())) > 2
