"""The table of collectives against what the parallelism must communicate."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.harness import run_ranks
from tests.support.runs import options, train
from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.expert import _all_to_all
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.planner.collective_trace import CollectiveTrace


def collectives(folder):
    return json.loads((folder / "run" / "collectives.rank0.json").read_text())


def size(found, **wanted):
    return sum(row["bytes"] for row in found if all(row[key] == value for key, value in wanted.items()))


def total(found, **wanted):
    return sum(row["count"] for row in found if all(row[key] == value for key, value in wanted.items()))


def test_fsdp_gathers_each_block_and_reduces_after_the_last_micro_batch(corpus, tmp_path):
    changes = {"training__steps": 3, "debug__trace_collectives": True, "parallelism__fsdp_blocks_per_group": 1}
    code, output = train(
        options(corpus, tmp_path, training__local_batch_size=2, **changes), world_size=2, log_folder=tmp_path
    )
    assert code == 0, output
    assert "collectives of one step" in output
    found = collectives(tmp_path)
    embedding, ends = 4 * 2048 * 64, 4 * (2048 + 1) * 64
    block = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64)
    # Both of two micro-batches gather the two blocks and the embedding forward and backward, and the ends once.
    assert size(found, axis="fsdp", collective="all_gather") == 2 * (2 * 2 * block + embedding + ends)
    # Gradients are reduced after the last one only.
    assert total(found, axis="fsdp", collective="reduce_scatter") == 4
    assert size(found, axis="fsdp", collective="reduce_scatter") == 2 * block + embedding + ends
    layers = {"layers.*", "norm, output", "tok_embeddings"}
    assert {row["layer"] for row in found if row["axis"] == "fsdp"} == layers
    # Only CUDA's streams would tell whether a collective hides behind others' work.
    assert {row["exposed"] for row in found if row["axis"] == "fsdp"} == {None}
    assert re.search(r"[0-9] fsdp +all_gather +layers.\* +8 +- ", output, re.MULTILINE)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_axes_of_the_same_ranks_keep_their_names(corpus, tmp_path, method):
    """With full recomputation, which ends inside the last module whose result backward reads."""
    changes = {
        "training__steps": 2, "debug__trace_collectives": True, "activation_checkpoint__mode": "full",
        "parallelism__context_parallel_degree": 2, "parallelism__context_parallel_rotate_method": method,
        "training__local_batch_size": 8,
    }  # fmt: skip
    code, output = train(options(corpus, tmp_path, **changes), world_size=2, log_folder=tmp_path)
    assert code == 0, output
    found = collectives(tmp_path)
    places = {(row["axis"], row["collective"], row["layer"]): row["count"] for row in found}
    of_context = {key: count for key, count in places.items() if key[0] == "cp"}
    core = "layers.*.attention.core"
    expected = {
        # Two layers: keys and values in forward, in the recomputation, and in backward, which returns gradients.
        "allgather": {("cp", "all_gather", core): 6, ("cp", "reduce_scatter", core): 2},
        # Heads there and results back, in forward, in the recomputation and in backward.
        "alltoall": {("cp", "all_to_all", core): 12},
    }
    assert of_context == expected[method], output
    assert all(row["exposed"] == row["count"] for row in found if row["axis"] == "cp")
    assert {key[1:]: count for key, count in places.items() if key[0] == "fsdp"} == {
        ("all_gather", "layers.*"): 2, ("all_gather", "norm, output"): 1, ("all_gather", "tok_embeddings"): 1,
        ("reduce_scatter", "layers.*"): 1, ("reduce_scatter", "norm, output"): 1,
        ("reduce_scatter", "tok_embeddings"): 1,
    }  # fmt: skip
    # Both layers are one group of FSDP. The number of targets, the norm, and what the ranks tell one another.
    assert places.pop(("world", "all_reduce", "optimizer and loss")) == 3
    assert {axis for axis, _, _ in places} == {"cp", "fsdp"}


@pytest.mark.parametrize("compiled", [False, True])
def test_tensor_parallelism_communicates_for_projections(corpus, tmp_path, compiled):
    changes = {
        "training__steps": 2, "debug__trace_collectives": True,
        "parallelism__tensor_parallel_degree": 2, "training__local_batch_size": 8,
        "compile__enable": compiled, "compile__backend": "aot_eager",
    }  # fmt: skip
    code, output = train(options(corpus, tmp_path, **changes), world_size=2, log_folder=tmp_path)
    assert code == 0, output
    places = {(row["collective"], row["layer"]): row["count"] for row in collectives(tmp_path) if row["axis"] == "tp"}
    blocks = 2
    for start, end in (("attention", "attention.wo"), ("feed_forward", "feed_forward.w2")):
        assert places["all_gather", f"layers.*.{start}"] == places["reduce_scatter", f"layers.*.{start}"] == blocks
        assert places["all_gather", f"layers.*.{end}"] == places["reduce_scatter", f"layers.*.{end}"] == blocks
    assert places["all_gather", "tok_embeddings"] == places["reduce_scatter", "tok_embeddings"] == 1


def bytes_of_uneven_rows(sent):
    """Returns the bytes that a trace counts where each rank sends so many rows of 64 bytes to each rank."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=torch.device("cpu")):
        group = dist.group.WORLD
        received = [counts[launch.rank] for counts in sent]
        rows = torch.ones(sum(sent[launch.rank]), 16)
        with CollectiveTrace({group.group_name: ["ep"]}) as trace:
            _all_to_all(rows, sent=sent[launch.rank], received=received, group=group)
        (row,) = trace.rows()
        assert (row["axis"], row["collective"], row["count"]) == ("ep", "all_to_all", 1)
        return row["bytes"] // 64


def test_bytes_of_uneven_parts_are_those_of_the_larger_side():
    # Rank 0 receives 10 rows, rank 1 sends 8.
    assert run_ranks(bytes_of_uneven_rows, 2, [[7, 1], [3, 5]]) == [10, 8]


def exposed_calls(hides):
    """Returns counted and exposed calls of a collective that is waited for at once, or after a product."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        x, group = torch.ones(8, 8), dist.group.WORLD
        with CollectiveTrace({group.group_name: ["world"]}) as trace:
            reduced = all_reduce(x, "sum", group)
            x @ x if hides else x + x
            wait_tensor(reduced)
        (row,) = trace.rows()
        return row["axis"], row["count"], row["exposed"]


@pytest.mark.parametrize("hides", [True, False])
def test_a_collective_behind_a_product_is_not_exposed(hides):
    assert run_ranks(exposed_calls, 2, hides) == [("world", 1, 0 if hides else 1)] * 2


def implicit_calls() -> list[tuple[str, str]]:
    """Returns the implicit calls of an operator that needs the largest number of all ranks."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", (2,))
        largest = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).amax()
        with CollectiveTrace({mesh.get_group().group_name: ["world"]}) as trace:
            largest * 2
        return [(row["axis"], row["collective"]) for row in trace.rows() if row["implicit"]]


def test_implicit_redistributions_are_counted():
    assert run_ranks(implicit_calls, 2) == [[("world", "all_reduce")]] * 2


@pytest.mark.many_ranks
def test_nothing_is_redistributed_implicitly(corpus, tmp_path):
    changes = {"training__steps": 3, "debug__trace_collectives": True, "parallelism__tensor_parallel_degree": 2}
    code, output = train(options(corpus, tmp_path, **changes), world_size=4, log_folder=tmp_path)
    assert code == 0, output
    found = collectives(tmp_path)
    assert total(found, axis="tp") > 0
    assert total(found, implicit=True) == 0, output
    assert total(found, axis="?") == 0, output
