"""Adam's update by Triton, in its interpreter where there is no GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernel is defined

from torchtitan_clone.ops.adam_kernel import update_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_updates_are_those_of_torch_in_float64(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.3}
    weight = torch.randn(5000, generator=generator)
    exact = torch.nn.Parameter(weight.double())
    optimizer = kind([exact], **options)
    weight, step = weight.to(DEVICE), torch.zeros((), device=DEVICE)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for _ in range(4):
        gradient = torch.randn(5000, generator=generator).to(dtype)
        exact.grad = gradient.double() * 0.25
        optimizer.step()
        step += 1
        how = {"factor": 0.25, "decoupled": kind is torch.optim.AdamW, **options}
        update_(weight, gradient.to(DEVICE), first, second, step, **how)
    state = optimizer.state[exact]
    for found, right in ((weight, exact), (first, state["exp_avg"]), (second, state["exp_avg_sq"])):
        torch.testing.assert_close(found.cpu().double(), right.detach(), rtol=1e-5, atol=1e-6)
