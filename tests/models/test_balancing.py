"""Tests of balancing.py in one process; tests/run/test_balancing.py compares whole runs with plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.balancing import ExpertLoads, load_statistics
from torchtitan_clone.models.moe import MoE, MoEArgs, force_load_balance

ARGS = MoEArgs(num_experts=8, top_k=3, hidden_dim=24, expert_bias=True, bias_update_rate=0.25, batch_balance=0.1)


def random_layer(**changes):
    torch.manual_seed(0)
    return MoE(replace(ARGS, **changes), dim=16)


@pytest.mark.parametrize("recomputes", [False, True])
def test_each_trained_token_counts_once(recomputes):
    layer = random_layer()
    for _ in range(2):
        x_BTD = torch.randn(2, 9, 16, requires_grad=True)
        with torch.no_grad():
            layer(x_BTD)
        out_BTD, _ = checkpoint(layer, x_BTD, use_reentrant=False) if recomputes else layer(x_BTD)
        layer(x_BTD)  # a forward without backward, as of a step that was interrupted
        out_BTD.sum().backward()
    assert layer.router.counts_E.sum() == 2 * 2 * 9 * 3


def test_counts_of_other_ranks_are_zero_and_those_of_this_rank_are_its_own():
    routers = {name: random_layer().router for name in ("layers.1.router", "layers.2.router")}
    loads = ExpertLoads(routers=routers, sizes=dict.fromkeys([f"layers.{layer}.router" for layer in range(4)], 8))
    routers["layers.1.router"].counts_E += 1
    routers["layers.2.router"].counts_E += 2**40
    assert loads.own(torch.device("cpu")).tolist() == [0] * 8 + [1] * 8 + [2**40] * 8 + [0] * 8
    loads.reset()
    assert loads.own(torch.device("cpu")).tolist() == [0] * 32


def test_the_bias_moves_against_the_load_and_stays_where_nothing_is_trained():
    router, frozen = random_layer().router, random_layer().router
    loads = ExpertLoads(routers={"a": router, "b": frozen}, sizes={"a": 8, "b": 8})
    loads.update(loads.by_router([8, 6, 4, 2, 4, 4, 4, 0] + [0] * 8))
    assert router.expert_bias.tolist() == [-0.25, -0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 0.25]
    assert router.expert_load.tolist() == [2.0, 1.5, 1.0, 0.5, 1.0, 1.0, 1.0, 0.0]
    loads.update(loads.by_router([9, 1, 1, 1, 1, 1, 1, 1] + [0] * 8))
    # Seven of eight rise by 0.25 and one falls: less the mean, 0.1875.
    change_E = router.expert_bias - torch.tensor([-0.25, -0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 0.25])
    assert change_E.tolist() == [-0.4375] + [0.0625] * 7
    assert frozen.expert_bias.tolist() == [0.0] * 8
    assert frozen.expert_load.tolist() == [1.0] * 8


def test_statistics():
    balanced, one_expert = torch.full((4,), 5.0), torch.tensor([0.0, 12.0, 0.0, 0.0])
    frozen = torch.zeros(4)
    assert load_statistics({"a": balanced, "frozen": frozen}) == {
        "load_max_over_mean": 1.0, "load_entropy": 1.0, "dead_experts": 0.0
    }  # fmt: skip
    assert load_statistics({"a": balanced, "b": one_expert, "frozen": frozen}) == {
        "load_max_over_mean": 4.0, "load_entropy": 0.5, "dead_experts": 0.375
    }  # fmt: skip
    assert load_statistics({"frozen": frozen}) == load_statistics({}) == {}


def test_forced_balance_gives_each_row_the_experts_in_turn():
    layer = random_layer()
    force_load_balance(layer)
    _, experts_BTK, _ = layer.router(torch.randn(2, 16, 16))
    expected = [[(3 * token + slot) % 8 for slot in range(3)] for token in range(16)]
    assert experts_BTK.tolist() == [expected, expected]


def test_the_load_of_the_last_step_is_state_that_the_hub_does_not_have():
    spec = MODELS["deepseek_v3"]
    args = spec.flavors["debugmodel"]
    args = replace(args, n_layers=1, n_dense_layers=0, moe=replace(args.moe, batch_balance=0.1))
    slices = format_of(spec).map_state(spec.state_on_meta(args), args=args)
    assert slices["layers.0.feed_forward.router.expert_load"] == []
    assert len(slices["layers.0.feed_forward.router.expert_bias"]) == 1
