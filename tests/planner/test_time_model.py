"""The time model counts the bytes that a step moves, and behaves as hardware does; docs/planner.md has its errors.

Tests hardware.py and work.py too.
"""

import re
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
from torch import nn

from tests.marks import needs_split_backward
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.models import MODELS
from torchtitan_clone.ops.layers import Linear
from torchtitan_clone.ops.weight_use import LAST, WeightUse, WeightUses
from torchtitan_clone.planner.hardware import Fitted, Hardware, known_hardware, read_hardware
from torchtitan_clone.planner.memory_estimate import saved_bytes
from torchtitan_clone.planner.simulate import simulate
from torchtitan_clone.planner.time_model import describe_step_time, plan_stages, predict_step_time
from torchtitan_clone.planner.work import attention_flops, layer_transfers, model_work, shape_of, sharded_groups
from torchtitan_clone.run import preflight

NONE = {"activation_checkpoint.mode": "none"}
FULL = {"activation_checkpoint.mode": "full"}
PER_OPERATION = {"activation_checkpoint.selective_ac_option": "op"}


def plan_of(world_size, **options):
    small = {"model.args.n_layers": 2, "training.seq_len": 256, "training.local_batch_size": 2}
    words = {**small, "training.mixed_precision_param": "bfloat16", **options}
    argv = [
        f"--{key.replace('__', '.')}={str(value).lower() if value is True else value}" for key, value in words.items()
    ]
    return preflight.resolve(load_config(argv), world_size=world_size, device_type="cuda")


@pytest.mark.parametrize(
    ("recompute", "passes"), [(NONE, 3), (FULL, 4), (FULL | {"activation_checkpoint.first_blocks": 1}, 3.5)]
)
def test_products_take_their_flops(recompute, passes):
    """Forward once, backward twice, recomputation of all layers or one of two once more; not of w2 and logits."""
    fitted = Fitted(products=1.0, eager_passes=0.0)
    one_tflops = Hardware(products=[[1, 1.0]], memory_gbps=1e12, fitted=fitted)
    plan = plan_of(1, **recompute)
    seconds = predict_step_time(plan, hardware=one_tflops).parts["products"]
    sizes = {name: weight.numel() for name, weight in plan.parameters.items() if weight.ndim == 2}
    again = sum(size for name, size in sizes.items() if name.startswith("layers.") and not name.endswith("w2.weight"))
    weights = 3 * (sum(sizes.values()) - sizes["tok_embeddings.weight"]) + (passes - 3) * again
    assert seconds == pytest.approx(2e-12 * weights * plan.tokens_per_step, rel=1e-6)


def test_blocks_that_are_gathered_together_wait_for_the_network_once():
    hardware = Hardware(products=[[1, 1.0]], memory_gbps=1e12, link_us=1e6)
    options = {"model.args.n_layers": 8, **NONE}
    alone, together = (
        predict_step_time(plan_of(2, **options, **{"parallelism.fsdp_blocks_per_group": size}), hardware=hardware)
        for size in (1, 4)
    )
    # Each of eight groups, or two, is gathered twice and reduced, at a second of latency.
    assert alone.parts["fsdp"] - together.parts["fsdp"] == pytest.approx(3 * 8 - 3 * 2)


@pytest.mark.parametrize(("layers", "most", "groups"), [(6, 5, 2), (8, 64, 1), (7, 3, 3), (5, 1, 5)])
def test_groups_of_blocks_are_as_many_as_fsdp_makes(layers, most, groups):
    """A tied embedding is in the group of the output, so that the first group is one of blocks."""
    hardware = Hardware(products=[[1, 1.0]], memory_gbps=1e12, link_us=1e6)
    options = {"model.args.n_layers": layers, "model.args.tied_embeddings": "true", **NONE}
    plan = plan_of(2, **options, **{"parallelism.fsdp_blocks_per_group": most})
    # The output is gathered once and reduced; nothing hides the first gather and the last reduction.
    seconds = predict_step_time(plan, hardware=hardware).parts["fsdp"]
    assert seconds == pytest.approx(3 * groups + 2 + 2, rel=0.01)


