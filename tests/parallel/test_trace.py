"""The table of collectives against what the parallelism must communicate."""

import json

from tests.runs import options, train


def collectives(folder):
    return json.loads((folder / "run" / "collectives.rank0.json").read_text())


def size(found, **wanted):
    return sum(row["bytes"] for row in found if all(row[key] == value for key, value in wanted.items()))


def total(found, **wanted):
    return sum(row["count"] for row in found if all(row[key] == value for key, value in wanted.items()))


def test_fsdp_gathers_and_reduces_each_block_and_accumulates_without_reducing(corpus, tmp_path):
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
    assert size(found, axis="fsdp", collective="all_gather") == 2 * (2 * 2 * block + 2 * embedding + ends)
    # Gradients are reduced after the last one only.
    assert total(found, axis="fsdp", collective="reduce_scatter") == 4
    assert size(found, axis="fsdp", collective="reduce_scatter") == 2 * block + embedding + ends


def test_nothing_is_redistributed_implicitly(corpus, tmp_path):
    changes = {"training__steps": 3, "debug__trace_collectives": True, "parallelism__tensor_parallel_degree": 2}
    code, output = train(options(corpus, tmp_path, **changes), world_size=4, log_folder=tmp_path)
    assert code == 0, output
    found = collectives(tmp_path)
    assert total(found, axis="tp") > 0
    assert total(found, implicit=True) == 0, output
    assert total(found, axis="?") == 0, output
