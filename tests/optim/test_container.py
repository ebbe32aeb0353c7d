"""Tests of container.py and optimizers.py: several optimizers, their settings, and their state by name."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Optimizer, OptimizerGroup
from torchtitan_clone.models import MODELS
from torchtitan_clone.optim import OPTIMIZERS, build_optimizer
from torchtitan_clone.optim.optimizers import OptimizerKind
from torchtitan_clone.optim.schedule import Factors


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


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_gradients_are_scaled_by_a_factor(implementation):
    weights = []
    for factor in (1.0, 0.25):
        model = small_model()
        settings = Optimizer(lr=0.1, eps=1.0, implementation=implementation)
        optimizer = build_optimizer(settings, named_parameters=dict(model.named_parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 / factor)
        optimizer.step(factor=factor)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.fixture
def sgd(monkeypatch):
    """Registers an optimizer without state, with a learning rate of 1."""
    build = lambda groups: torch.optim.SGD([{"params": group["params"], "lr": 1.0} for group in groups])  # noqa: E731
    kind = OptimizerKind(build=build, arguments=lambda settings: {"lr": settings.lr}, init_state=lambda *_: {})
    monkeypatch.setitem(OPTIMIZERS, "SGD", kind)


@pytest.mark.usefixtures("sgd")
def test_an_optimizer_without_state_moves_to_another_container():
    model, twin = small_model(), small_model()
    container, twin_container = container_of(model, name="SGD"), container_of(twin, name="SGD")
    train(model, container, 1)
    twin.load_state_dict(model.state_dict())
    twin_container.load_state_dict(container.state_dict())
    train(model, container, 1)
    train(twin, twin_container, 1)
    assert_equal_weights(model, twin)


@pytest.mark.usefixtures("sgd")
def test_a_registered_optimizer_gets_scaled_gradients_of_the_weights_type():
    weight = nn.Parameter(torch.ones(3, 3))
    weight.grad_dtype = None
    weight.grad = torch.full((3, 3), 2.0, dtype=torch.bfloat16)
    optimizer = build_optimizer(Optimizer(name="SGD"), named_parameters={"a.weight": weight})
    optimizer.step(factor=0.25)
    assert torch.equal(weight.detach(), torch.full((3, 3), 0.5))


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


def container_of(model, **options):
    """Returns the container over all parameters of `model`; groups are given as dicts."""
    groups = [OptimizerGroup(**group) for group in options.pop("groups", [])]
    return build_optimizer(Optimizer(groups=groups, **options), named_parameters=dict(model.named_parameters()))


def assert_equal_weights(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_the_initial_state_is_what_torch_makes(name, implementation):
    """A second step from it gives the same bits, and every tensor has the name, type and shape of torch's own."""
    lazy, eager = small_model(), small_model()
    options = {"name": name, "implementation": implementation, "lr": 0.01}
    lazy_container, eager_container = container_of(lazy, **options), container_of(eager, **options)
    eager_container.state_dict()
    train(lazy, lazy_container, 2)
    train(eager, eager_container, 2)
    assert name in lazy_container.torch_optimizers
    assert_equal_weights(lazy, eager)
    for kind, torch_optimizer in lazy_container.torch_optimizers.items():
        for parameter, state in torch_optimizer.state.items():
            initial = OPTIMIZERS[kind].init_state(parameter, Optimizer(**options))
            assert {key: (value.dtype, value.shape, value.device) for key, value in initial.items()} == {
                key: (value.dtype, value.shape, value.device) for key, value in state.items()
            }
    assert lazy_container.state_dict().keys() == eager_container.state_dict().keys()
    for key, value in lazy_container.state_dict().items():
        assert torch.equal(value, eager_container.state_dict()[key])


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_two_optimizers_train_as_two_of_torchs(implementation):
    ours, theirs = small_model(), small_model()
    groups = [{"pattern": "0.*", "name": "Adam", "lr": 0.02, "weight_decay": 0.3}]
    container = container_of(ours, lr=0.01, weight_decay=0.5, implementation=implementation, groups=groups)
    assert [o.defaults["decoupled_weight_decay"] for o in container.torch_optimizers.values()] == [False, True]
    how = {"betas": (0.9, 0.95), "fused": implementation == "fused", "foreach": implementation == "foreach"}
    adam = torch.optim.Adam(theirs[0].parameters(), lr=0.02, weight_decay=0.3, **how)
    vectors = [theirs[1].weight, theirs[1].bias, theirs[2].bias]
    adamw_groups = [{"params": [theirs[2].weight]}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(adamw_groups, lr=0.01, weight_decay=0.5, **how)
    train(ours, container, 5)
    train(theirs, Both(adam, adamw), 5)
    assert_equal_weights(ours, theirs)


class Both:
    """Two torch optimizers that step together."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("own", "torchs"),
    [
        ({"lr": 0.05}, {"lr": 0.05}),
        ({"weight_decay": 0.3}, {"weight_decay": 0.3}),
        ({"beta1": 0.5}, {"betas": (0.5, 0.95)}),
        ({"beta2": 0.7}, {"betas": (0.9, 0.7)}),
        ({"eps": 0.1}, {"eps": 0.1}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_group_trains_with_its_own_settings(own, torchs):
    ours, theirs, default = small_model(), small_model(), small_model()
    options = {"lr": 0.01, "weight_decay": 0.5, "implementation": "foreach"}
    train(ours, container_of(ours, groups=[{"pattern": "2.weight", **own}], **options), 5)
    vectors = [theirs[0].bias, theirs[1].weight, theirs[1].bias, theirs[2].bias]
    groups = [{"params": [theirs[2].weight], **torchs}, {"params": [theirs[0].weight]}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    train(theirs, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.5, foreach=True), 5)
    train(default, container_of(default, **options), 5)
    assert_equal_weights(ours, theirs)
    assert not torch.equal(ours[2].weight, default[2].weight)


def test_the_schedule_scales_the_learning_rate_of_each_group():
    groups = [{"pattern": "0.*", "name": "Adam", "lr": 0.02}, {"pattern": "1.*", "lr": 0.5}]
    container = container_of(small_model(), lr=0.01, groups=groups)
    assert container.lr == 0.01
    for factor in (0.25, 0.5):
        container.set_factors(Factors(lr=factor))
        rates = {
            name: {group["lr"] for group in torch_optimizer.param_groups}
            for name, torch_optimizer in container.torch_optimizers.items()
        }
        assert rates == {"Adam": {0.02 * factor}, "AdamW": {0.5 * factor, 0.01 * factor}}
        assert container.lr == 0.01 * factor
        assert container.lr_of_groups == {"0.*": 0.02 * factor, "1.*": 0.5 * factor}


def test_a_group_has_a_further_factor_of_its_rate():
    groups = [{"pattern": "0.*", "lr_points": [[0, 1.0]]}, {"pattern": "1.*", "name": "Adam", "lr": 0.5}]
    container = container_of(small_model(), lr=0.01, groups=groups)
    container.set_factors(Factors(lr=0.5, lr_of_groups={"0.*": 0.25}))
    adamw, adam = (container.torch_optimizers[name].param_groups for name in ("AdamW", "Adam"))
    assert [group["lr"] for group in adamw] == [0.00125, 0.00125, 0.005, 0.005]
    assert [group["lr"] for group in adam] == [0.25]
    assert (container.lr, container.lr_of_groups) == (0.005, {"0.*": 0.00125, "1.*": 0.25})


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_the_decay_and_the_momentum_of_a_step_are_those_of_its_factors(name):
    """With a group of its own decay, as torch's optimizer whose settings are set before each step."""
    ours, theirs = small_model(), small_model()
    groups = [{"pattern": "0.weight", "weight_decay": 0.25, "beta1": 0.8}]
    container = container_of(ours, lr=0.01, weight_decay=0.5, name=name, groups=groups)
    theirs_of = [[theirs[0].weight], [theirs[2].weight], [p for p in theirs.parameters() if p.ndim == 1]]
    settings = [(0.25, 0.8), (0.5, 0.9), (0.0, 0.9)]
    torchs = getattr(torch.optim, name)([{"params": parameters} for parameters in theirs_of], lr=0.01)
    for step in range(4):
        decay, momentum = 1 - step / 4, 0.5 + step / 8
        container.set_factors(Factors(lr=1.0, weight_decay=decay, momentum=momentum))
        for group, (weight_decay, beta1) in zip(torchs.param_groups, settings, strict=True):
            group["weight_decay"], group["betas"] = weight_decay * decay, (beta1 * momentum, 0.95)
        train(ours, container, 1)
        train(theirs, torchs, 1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_groups_leave_the_names_of_the_state_as_they_are():
    groups = [{"pattern": "2.*", "name": "Adam"}, {"pattern": "1.*", "lr": 0.5}]
    assert [*container_of(small_model(), groups=groups).state_dict()] == [*container_of(small_model()).state_dict()]


@pytest.mark.parametrize("groups", [[], [{"pattern": "0.*", "name": "Adam"}, {"pattern": "2.*", "lr": 0.02}]])
def test_state_loads_into_another_container(groups):
    """The tensors are loaded themselves, in any order; training continues bit-identically."""
    model, twin = small_model(), small_model()
    container = container_of(model, lr=0.01, groups=groups)
    train(model, container, 3)
    twin.load_state_dict(model.state_dict())
    saved = {name: tensor.clone() for name, tensor in reversed(container.state_dict().items())}
    twin_container = container_of(twin, lr=0.01, groups=groups)
    twin_container.load_state_dict(saved)
    assert all(saved[name] is tensor for name, tensor in twin_container.state_dict().items())
    train(model, container, 3)
    train(twin, twin_container, 3)
    assert_equal_weights(model, twin)


def expected_update(name, weight, state, *, lr, decay, decoupled):
    """Returns the weight after a step of Adam with gradient 0.5 from the state of two steps, by the paper's formula."""
    weight, exp_avg, exp_avg_sq = (x.double() for x in (weight, state[f"{name}/exp_avg"], state[f"{name}/exp_avg_sq"]))
    decay = 0.0 if weight.ndim < 2 or name.endswith("bias") else decay
    grad = 0.5 if decoupled else 0.5 + decay * weight
    weight = weight * (1 - lr * decay) if decoupled else weight
    exp_avg, exp_avg_sq = 0.9 * exp_avg + 0.1 * grad, 0.95 * exp_avg_sq + 0.05 * grad**2
    return weight - lr * exp_avg / (1 - 0.9**3) / ((exp_avg_sq / (1 - 0.95**3)).sqrt() + 1e-8)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("family", MODELS)
def test_every_state_of_every_kind_of_parameter_loads_as_it_was_and_is_used(family, name):
    """Norms of layers and of heads, sinks, latents, routers, stacked experts and their biases, and later tokens."""
    spec = MODELS[family]
    more = {"mtp_depth": 1} if family == "deepseek_v3" else {}
    model = spec.build(replace(spec.flavors["debugmodel"], n_layers=2, **more))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
        parameter.grad = torch.full_like(parameter, 0.5)
    saved = {}
    for state_name, tensor in container_of(model, name=name).state_dict().items():
        is_step = state_name.endswith("/step")
        saved[state_name] = tensor.fill_(2.0) if is_step else tensor.uniform_(0.1, 1.0, generator=generator)
    given = {state_name: tensor.clone() for state_name, tensor in saved.items()}
    container = container_of(model, name=name, lr=0.25, weight_decay=0.5)
    container.load_state_dict(given)
    found = container.state_dict()
    assert set(found) == {f"{n}/{k}" for n, _ in model.named_parameters() for k in ("step", "exp_avg", "exp_avg_sq")}
    assert all(found[state_name] is given[state_name] for state_name in found)
    assert all(torch.equal(found[state_name], saved[state_name]) for state_name in found)
    settings = {"lr": 0.25, "decay": 0.5, "decoupled": name == "AdamW"}
    expected = {n: expected_update(n, p.detach(), saved, **settings) for n, p in model.named_parameters()}
    container.step()
    for parameter_name, parameter in model.named_parameters():
        weights = parameter.detach().double()
        torch.testing.assert_close(weights, expected[parameter_name], rtol=1e-5, atol=1e-5, msg=parameter_name)


def test_a_parameter_without_a_gradient_has_state_too():
    model = small_model()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    container = container_of(model)
    train(model, container, 1)
    assert not container.state_dict()["unused/exp_avg"].any()
    assert container.state_dict()["0.weight/exp_avg"].any()


@pytest.mark.parametrize("parameters", [{}, {"frozen": nn.Parameter(torch.ones(2, 2), requires_grad=False)}])
def test_a_rank_may_have_nothing_to_train(parameters):
    """A pattern may match no parameter of this rank, if other ranks have one."""
    optimizer = Optimizer(lr=0.5, groups=[OptimizerGroup(pattern="layers.*")])
    container = build_optimizer(optimizer, named_parameters=parameters)
    container.set_factors(Factors(lr=0.5))
    container.step()
    container.zero_grad()
    container.load_state_dict({})
    assert container.state_dict() == {}
    assert container.lr == 0.25


def test_frozen_parameters_are_left_out():
    model = small_model()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    container = container_of(model, lr=0.5, weight_decay=0.5)
    train(model, container, 2)
    assert torch.equal(model[0].weight, before)
    assert {name.split(".")[0] for name in container.state_dict()} == {"1", "2"}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known: AdamW, Adam"):
        build_optimizer(Optimizer(name="SGD"), named_parameters={})