def test_experts_of_blocks_in_a_group_are_gathered_apart():
    """The rest of a block is gathered from four ranks, in three hops of a second, and its experts from two."""
    hardware = Hardware(products=[[1, 1.0]], memory_gbps=1e12, link_us=1e6)
    options = {"model.args.n_layers": 8, **MOE, **NONE, **degree(expert=2)}
    plans = [plan_of(4, **options, **{"parallelism.fsdp_blocks_per_group": size}) for size in (1, 4)]
    alone, together = (plan_stages(plan, hardware=hardware)[0].blocks[1][0] for plan in plans)
    assert (alone.gather, alone.reduce) == pytest.approx((3 + 1, 3 + 1), rel=0.01)
    assert (together.gather, together.reduce) == pytest.approx((3 / 4 + 1, 3 / 4 + 1), rel=0.01)


def test_frozen_layers_have_no_backward_and_no_optimizer():
    fitted = Fitted(products=1.0, eager_passes=0.0, attention=1e9)
    one_tflops = Hardware(products=[[1, 1.0]], memory_gbps=1e12, peak_tflops=1.0, fitted=fitted)
    layers = {"model.args.n_layers": 8, "training.freeze_schedule": "[{step = 2, layers = 6}]", **NONE}
    first = plan_of(1, **layers)
    before, after = (predict_step_time(first.at_step(step), hardware=one_tflops) for step in (1, 2))
    sizes = {name: weight.numel() for name, weight in first.parameters.items()}
    frozen = {name: size for name, size in sizes.items() if name[:8] in {f"layers.{layer}" for layer in range(6)}}
    multiplied = sum(size for name, size in frozen.items() if "norm" not in name)
    saved = before.parts["products"] - after.parts["products"]
    assert saved == pytest.approx(2 * 2e-12 * multiplied * first.tokens_per_step, rel=1e-6)
    trained = 1 - (sum(frozen.values()) + sizes["tok_embeddings.weight"]) / sum(sizes.values())
    assert after.parts["optimizer"] == pytest.approx(trained * before.parts["optimizer"])


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=needs_split_backward)])
def test_frozen_layers_of_a_pipeline_take_less_time(schedule):
    layers = {"model.args.n_layers": 8, "training.freeze_schedule": "[{step = 2, layers = 6}]", **NONE}
    pipeline = {**degree(pipeline=2), "training.local_batch_size": 8, **layers}
    first = plan_of(4, **pipeline, **{"parallelism.pipeline_parallel_schedule": schedule})
    before, after = (predict_step_time(first.at_step(step), hardware=read_hardware("h100")) for step in (1, 2))
    assert after.seconds < before.seconds
    assert after.parts["fsdp"] < before.parts["fsdp"]
    assert min(after.parts.values()) >= 0


def degree(**degrees):
    return {f"parallelism.{name}_parallel_degree": size for name, size in degrees.items()}


def traced_bytes(plan):
    """Returns the MiB of each axis and collective of a simulated pass, of the layers alone."""
    found = Counter()
    for line in simulate(plan).splitlines():
        if match := re.match(r"(\w+) +(\w+) +(layers\S*).* ([\d,.]+)$", line):
            found[match[1], match[2]] += float(match[4].replace(",", ""))
    # Gradients of norm weights; a ring receives what it sends.
    return {key: size for key, size in found.items() if key[1] not in ("all_reduce", "recv")}


def predicted_bytes(plan):
    """Returns the same by the time model, of the layers of the first stage."""
    shape, work, found = shape_of(plan), model_work(plan), Counter()
    reduced = 4
    for name in plan.stages.modules[0]:
        if not name.startswith("layers."):
            continue
        layer = work.layers[int(name[7:])]
        microbatches = 2 if plan.degrees.pp > 1 else 1
        for transfer in layer_transfers(layer, shape=shape):
            calls = transfer.forward + transfer.again + transfer.backward
            found[transfer.axis, transfer.collective] += microbatches * calls * transfer.size
        for group in sharded_groups(layer, degrees=plan.degrees):
            found[group.axis, "all_gather"] += group.elements * shape.itemsize * (2 if plan.degrees.pp == 1 else 1)
            found[group.axis, "reduce_scatter"] += group.elements * reduced
    return {key: size / 2**20 for key, size in found.items()}


