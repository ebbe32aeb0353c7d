"""Optimizer groups, state by name, and the learning-rate curve."""

import pytest
import torch
from torch import nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import LRScheduler, Optimizer
from torchtitan_clone.optim import build_optimizer, build_schedule


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def train(model, optimizer, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(16, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_adamw_equals_torchs_with_decay_on_matrices_only(implementation):
    ours, theirs = small_model(), small_model()
    container = build_optimizer(
        Optimizer(lr=0.01, weight_decay=0.5, implementation=implementation),
        named_parameters=dict(ours.named_parameters()),
    )
    groups = [{"params": [p for p in theirs.parameters() if p.ndim == 2]}]
    groups.append({"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0})
    train(ours, container, 5)
    train(theirs, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.5), 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_decay_can_include_vectors():
    norms = {}
    for decay_all in (False, True):
        model = small_model()
        options = Optimizer(lr=0.1, weight_decay=0.9, decay_all_parameters=decay_all)
        train(model, build_optimizer(options, named_parameters=dict(model.named_parameters())), 20)
        norms[decay_all] = model[1].weight.norm().item()
    assert norms[True] < 0.7 * norms[False]


def test_making_the_state_changes_no_weight_and_starts_from_zero():
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    container = build_optimizer(Optimizer(weight_decay=0.5), named_parameters=dict(model.named_parameters()))
    state = container.state_dict()
    assert set(state) == {f"{n}/{k}" for n, _ in model.named_parameters() for k in ("step", "exp_avg", "exp_avg_sq")}
    assert all(not value.any() for value in state.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_state_by_name_restores_training_exactly():
    model = small_model()
    container = build_optimizer(Optimizer(lr=0.01), named_parameters=dict(model.named_parameters()))
    train(model, container, 3)
    twin = small_model()
    twin.load_state_dict(model.state_dict())
    twin_container = build_optimizer(Optimizer(lr=0.01), named_parameters=dict(twin.named_parameters()))
    for name, value in twin_container.state_dict().items():
        value.copy_(container.state_dict()[name])
    train(model, container, 3)
    train(twin, twin_container, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_warmup_stable_decay():
    factor = build_schedule(LRScheduler(warmup_steps=10, decay_ratio=0.2, min_lr_factor=0.1), steps=100)
    assert [factor(s) for s in (1, 5, 10, 50, 80, 81)] == pytest.approx([0.1, 0.5, 1, 1, 1, 1])
    assert factor(91) == pytest.approx(0.1 + 0.9 * 0.5)
    assert factor(100) == pytest.approx(0.1 + 0.9 * 0.05)


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_decay_shapes(shape, middle):
    factor = build_schedule(LRScheduler(warmup_steps=0, decay_type=shape), steps=100)
    values = [factor(s) for s in range(1, 101)]
    assert values[0] == 1
    assert values[50] == pytest.approx(middle)
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < 0.02


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match="known: AdamW, Adam"):
        build_optimizer(Optimizer(name="SGD"), named_parameters={})
    with pytest.raises(ConfigError, match="known: linear, cosine, sqrt"):
        build_schedule(LRScheduler(decay_type="step"), steps=10)
