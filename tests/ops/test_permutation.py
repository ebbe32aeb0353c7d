import torch

from torchtitan_clone.ops.permutation import Permute, inverse


def test_rows_and_gradients_are_permuted():
    rows_ND = torch.randn(7, 3, requires_grad=True)
    order_N = torch.randperm(7)
    grad_ND = torch.randn(7, 3)
    out_ND = Permute.apply(rows_ND, order_N)
    assert torch.equal(out_ND, rows_ND[order_N])
    (grad,) = torch.autograd.grad(out_ND, rows_ND, grad_ND)
    (expected,) = torch.autograd.grad(rows_ND[order_N], rows_ND, grad_ND)
    assert torch.equal(grad, expected)
    assert torch.equal(out_ND[inverse(order_N)], rows_ND)
