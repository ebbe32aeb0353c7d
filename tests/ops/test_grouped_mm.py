"""Grouped products against one product per group."""

import pytest
import torch

from torchtitan_clone.ops.grouped_mm import grouped_mm, rows_of_groups

SIZES = [5, 0, 7, 1, 0]


def tensors(dtype=torch.float32, *, device="cpu"):
    random = torch.Generator().manual_seed(0)
    x_ND = torch.randn(sum(SIZES), 16, generator=random).to(device, dtype).requires_grad_()
    weight_EFD = torch.randn(len(SIZES), 32, 16, generator=random).to(device, dtype).requires_grad_()
    return x_ND, weight_EFD, torch.tensor(SIZES).cumsum(0).to(device, torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_equal_those_of_each_group(dtype):
    x_ND, weight_EFD, ends_E = tensors(dtype)
    grad_NF = torch.randn(sum(SIZES), 32).to(dtype)
    out_NF = grouped_mm(x_ND, weight_EFD, ends_E)
    grads = torch.autograd.grad(out_NF, (x_ND, weight_EFD), grad_NF)
    expected_NF = torch.cat([rows @ weight.T for rows, weight in zip(x_ND.split(SIZES), weight_EFD, strict=True)])
    expected_grads = torch.autograd.grad(expected_NF, (x_ND, weight_EFD), grad_NF)
    assert torch.equal(out_NF, expected_NF)
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert torch.equal(grad, expected)


def test_a_gradient_without_strides_and_frozen_weights():
    x_ND, weight_EFD, ends_E = tensors()
    weight_EFD.requires_grad_(False)
    grouped_mm(x_ND, weight_EFD, ends_E).sum().backward()
    expected = torch.cat([w.sum(0).expand(size, -1) for w, size in zip(weight_EFD, SIZES, strict=True)])
    torch.testing.assert_close(x_ND.grad, expected)
    assert weight_EFD.grad is None


def test_shapes_on_the_meta_device():
    x_ND, weight_EFD, ends_E = tensors(device="meta")
    out_NF = grouped_mm(x_ND, weight_EFD, ends_E)
    out_NF.sum().backward()
    assert out_NF.shape == (sum(SIZES), 32)
    assert weight_EFD.grad is not None
    assert weight_EFD.grad.shape == weight_EFD.shape


def test_operators_are_registered_completely():
    torch.library.opcheck(grouped_mm, tensors())
    x_ND, _, _ = tensors()
    sums = torch.ops.torchtitan_clone.group_sums.default
    torch.library.opcheck(sums, (x_ND.detach(), torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES)), 5))


def test_rows_of_groups_and_their_gradients():
    x_ND, weight_EFD, ends_E = tensors()
    values_EF = weight_EFD[..., 0]
    rows_NF = rows_of_groups(values_EF, ends_E, num_rows=len(x_ND))
    assert torch.equal(rows_NF, values_EF.repeat_interleave(torch.tensor(SIZES), dim=0))
    grad_NF = torch.randn(rows_NF.shape)
    (found,) = torch.autograd.grad(rows_NF, values_EF, grad_NF)
    expected = torch.zeros_like(values_EF)
    for group, rows in enumerate(grad_NF.split(SIZES)):
        for row in rows:
            expected[group] += row
    assert torch.equal(found, expected)
