"""The estimate of the search agrees with the simulation of a step."""

import pytest

from tests.planner.test_time_model import FULL, NONE, PER_OPERATION, degree, plan_of
from torchtitan_clone.planner.hardware import read_hardware
from torchtitan_clone.planner.memory_estimate import estimate_memory
from torchtitan_clone.planner.step_memory import predict_step_memory
from torchtitan_clone.planner.time_model import predict_step_time
from torchtitan_clone.run.describe import summary

LLAMA = {"model.flavor": "8B", "model.args.n_layers": 8, "training.seq_len": 4096, "training.document_masking": "false"}
GROUPS = {"fault_tolerance.enable": "true", "fault_tolerance.group_size": 2}
PIPELINE = degree(pipeline=2, tensor=2) | {"training.local_batch_size": 4}
CASES = {
    "full": (8, FULL),
    "one GPU": (1, FULL),
    "one GPU, fp32": (1, FULL | {"training.mixed_precision_param": "float32"}),
    "one GPU, FSDP": (1, FULL | {"parallelism.fsdp_reshard_after_forward": "always"}),
    "first blocks": (1, FULL | {"activation_checkpoint.first_blocks": 2, "training.local_batch_size": 8}),
    "tensor, none, several micro-batches": (8, NONE | degree(tensor=2) | {"training.global_batch_size": 16}),
    "per operation": (8, PER_OPERATION),
    "blocks in pairs": (8, FULL | {"parallelism.fsdp_blocks_per_group": 2}),
    "pipeline, full": (8, FULL | PIPELINE),
    "pipeline, none": (8, NONE | PIPELINE),
}
SLOW = list(CASES)[6:]


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_estimate_is_within_a_tenth_of_the_simulation(case):
    world_size, options = CASES[case]
    plan = plan_of(world_size, **LLAMA, **{"training.local_batch_size": 2} | options)
    simulated = predict_step_memory(plan, device_type="cpu")[0]
    assert estimate_memory(plan).total == pytest.approx(simulated.total, rel=0.1)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_estimate_of_linear_attention_is_within_a_tenth_of_the_simulation(family):
    sizes = {"dim": 1024, "n_layers": 4, "linear_key_heads": 16, "linear_value_heads": 16, "hidden_dim": 2048}
    options = {f"model.args.{name}": size for name, size in sizes.items()}
    plan = plan_of(1, **NONE, **options, **{"model.name": family, "training.seq_len": 4096})
    simulated = predict_step_memory(plan, device_type="cpu")[0]
    assert estimate_memory(plan).total == pytest.approx(simulated.total, rel=0.1)


def test_a_second_pass_through_a_pipeline_finds_sharded_gradients():
    plans = [plan_of(8, **LLAMA, **FULL, **PIPELINE, **{"training.global_batch_size": rows}) for rows in (8, 16)]
    one, two = map(estimate_memory, plans)
    assert two.state == one.state / 3 * 4


def test_replica_groups_have_the_step_of_one_of_them():
    """Each trains its share of the global batch."""
    one, two = (plan_of(8, **LLAMA, **FULL, **groups) for groups in ({}, GROUPS))
    assert two.global_batch_size == 2 * one.global_batch_size
    assert estimate_memory(two) == estimate_memory(one)
    (simulated, *_), (expected, *_) = (predict_step_memory(plan, device_type="cpu") for plan in (two, one))
    assert simulated == expected
    assert "in 1 micro-batches a rank" in summary(two)
    times = [predict_step_time(plan, hardware=read_hardware("h100")) for plan in (two, one)]
    assert times[0] == times[1]


def test_a_tied_embedding_counts_once():
    sizes = {"model.name": "qwen3", "model.flavor": "0.6B", "model.args.n_layers": 2}
    tied, untied = (plan_of(8, **sizes, **{"model.args.tied_embeddings": flag}) for flag in ("true", "false"))
    weights = tied.model_args.vocab_size * tied.model_args.dim
    assert untied.parameter_count - tied.parameter_count == weights
    assert estimate_memory(untied).state - estimate_memory(tied).state == pytest.approx(3 * 4 * weights / 8, rel=1e-3)


def test_weights_of_blocks_in_a_group_are_in_memory_at_once():
    """Of two groups; no more than all blocks are, however many a group may have."""
    found = {}
    for size in (1, 2, 8, 32, 1000):
        plan = plan_of(8, **LLAMA | FULL | {"parallelism.fsdp_blocks_per_group": size, "model.args.n_layers": 32})
        block = sum(weight.numel() for name, weight in plan.parameters.items() if name.startswith("layers.0."))
        found[size] = estimate_memory(plan).gathered
    itemsize = 2
    reduced = (4 + itemsize) * block
    assert found[2] - found[1] == pytest.approx(2 * itemsize * block, abs=reduced)
    assert found[8] > found[2] + 10 * itemsize * block
    assert found[1000] == found[32] > found[8]
