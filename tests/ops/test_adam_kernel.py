"""Adam's update by Triton, in its interpreter where there is no GPU."""

import sys

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULE = "torchtitan_clone.ops.adam_kernel"


@pytest.fixture
def update_(monkeypatch):
    """Returns the function, whose kernel is compiled or interpreted as Triton decides when it is defined."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return pytest.importorskip(MODULE).update_


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
