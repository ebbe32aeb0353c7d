"""Experts on several ranks against the same experts on one."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.checkpoint_states import rank_of_a_group
from tests.support.harness import run_ranks
from tests.support.runs import options
from tests.support.runs import train as train_run
from torchtitan_clone.checkpoint.folder import step_folder
from torchtitan_clone.models.moe import MoE, MoEArgs
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.parallel.expert import GroupExchange, apply_expert_parallel, expert_modules

# Multiples of 64: the last elements of other sizes take kernels without vectors, which round differently.
ARGS = MoEArgs(num_experts=8, top_k=2, hidden_dim=64)
DIM = 64


def build_layer():
    torch.manual_seed(0)
    return MoE(ARGS, dim=DIM)


def batch(ranks, *, one_expert):
    """Returns tokens of all ranks and gradients of their results; `one_expert`: all tokens choose the same experts."""
    random = torch.Generator().manual_seed(1)
    x_BTD, grad_BTD = torch.randn(2, ranks, 64, DIM, generator=random).unbind()
    return (x_BTD[:, :1].expand_as(x_BTD).contiguous() if one_expert else x_BTD), grad_BTD


def train(layer, x_BTD, grad_BTD):
    """Computes the layer; the router takes a row at a time, because the rounding of a product depends on its size."""
    x_BTD = x_BTD.clone().requires_grad_()
    routed = [layer.router(x_TD[None])[:2] for x_TD in x_BTD]
    out_BTD = layer.experts(x_BTD, *(torch.cat(values) for values in zip(*routed, strict=True)))
    out_BTD.backward(grad_BTD)
    grads = {name: local_shard(parameter.grad) for name, parameter in layer.named_parameters()}
    return out_BTD.detach(), x_BTD.grad, grads


def check_exchange(ranks, one_expert):
    """Asserts that outputs and gradients of tokens and experts equal those of one rank to the last bit."""
    with rank_of_a_group():
        rank = dist.get_rank()
        x_BTD, grad_BTD = batch(ranks, one_expert=one_expert)
        expected_BTD, expected_x, expected = train(build_layer(), x_BTD, grad_BTD)
        layer = build_layer()
        apply_expert_parallel(expert_modules(layer), mesh=init_device_mesh("cpu", (ranks,)))
        own = slice(rank, rank + 1)
        out_BTD, x_grad, grads = train(layer, x_BTD[own], grad_BTD[own])
        assert torch.equal(out_BTD, expected_BTD[own])
        assert torch.equal(x_grad, expected_x[own])
        router_grad = grads.pop("router.weight")
        dist.all_reduce(router_grad)
        torch.testing.assert_close(router_grad, expected.pop("router.weight"), rtol=1e-6, atol=1e-6)
        count = ARGS.num_experts // ranks
        for name, grad in grads.items():
            assert grad.shape[0] == count
            assert torch.equal(grad, expected[name][rank * count : (rank + 1) * count]), name


@pytest.mark.parametrize("one_expert", [False, True], ids=["all experts", "two experts for all tokens"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_equal_those_of_one_rank_to_the_last_bit(ranks, one_expert):
    run_ranks(check_exchange, ranks, ranks, one_expert)


def test_a_checkpoint_of_another_number_of_experts_is_refused(corpus, tmp_path):
    sizes = {"model__args__multiple_of": None, "model__args__hidden_dim": 64, "model__args__moe__hidden_dim": 32}
    common = {"model__name": "qwen3_moe", "lr_scheduler__warmup_steps": 1, **sizes}
    argv = options(corpus, tmp_path, training__steps=1, **common)
    assert train_run(argv, log_folder=tmp_path)[0] == 0
    changed = options(corpus, tmp_path, training__steps=2, model__args__moe__num_experts=4, **common)
    code, output = train_run(changed, log_folder=tmp_path)
    assert code == 2
    assert "holds checkpoints of another run: model.args.moe.num_experts 8 -> 4; choose another" in output
    seeded = options(
        corpus, tmp_path / "other", model__args__moe__num_experts=4,
        checkpoint__initial_load_path=step_folder(tmp_path / "run" / "checkpoint", 1), **common,
    )  # fmt: skip
    code, output = train_run(seeded, log_folder=tmp_path)
    assert code == 2
    name = "layers.0.feed_forward.experts.w1"
    assert re.search(rf"{re.escape(name)}\D*\(?\[?8, 32, 64.*4, 32, 64", output), output


class RepeatSizes(TorchDispatchMode):
    """Notes the size that each repeat_interleave was given; without one it waits for the device."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.repeat_interleave:
            self.sizes.append((kwargs or {}).get("output_size"))
        return function(*args, **(kwargs or {}))


def sizes_of_an_exchange(ranks):
    with rank_of_a_group():
        exchange = GroupExchange(init_device_mesh("cpu", (ranks,)).get_group())
        with RepeatSizes() as repeats:
            received, *_ = exchange.send(torch.ones(6, DIM), torch.tensor([1, 2, 0, 3]))
        return repeats.sizes, len(received)


def test_the_exchange_waits_for_the_device_once(tmp_path):
    """run/test_engine.py counts its reads."""
    assert run_ranks(sizes_of_an_exchange, 2, 2) == [([6], 6), ([6], 6)]