def test_linear_attention_takes_its_flops():
    """Those of states and of chunks of 64 tokens, however long a row is; full attention takes those of the row."""
    sizes = {"model.name": "kimi_linear", "model.args.layer_types": "['linear', 'full']"}
    for length in (256, 1024):
        plan = plan_of(1, **sizes, **{"training.seq_len": length})
        linear, full = (attention_flops(each, shape=shape_of(plan)) for each in model_work(plan).layers)
        assert linear == 2 * length * 4 * (6 * 64 * 64 + 4 * 64 * (64 + 64))
        assert full == 2 * length * 4 * 4 * length / 2 * (48 + 32) / 2


MOE = {"model.name": "qwen3_moe"}
LINEAR = {"model.name": "qwen3_5", "model.args.layer_types": "['linear', 'full']"}
RING, ALL_TO_ALL = ({"parallelism.context_parallel_rotate_method": name} for name in ("ring", "alltoall"))
CASES = {
    "shard, tensor, context": (8, NONE | degree(tensor=2, context=2)),
    "tensor, context, full recomputation": (8, FULL | degree(tensor=2, context=2)),
    "tensor, ring, recomputation per operation": (8, PER_OPERATION | degree(tensor=2, context=2) | RING),
    "context alltoall": (4, NONE | degree(context=2) | ALL_TO_ALL),
    "tensor, context, linear attention": (8, PER_OPERATION | LINEAR | degree(tensor=2, context=2)),
    "context alltoall, linear attention": (4, NONE | LINEAR | degree(context=2) | ALL_TO_ALL),
    "pipeline": (4, NONE | degree(pipeline=2)),
    "experts, latent attention": (8, FULL | {"model.name": "deepseek_v3"} | degree(tensor=2, expert=4)),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_each_axis_equal_those_of_a_simulated_step(case):
    world_size, options = CASES[case]
    plan = plan_of(world_size, **options)
    traced, predicted = traced_bytes(plan), predicted_bytes(plan)
    assert {axis for axis, _ in traced} >= {"fsdp"}
    assert predicted == pytest.approx(traced, rel=0.01, abs=0.03)


def test_hardware_of_an_unknown_name_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r'hardware "h1000": unknown; name one of a100, b200, .*mi300x'):
        read_hardware("h1000")
    for products in ("[[512, 0.1], [256, 0.2]]", "[[256, inf]]", "[[256, nan]]", "[[256]]", "[]"):
        (tmp_path / "mine.toml").write_text(f"memory_gib = 8\nproducts = {products}\n")
        with pytest.raises(ConfigError, match="increasing sizes"):
            read_hardware(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text(f"memory_gib = 1{400 * '0'}\n")
    with pytest.raises(ConfigError, match="cannot be read: int too large"):
        read_hardware(str(tmp_path / "mine.toml"))
    assert all(read_hardware(name).sources for name in known_hardware())


TABLE = "memory_gib = 8\nproducts = [[512, 0.1]]\n"
TABLE_ERRORS = {
    'device_type = "cpu"': 'device_type = "cpu": only GPUs are planned for.',
    "operation_us = nan": "operation_us = nan must be finite and at least 0",
    "memory_gbps = inf": "memory_gbps = inf must be finite and above 0",
    "node_size = 0": "node_size = 0 must be finite and above 0",
    "peak_tflops = -1": "peak_tflops = -1.0 must be finite and at least 0",
    "[fitted]\nproducts = 0": "fitted.products = 0.0 must be finite and above 0",
    "[fitted]\nlink = 0": "fitted.link = 0.0 must be finite and above 0",
}


@pytest.mark.parametrize("line", TABLE_ERRORS)
def test_a_table_that_the_model_cannot_compute_with_is_refused(line, tmp_path):
    (tmp_path / "mine.toml").write_text(f"{TABLE}{line}\n")
    with pytest.raises(ConfigError, match=re.escape(f"mine.toml: {TABLE_ERRORS[line]}")):
        read_hardware(str(tmp_path / "mine.toml"))


def test_a_table_of_a_gpu_from_an_earlier_version_is_read(tmp_path):
    (tmp_path / "new.toml").write_text(TABLE)
    (tmp_path / "old.toml").write_text(f'{TABLE}device_type = "cuda"\n[cpu]\ncores = 0\nlayer_us = 0.0\n')
    assert read_hardware(str(tmp_path / "old.toml")) == read_hardware(str(tmp_path / "new.toml"))


def test_limits_of_an_8b_model_move_with_the_mesh():
    """FSDP is hidden within a node, tensor parallelism is not, and a pipeline waits as long as its schedule says."""
    h100 = read_hardware("h100")
    options = {"model.flavor": "8B", "model.args.n_layers": 8, "training.seq_len": 8192, "training.local_batch_size": 1}
    shard = predict_step_time(plan_of(8, **options), hardware=h100)
    tensor = predict_step_time(plan_of(8, **options | degree(tensor=8)), hardware=h100)
    wide = predict_step_time(plan_of(4096, **options), hardware=h100)
    assert shard.parts["fsdp"] < 0.1 * shard.seconds
    assert 0.05 * tensor.seconds < tensor.parts["tp"] < tensor.seconds
    assert shard.tokens_per_second > tensor.tokens_per_second
    assert wide.parts["fsdp"] > 2 * shard.parts["fsdp"]
    pipelined = options | {"training.local_batch_size": 8} | degree(pipeline=4)
    pipeline = predict_step_time(plan_of(4, **pipelined), hardware=h100)
    # The last stage also has the output: its rank is the busiest, and the others wait for it.
    assert 0.15 < pipeline.parts["bubble"] / pipeline.seconds < 3 / (8 + 3)
    assert 0.3 < shard.mfu < 0.5
    lines = describe_step_time(plan_of(8, **options), hardware=h100).splitlines()
    assert lines[0] == "predicted step time on 8 x NVIDIA H100 SXM 80 GB"
    assert lines[-1].endswith(f"{shard.tokens_per_second:,.0f} tokens/s/GPU, MFU {shard.mfu:.1%}")


def test_a_tied_embedding_is_gathered_once():
    sizes = {"model.name": "qwen3", "model.flavor": "0.6B", "model.args.n_layers": 1, "training.local_batch_size": 1}
    tied, untied = (
        predict_step_time(plan_of(8, **sizes, **{"model.args.tied_embeddings": flag}), hardware=read_hardware("h100"))
        for flag in ("true", "false")
    )
    assert tied.parts["fsdp"] < 0.8 * untied.parts["fsdp"]


def test_a_table_that_is_nested_too_deep_is_an_error(tmp_path):
    (tmp_path / "deep.toml").write_text(f"x = {'[' * 5000}")
    with pytest.raises(ConfigError, match=r"deep\.toml: cannot be read"):
        read_hardware(str(tmp_path / "deep.toml"))


class SquaredReLU(nn.Module):
    """A feed-forward that says nothing of its matrices."""

    def __init__(self):
        super().__init__()
        self.w1 = Linear(256, 1024, bias=False)
        self.w2 = Linear(1024, 256, bias=False)


class DescribedSquaredReLU(SquaredReLU):
    """The same feed-forward with the uses of its matrices."""

    WEIGHT_USES: ClassVar[WeightUses] = {"w1.weight": WeightUse(saved=2.0), "w2.weight": LAST}


def plan_with(feed_forward):
    """Returns a plan of a family with another feed-forward in its second layer."""

    def build(args):
        model = MODELS["llama3"].build(args)
        model.layers["1"].feed_forward = feed_forward()
        return model

    return replace(plan_of(2), spec=replace(MODELS["llama3"], name=feed_forward.__name__, build=build))


def test_a_family_is_predicted_from_what_its_modules_say_of_their_matrices():
    first, second = model_work(plan_with(DescribedSquaredReLU)).layers
    assert [weight.shape for weight in second.matrices[-2:]] == [(1024, 256), (256, 1024)]
    shape = shape_of(plan_of(2, **NONE))
    features = [saved_bytes(layer, shape=shape) / shape.tokens / shape.itemsize for layer in (first, second)]
    assert features[0] - features[1] == 2 * 1.5 * first.matrices[-1].shape[1] - 2 * 1024


def test_a_family_with_a_matrix_that_no_module_describes_is_refused():
    with pytest.raises(ConfigError, match=r"SquaredReLU: feed_forward\.w1\.weight: no module says how"):
        model_work(plan_with(SquaredReLU))
