"""The chunked loss against torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.ops.cross_entropy import build_loss

B, T, D, V = 3, 20, 16, 101


def example(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[0, :7] = IGNORE_INDEX
    targets[1] = IGNORE_INDEX
    return hidden, weight, targets


def reference(hidden, weight, targets):
    logits = hidden @ weight.T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 60, 1000])
def test_value_and_gradients_equal_cross_entropy(chunk_tokens):
    hidden, weight, targets = example(torch.float64)
    expected = reference(hidden, weight, targets)
    expected_grads = torch.autograd.grad(expected / 5, (hidden, weight))
    hidden, weight, targets = example()
    loss = build_loss(chunk_tokens=chunk_tokens, compile_backend=None)(hidden, weight, targets)
    grads = torch.autograd.grad(loss / 5, (hidden, weight))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_without_gradients_it_gives_the_same_value():
    hidden, weight, targets = example()
    loss_fn = build_loss(chunk_tokens=16, compile_backend=None)
    with torch.no_grad():
        assert loss_fn(hidden, weight, targets).item() == pytest.approx(loss_fn(*example()).item(), rel=1e-6)


def test_rounding_does_not_grow_with_the_number_of_chunks():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4096, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) / 4
    targets = torch.randint(0, V, (1, 4096), generator=generator)
    exact = torch.autograd.grad(reference(hidden, w := weight.clone().requires_grad_(), targets), w)[0]
    errors = []
    for chunk_tokens in (4096, 16):
        low = weight.bfloat16().requires_grad_()
        loss = build_loss(chunk_tokens=chunk_tokens, compile_backend=None)(hidden.bfloat16(), low, targets)
        errors.append(((torch.autograd.grad(loss, low)[0].float() - exact).norm() / exact.norm()).item())
    assert errors[1] < 1.2 * errors[0]


def test_compiled_equals_eager():
    eager = build_loss(chunk_tokens=30, compile_backend=None)(*example())
    compiled = build_loss(chunk_tokens=30, compile_backend="aot_eager")(*example())
    torch.testing.assert_close(compiled, eager)


class LargeTensors(TorchDispatchMode):
    """Notes the operators that write a tensor of this many elements, and the memory that they write to."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.operators, self.memory = elements, [], set()
        self.kept = []  # so that no memory is used twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.elements and not function.is_view:
            self.operators.append(function.overloadpacket.__name__)
            self.memory.add(result.untyped_storage().data_ptr())
            self.kept.append(result)
        return result


def test_a_chunk_has_one_tensor_of_logits_and_four_passes_over_it():
    hidden, weight, targets = example()
    with LargeTensors(B * T * V) as large:
        build_loss(chunk_tokens=B * T, compile_backend=None)(hidden, weight, targets)
    product, *others = large.operators
    assert product in ("mm", "_linear_pointwise")  # of MKL, of oneDNN
    assert others == ["log_softmax", "exp_", "scatter_add_"]
    assert len(large.memory) == 1
