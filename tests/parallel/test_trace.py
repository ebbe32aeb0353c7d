"""The table of collectives against what the parallelism must communicate."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor

from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.parallel.trace import CollectiveTrace
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options, train


def collectives(folder):
    return json.loads((folder / "run" / "collectives.rank0.json").read_text())


def size(found, **wanted):
    return sum(row["bytes"] for row in found if all(row[key] == value for key, value in wanted.items()))


def total(found, **wanted):
    return sum(row["count"] for row in found if all(row[key] == value for key, value in wanted.items()))


def test_fsdp_gathers_each_block_and_reduces_after_the_last_micro_batch(corpus, tmp_path):
    changes = {"training__steps": 3, "debug__trace_collectives": True, "activation_checkpoint__mode": "none"}
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
    # On the CPU FSDP waits for each.
    assert total(found, axis="fsdp") == sum(row["exposed"] for row in found if row["axis"] == "fsdp")


def exposed_calls(hides):
    """Returns counted and exposed calls of a collective that is waited for at once, or after a product."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        x, group = torch.ones(8, 8), dist.group.WORLD
        with CollectiveTrace({group.group_name: "world"}) as trace:
            reduced = all_reduce(x, "sum", group)
            x @ x if hides else x + x
            wait_tensor(reduced)
        (row,) = trace.rows()
        return row["axis"], row["count"], row["exposed"]


@pytest.mark.parametrize("hides", [True, False])
def test_a_collective_behind_a_product_is_not_exposed(hides):
    assert run_ranks(exposed_calls, 2, hides) == [("world", 1, 0 if hides else 1)] * 2


def test_nothing_is_redistributed_implicitly(corpus, tmp_path):
    changes = {"training__steps": 3, "debug__trace_collectives": True, "parallelism__tensor_parallel_degree": 2}
    code, output = train(options(corpus, tmp_path, **changes), world_size=4, log_folder=tmp_path)
    assert code == 0, output
    found = collectives(tmp_path)
    assert total(found, axis="tp") > 0
    assert total(found, implicit=True) == 0, output
    assert total(found, axis="?") == 0, output
