"""The predicted memory of a step: step_memory.py, memory_trace.py and cuda_allocator.py."""

import pytest
import torch

from torchtitan_clone.config import load_config
from torchtitan_clone.planner.cuda_allocator import MIB, CachingAllocator
from torchtitan_clone.planner.memory_trace import MemoryTrace
from torchtitan_clone.planner.step_memory import (
    PARTS,
    memory_at_peak,
    memory_table,
    predict_step_memory,
    simulate_steps,
    trace_steps,
)
from torchtitan_clone.run import preflight
from torchtitan_clone.torch_compat import fake_tensors

SIZES = {"model.args.n_layers": 8, "training.seq_len": 64, "training.local_batch_size": 2}
FULL = {"activation_checkpoint.mode": "full"}


def plan_of(world_size=1, device_type="cpu", **options):
    argv = [f"--{key}={value}" for key, value in (SIZES | options).items()]
    return preflight.resolve(load_config(argv), world_size=world_size, device_type=device_type)


def predicted(options, *, device_type="cpu"):
    return predict_step_memory(plan_of(device_type=device_type, **options), device_type=device_type)[0]


def test_allocations_are_traced_until_they_end():
    with fake_tensors(), MemoryTrace() as trace:
        x = torch.empty(1000, dtype=torch.float32)
        y = x.view(10, 100) + 1
        del x
        with torch.cpu.stream(torch.cpu.Stream()):
            z = y.sum(dim=0, dtype=torch.float64)
        y.untyped_storage().resize_(0)
        trace.part = "optimizer"
        y.untyped_storage().resize_(4000)
        torch.empty(5, device="meta")
        del y, z
    found = [(event.block, event.size, event.stream, event.part) for event in trace.events]
    assert found == [
        (0, 4000, 0, "weights"), (1, 4000, 0, "weights"), (0, 0, 0, "weights"), (2, 800, 1, "weights"),
        (1, 0, 0, "weights"), (3, 4000, 0, "optimizer"), (3, 0, 0, "optimizer"), (2, 0, 1, "weights"),
    ]  # fmt: skip


def test_segments_are_reserved_and_split():
    allocator = CachingAllocator()
    small = allocator.allocate(1000, stream=0)
    assert (allocator.allocated, allocator.reserved) == (1024, 2 * MIB)
    large = allocator.allocate(30 * MIB + 1, stream=0)
    assert allocator.reserved == (2 + 32) * MIB
    allocator.free(large)
    parts = [allocator.allocate(11 * MIB, stream=0) for _ in range(2)]  # of the 32 MiB
    assert allocator.reserved == (2 + 32) * MIB
    allocator.allocate(11 * MIB, stream=0)  # 10 MiB are left
    assert allocator.reserved == (2 + 32 + 12) * MIB
    for part in (*parts, small):
        allocator.free(part)
    allocator.allocate(32 * MIB, stream=0)  # the parts are one block again
    assert allocator.reserved == (2 + 32 + 12) * MIB
    allocator.allocate(2 * MIB, stream=1)  # a segment of 20 MiB; streams share none
    assert allocator.reserved == (2 + 32 + 12 + 20) * MIB
    assert allocator.peak_allocated == allocator.allocated == (12 + 32 + 2) * MIB  # what is left of 12 is not split off


def test_expandable_segments_grow_by_pages():
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(30 * MIB, stream=0)
    assert allocator.reserved == 40 * MIB
    allocator.free(first)
    second = allocator.allocate(50 * MIB, stream=0)  # on the memory of the first and another page
    assert allocator.reserved == 60 * MIB
    allocator.allocate(25 * MIB, stream=0)  # of which 10 MiB are there
    assert allocator.reserved == 80 * MIB
    allocator.free(second)
    allocator.allocate(45 * MIB, stream=0)
    allocator.allocate(5 * MIB, stream=0)  # what the other left, rather than the end of the segment
    assert allocator.reserved == 80 * MIB


def test_state_of_a_model():
    plan = plan_of(2, **{"model.args.n_layers": 2})
    (found,) = predict_step_memory(plan, device_type="cpu")
    own = plan.parameter_count // 2
    assert 4 * own <= found.weights < 4.01 * own
    assert 8 * own <= found.optimizer < 8.01 * own
    assert found.allocator == 0


PIPELINE = {"parallelism.pipeline_parallel_degree": 2, "model.args.n_layers": 2}


def test_a_stage_has_no_buffers_of_micro_batches_that_are_not_there():
    """A hidden state takes 64 KiB."""
    found = []
    for rows in (4, 8):
        plan = plan_of(2, **PIPELINE, **{"training.local_batch_size": rows})
        events = [simulate_steps(plan, pipeline_rank=rank) for rank in (0, 1)]
        found.append([memory_at_peak(each, device_type="cpu", expandable=False).activations for each in events])
    for few, many in zip(*found, strict=True):
        assert many - few < 64 * 1024


