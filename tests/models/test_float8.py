"""Tests of float8.py: what is converted, what a converted layer computes, and that a parallel run computes the same."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.harness import run_ranks
from tests.support.parity import COMMON, largest_difference
from tests.support.runs import options, train
from tests.support.trainers import full_copies, open_trainer
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Float8
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.float8 import ROW_SCALES_ON_CPU_SINCE, check_float8_products, convert_to_float8

HAS_TORCHAO = find_spec("torchao") is not None
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="the package torchao is not installed (extra float8)")


def converted(model, *, tensor_degree=1, **changes):
    """Converts the model and returns the names of the layers in float8."""
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    convert_to_float8(model, options=Float8(**changes), tensor_degree=tensor_degree, compiled=False)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def tiny(name="llama3"):
    spec = MODELS[name]
    with torch.device("meta"):
        return spec.build(spec.flavors["debugmodel"])


@needs_torchao
def test_which_layers_are_converted():
    attention = [f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo")]
    assert converted(tiny())[:5] == [*attention, "layers.0.feed_forward.w1"]
    kept = converted(tiny(), filter_fqns=["attention.w", "layers.1"])
    assert kept[:6] == [f"layers.{layer}.feed_forward.{name}" for layer in (0, 2) for name in ("w1", "w2", "w3")]
    assert converted(tiny(), tensor_degree=3) == []


@needs_torchao
def test_a_filter_of_all_layers_is_a_warning(caplog):
    assert converted(tiny(), filter_fqns=["."]) == []
    found = [x.getMessage() for x in caplog.records if (x.name, x.levelname) == ("torchtitan_clone", "WARNING")]
    assert found == ["float8 tensorwise: converted 0 of 42 linear layers"]


@needs_torchao
def test_layers_with_a_forward_of_their_own_and_routers_stay():
    found = {name.split(".", 2)[2] for name in converted(tiny("deepseek_v3"))}
    assert "attention.wo" in found
    assert not any(name.endswith(("wq_a", "wkv_a", "router")) for name in found)


def rounded(x, dtype):
    """Returns x as float8 with one scale holds it."""
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).float() / scale


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@needs_torchao
@pytest.mark.parametrize("emulate", [False, True])
def test_products_are_those_of_rounded_matrices(emulate):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(64, 48, bias=False)})
    x, grad = torch.randn(32, 64, requires_grad=True), torch.randn(32, 48) * 1e-3
    assert converted(model, emulate=emulate) == ["layer"]
    weight = model["layer"].weight
    out = model["layer"](x)
    out.backward(grad)
    forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
    x8, weight8, grad8 = rounded(x.detach(), forward), rounded(weight.detach(), forward), rounded(grad, backward)
    assert distance(out, x8 @ weight8.T) <= 1e-6
    assert distance(x.grad, grad8 @ weight8) <= 1e-6
    assert distance(weight.grad, grad8.T @ x8) <= 1e-6
    assert distance(out, x @ weight.T) >= 1e-2


@needs_torchao
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_cpu_cannot_multiply_is_refused(recipe):
    """Version 2.11 of torch has products with one scale per tensor only."""
    model = nn.ModuleDict({"layer": nn.Linear(64, 48, bias=False)})
    converted(model, recipe_name=recipe)
    try:
        check_float8_products(Float8(recipe_name=recipe), device=torch.device("cpu"))
    except ConfigError:
        check_float8_products(Float8(recipe_name=recipe, emulate=True), device=torch.device("cpu"))
        with pytest.raises(RuntimeError, match="per-tensor"):
            model["layer"](torch.randn(32, 64))
    else:
        assert model["layer"](torch.randn(32, 64)).isfinite().all()


@needs_torchao
def test_recipes_differ_in_scales_and_in_the_gradient_of_weights():
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64), torch.randn(48, 64) * torch.logspace(-3, 0, 48)[:, None]
    found = {}
    for recipe in RECIPES:
        model = nn.ModuleDict({"layer": nn.Linear(64, 48, bias=False)})
        model["layer"].weight.data.copy_(weight)
        converted(model, recipe_name=recipe, emulate=torch.__version__ < ROW_SCALES_ON_CPU_SINCE)
        out = model["layer"](x)
        out.sum().backward()
        found[recipe] = distance(out, x @ weight.T), distance(model["layer"].weight.grad, torch.ones(32, 48).T @ x)
    assert found["rowwise"][0] == found["rowwise_with_gw_hp"][0] != found["tensorwise"][0]
    assert found["rowwise_with_gw_hp"][1] < 0.3 * found["rowwise"][1]


def operands_and_results(argv):
    """Trains one step; what layers in float8 round, in order, the loss, and gradients and weights by name."""
    found, gradients = [], {}
    with open_trainer(argv) as trainer:

        def keep(name, dtype, x, *, dim=None):
            x = x.detach()
            if isinstance(x, DTensor):
                x = x.full_tensor()
            elif dim is not None and dist.get_world_size() > 1:
                parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, x.contiguous())
                x = torch.cat(parts, dim=dim)
            before = [kept for other, kept, _ in found if other == name]
            assert all(torch.equal(x, kept) for kept in before), f"{name} was computed again, and differs"
            found.extend([] if before else [(name, x.clone(), dtype)])

        def observe(layer, args, out, name):
            if layer.training and out.requires_grad:
                keep(f"input of {name}", torch.float8_e4m3fn, args[0])
                # On the axis a layer has some output features, or the sum for some tokens.
                dim = 1 if name.endswith(("wo", "w2")) else -1
                out.register_hook(lambda grad: keep(f"gradient of {name}", torch.float8_e5m2, grad, dim=dim))

        for name, module in trainer.engine.model_parts[0].named_modules():
            if type(module).__name__ == "Float8Linear":
                name = name.replace("_checkpoint_wrapped_module.", "")
                module.register_forward_hook(lambda *given, name=name: observe(*given, name))

        def keep_gradients(*_):
            gradients.update(full_copies((name, p.grad) for name, p in trainer.engine.parameters.items()))

        with_hook = register_optimizer_step_post_hook(keep_gradients)
        loss = trainer.train_step(1).loss
        with_hook.remove()
        return found, loss, gradients, full_copies(trainer.engine.parameters.items())


def is_rounded_alike(found, expected):
    """Compares what is rounded, up to what rounding makes differ; returns whether there is nothing that it does."""
    assert [name for name, *_ in found] == [name for name, *_ in expected]
    for (name, x, dtype), (_, y, _) in zip(found, expected, strict=True):
        assert distance(x, y) <= 1e-5, name
        if distance(rounded(x, dtype), rounded(y, dtype)) > 1e-5:
            return False
    return True


@needs_torchao
def test_tensor_parallel_run_computes_the_same(corpus, tmp_path):
    """A value near the middle between two of float8 may be rounded differently after sums in another order.

    Up to that value both runs agree as they do in fp32. What follows from it differs by steps of float8, so that
    gradients and weights are compared in a run without one. A sum that differs by 1e-7 of its size is rounded
    differently with a probability of about 1e-6: the steps are 1/8 to 1/16 of a value. These runs round 10^5 values.
    """
    changes = {
        "training__seq_len": 32, "training__global_batch_size": 2, "training__local_batch_size": 2,
        "training__steps": 1, "model__converters": '["float8"]',
    }  # fmt: skip
    many = {"parallelism__tensor_parallel_degree": 2, "activation_checkpoint__mode": "full"}
    for seed in range(7, 15):
        argv, folder = {**COMMON, **changes, "debug__seed": seed}, tmp_path / str(seed)
        (expected,) = run_ranks(operands_and_results, 1, options(corpus, folder / "one", **argv))
        found = run_ranks(operands_and_results, 2, options(corpus, folder / "many", **{**argv, **many}))
        assert len(expected[0]) == 2 * 2 * 7
        if all(is_rounded_alike(operands, expected[0]) for operands, *_ in found):
            break
    else:
        pytest.fail("in every run a value was rounded differently")
    for _, loss, gradients, weights in found:
        assert loss == pytest.approx(expected[1], rel=1e-5)
        assert largest_difference([gradients], expected[2]) <= 1e-4
        assert largest_difference([weights], expected[3]) <= 1e-4


@pytest.mark.skipif(HAS_TORCHAO, reason="the package torchao is installed")
def test_an_error_names_the_package(corpus, tmp_path):
    code, text = train(options(corpus, tmp_path, model__converters='["float8"]'), log_folder=tmp_path)
    assert code == 2
    assert text.count("error: ") == 1
    assert "the package torchao is not installed; pip install" in text
