"""Adam's update by Triton, in its interpreter where there is no GPU, and what it compiles to."""

import re
import sys

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULE = "torchtitan_clone.ops.adam_kernel"


def import_kernel(monkeypatch, *, is_interpreted):
    """Returns the module, whose kernel is compiled or interpreted as Triton decides when it is defined."""
    monkeypatch.setenv("TRITON_INTERPRET", str(int(is_interpreted)))
    monkeypatch.setitem(sys.modules, MODULE, None)  # what is imported below is forgotten after the test
    del sys.modules[MODULE]
    return pytest.importorskip(MODULE)


@pytest.fixture
def update_(monkeypatch):
    return import_kernel(monkeypatch, is_interpreted=DEVICE == "cpu").update_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)], ids=str)
def test_updates_are_those_of_torch_in_float64(update_, kind, betas, dtype):
    generator = torch.Generator().manual_seed(0)
    options = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.3}
    weight = torch.randn(5000, generator=generator)
    exact = torch.nn.Parameter(weight.double())
    optimizer = kind([exact], betas=betas, **options)
    weight, step = weight.to(DEVICE), torch.zeros((), device=DEVICE)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for _ in range(4):
        gradient = torch.randn(5000, generator=generator).to(dtype)
        exact.grad = gradient.double() * 0.25
        optimizer.step()
        step += 1
        how = {
            "factor": 0.25,
            "beta1": betas[0],
            "beta2": betas[1],
            "decoupled_weight_decay": kind is torch.optim.AdamW,
        }
        update_(weight, gradient.to(DEVICE), first, second, step, **how, **options)
    state = optimizer.state[exact]
    for found, right in ((weight, exact), (first, state["exp_avg"]), (second, state["exp_avg_sq"])):
        torch.testing.assert_close(found.cpu().double(), right.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient", ["*fp32", "*bf16"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernel_compiles_for_gpus_that_are_not_there(monkeypatch, capability, gradient):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = import_kernel(monkeypatch, is_interpreted=False)._update
    constants = {"DECOUPLED": True, "BLOCK": 2048}
    types = dict.fromkeys(kernel.arg_names, "fp32") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("weight", "exp_avg", "exp_avg_sq", "step"), "*fp32") | {"gradient": gradient, "size": "i32"}
    aligned = [i for i, type in enumerate(types.values()) if type == "i32" or type.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    accesses = set(re.findall(r"(?:ld|st)\.global[.\w]*", compiled.asm["ptx"]))
    # 16 bytes at a time, but for the number of the step.
    assert accesses == {"ld.global.v4.b32", "st.global.v4.b32", "ld.global.b32"}
    assert compiled.asm["cubin"]