def test_stages_after_a_frozen_one_need_what_their_own_layers_need():
    """The first stage keeps nothing for backward, and the others are not in proportion to it."""
    options = {"parallelism.pipeline_parallel_degree": 3, "model.args.n_layers": 6, "model.args.dim": 64}
    options |= {"training.freeze_schedule": "[{step = 1, layers = 3}]", "training.local_batch_size": 4}
    plan = plan_of(3, **options).at_step(1)
    simulated_memory = memory_at_peak(simulate_steps(plan, pipeline_rank=1), device_type="cpu", expandable=False)
    found = predict_step_memory(plan, device_type="cpu")[1]
    assert found.total == pytest.approx(simulated_memory.total, rel=0.01)


def test_a_second_pass_through_a_pipeline_finds_sharded_gradients():
    found = []
    for rows in (4, 8):
        plan = plan_of(4, **PIPELINE, **{"training.global_batch_size": rows})
        events = trace_steps(plan, pipeline_rank=0)
        found.append(memory_at_peak(events, device_type="cpu", expandable=False))
    assert found[1].gradients - found[0].gradients == pytest.approx(found[0].weights, rel=1e-3)


NONE = {"activation_checkpoint.mode": "none"}


def test_peak_of_two_layers():
    """At the gradient of the first weight: weights, input, output, two gradients of weights, one of a hidden state."""
    with fake_tensors(), MemoryTrace() as trace:
        weights = [torch.empty(256, 256, requires_grad=True) for _ in range(2)]
        trace.part = "activations"
        x = torch.empty(128, 256)
        y = (x @ weights[0]).relu() @ weights[1]
        y.sum().backward()
        events = list(trace.events)
    matrix, state = 4 * 256 * 256, 4 * 128 * 256
    found = memory_at_peak(events, device_type="cpu", expandable=False)
    assert (found.weights, found.allocator) == (2 * matrix, 0)
    assert 0 <= found.activations - (2 * matrix + 3 * state) <= 8  # the loss and its gradient


def test_another_recomputed_layer_keeps_its_input():
    sizes = {"training.seq_len": 2048, "model.args.dim": 64, "training.mixed_precision_param": "bfloat16", **FULL}
    first, second = (predicted({**sizes, "model.args.n_layers": layers}, device_type="cuda") for layers in (2, 3))
    assert second.activations - first.activations == 2 * 2048 * 64 * 2
    assert (
        predicted({**sizes, **NONE, "model.args.n_layers": 2}, device_type="cuda").activations > 3 * first.activations
    )


def test_blocks_after_the_first_keep_what_they_do_without_recomputation():
    sizes = {"training.seq_len": 2048, "model.args.dim": 64, "training.mixed_precision_param": "bfloat16"}

    def activations(layers, mode, **first):
        options = {**sizes, **mode, "model.args.n_layers": layers}
        options |= {f"activation_checkpoint.{name}": count for name, count in first.items()}
        return predicted(options, device_type="cuda").activations

    kept, recomputed = (activations(4, mode) - activations(3, mode) for mode in (NONE, FULL))
    assert kept > 3 * recomputed
    found = activations(4, FULL, first_blocks=2)
    assert found == activations(3, FULL, first_blocks=2) + kept
    assert found == activations(4, FULL, first_blocks=3) + kept - recomputed


def test_another_layer_of_a_gpu_keeps_what_its_kernels_keep():
    """Inputs and results of norms with a scale of each row, attention and its lse, gates and their product."""
    sizes = {
        "training.seq_len": 2048, "training.document_masking": "false", "training.mixed_precision_param": "bfloat16",
        "model.args.dim": 64, "model.args.n_heads": 4, "model.args.n_kv_heads": 2, "model.args.hidden_dim": 192, **NONE,
    }  # fmt: skip
    first, second = (predicted({**sizes, "model.args.n_layers": layers}, device_type="cuda") for layers in (2, 3))
    in_bf16 = 4 * 64 + 2 * (4 + 2) * 16 + 3 * 192
    in_fp32 = 2 + 4
    assert second.activations - first.activations == 2 * 2048 * (2 * in_bf16 + 4 * in_fp32)


def test_table_of_a_pipeline():
    options = {
        **FULL,
        "model.args.n_layers": 4,
        "parallelism.pipeline_parallel_degree": 4,
        "training.local_batch_size": 8,
    }
    plan = plan_of(4, **options)
    title, head, *rows = memory_table(plan, device_type="cuda").splitlines()
    assert "cuda" in title
    assert head.split() == ["rank", "parameters", *PARTS, "sum"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(row.split()[-1] in PARTS for row in rows)
