"""The chunked loss against torch's cross-entropy. Tests of vocabulary.py too."""

import operator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_clone.ops import IGNORE_INDEX, softmax
from torchtitan_clone.ops.cross_entropy import build_loss
from torchtitan_clone.ops.layers import faster_product
from torchtitan_clone.torch_compat import argument_names, fake_tensors, init_fake_process_group, storage_id

B, T, D, V = 3, 20, 16, 101
WIDE = 2**25 // (B * T * V) + 1  # of which C++ multiplies all tokens at once


def example(dtype=torch.float32, *, dim=D):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, dim, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, dim, generator=generator) * (D / dim) ** 0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[0, :7] = IGNORE_INDEX
    targets[1] = IGNORE_INDEX
    return hidden, weight, targets


def reference(hidden, weight, targets):
    logits = hidden @ weight.T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("dim", [D, WIDE])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 60, 1000])
def test_value_and_gradients_equal_cross_entropy(chunk_tokens, dim):
    hidden, weight, targets = example(torch.float64, dim=dim)
    expected = reference(hidden, weight, targets)
    expected_grads = torch.autograd.grad(expected / 5, (hidden, weight))
    hidden, weight, targets = example(dim=dim)
    loss = build_loss(chunk_tokens=chunk_tokens, compile_backend=None)(hidden, weight, targets)
    grads = torch.autograd.grad(loss / 5, (hidden, weight))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


class Lse:
    """Takes the lse of the targets as ZLoss does."""

    coefficient = 0.3

    def __init__(self):
        self.of_targets = []

    def add(self, lse, *, targets_N):
        self.of_targets = torch.cat(lse).flatten()[targets_N != IGNORE_INDEX]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 60])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_z_loss_adds_the_gradients_of_squared_lse(backend, chunk_tokens, is_split, monkeypatch):
    hidden, weight, targets = example(torch.float64)
    lse = (hidden @ weight.T).logsumexp(dim=-1)[targets != IGNORE_INDEX]
    expected = reference(hidden, weight, targets)
    expected_grads = torch.autograd.grad((expected + Lse.coefficient * lse.square().sum()) / 5, (hidden, weight))
    if is_split:
        monkeypatch.setattr(softmax, "_CACHED_LOGITS", V)
    hidden, weight, targets = example()
    found = Lse()
    loss_fn = build_loss(chunk_tokens=chunk_tokens, compile_backend=backend, z_loss=found)
    loss = loss_fn(hidden, weight, targets)
    grads = torch.autograd.grad(loss / 5, (hidden, weight))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.of_targets.double(), lse, rtol=1e-6, atol=0)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_z_loss_is_of_the_next_token_only():
    passes = []
    for later, z_loss in ((False, None), (True, Lse())):
        hidden, weight, targets = example()
        loss = build_loss(chunk_tokens=16, compile_backend=None, z_loss=z_loss)(hidden, weight, targets, later=later)
        passes.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    assert all(map(torch.equal, *passes))
    assert z_loss.of_targets == []


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
            self.memory.add(storage_id(result))
            self.kept.append(result)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chunk_has_one_tensor_of_logits_and_passes_over_a_few_rows_of_it(dtype, monkeypatch):
    monkeypatch.setattr(softmax, "_CACHED_LOGITS", V)
    rows = torch.get_num_threads()
    hidden, weight, targets = example(dtype)
    with LargeTensors(B * T * V) as whole, LargeTensors(rows * V) as some:
        build_loss(chunk_tokens=B * T, compile_backend=None)(hidden, weight, targets)
    assert whole.operators == ["faster_linear" if faster_product(hidden, weight) else "mm"]
    passes = ["log_softmax", "exp_", "scatter_add_"]
    passes = passes if dtype == torch.float32 else ["_to_copy", *passes, "copy_"]
    assert some.operators == passes * (B * T // rows)
    if dtype == torch.float32:
        assert some.memory == whole.memory


@pytest.mark.parametrize(("dim", "chunk_tokens"), [(D, T), (WIDE, T), (WIDE, B * T)])
def test_the_weight_gradient_exists_once(dim, chunk_tokens):
    hidden, weight, targets = example(dim=dim)
    with LargeTensors(weight.numel()) as seen:
        loss = build_loss(chunk_tokens=chunk_tokens, compile_backend=None)(hidden, weight, targets)
        torch.autograd.grad(loss / 7, (hidden, weight))
    by_kernel = dim == WIDE and faster_product(hidden.flatten(0, 1)[:chunk_tokens], weight) is not None
    products = ["faster_linear"] if by_kernel else ["mm", *["addmm_"] * (B * T // chunk_tokens - 1)]
    assert seen.operators == [*products, "mul_"]
    assert len(seen.memory) == 1


def test_a_graph_that_is_kept_has_the_same_gradients_again():
    hidden, weight, targets = example()
    loss = build_loss(chunk_tokens=T, compile_backend=None)(hidden, weight, targets) / 7
    passes = [torch.autograd.grad(loss, (hidden, weight), retain_graph=keeps) for keeps in (True, True, False)]
    for hidden_grad, weight_grad in passes[1:]:
        assert torch.equal(hidden_grad, passes[0][0])
        assert torch.equal(weight_grad, passes[0][1])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_rows_at_a_time_give_the_same_bits(dtype, monkeypatch):
    def value_and_gradients():
        hidden, weight, targets = example(dtype)
        loss = build_loss(chunk_tokens=B * T, compile_backend=None)(hidden, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    expected = value_and_gradients()
    monkeypatch.setattr(softmax, "_CACHED_LOGITS", V)
    assert all(map(torch.equal, value_and_gradients(), expected))


def test_ranks_with_some_logits_each_have_the_log_probabilities_of_all(monkeypatch):
    """Ranks exchange one number for each token, and take a few rows at a time with the numbers of these rows."""
    torch.manual_seed(0)
    hidden, weights = torch.randn(B * T, D), torch.randn(2, V, D)
    exact = (hidden.double() @ weights.double().flatten(0, 1).T).log_softmax(dim=-1)
    rounding = ((hidden @ weights.flatten(0, 1).T).log_softmax(dim=-1) - exact).norm()
    for cached, is_split in ((softmax._CACHED_LOGITS, False), (V, True)):
        monkeypatch.setattr(softmax, "_CACHED_LOGITS", cached)
        assert (len(list(softmax.rows_in_cache(hidden @ weights[0].T, None))) > 1) is is_split
        logits, lse = zip(*(softmax.logits_and_lse(hidden, weight) for weight in weights), strict=True)
        assert lse[0].shape == (B * T, 1)
        found = [
            torch.cat([softmax.log_softmax(*piece) for piece in softmax.rows_in_cache(own, torch.stack(lse))])
            for own in logits
        ]
        assert (torch.cat(found, dim=1) - exact).norm() < 1.5 * rounding


class Operators(TorchDispatchMode):
    """Notes operators with the shapes of their results. Fake tensors on CUDA lack addmm(out=) in torch for CPUs."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.addmm.dtype_out:
            assert kwargs["out"] is args[0]
            result = kwargs["out"]
        else:
            result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.called.append((str(function), tuple(result.shape)))
        return result


def test_on_cuda_products_in_bf16_add_to_the_weight_gradient_in_fp32():
    with fake_tensors(), Operators() as operators:
        hidden, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((B, T, D), (V, D)))
        targets = torch.zeros(B, T, dtype=torch.int64, device="cuda")
        operators.called.clear()
        build_loss(chunk_tokens=20, compile_backend=None)(hidden, weight, targets)
    of_weight = [name for name, shape in operators.called if shape == (V, D)]
    assert of_weight == ["aten.mm.dtype", "aten.addmm.dtype_out", "aten.addmm.dtype_out", "aten._to_copy.default"]


def test_the_sum_of_the_weight_gradient_is_not_compiled():
    """Inductor replaces the product that adds to its result by a product and an addition."""
    graphs = []

    def backend(module, _):
        graphs.append([node.target for node in module.graph.nodes])
        return module.forward

    build_loss(chunk_tokens=30, compile_backend=backend)(*example(torch.bfloat16))
    logits, hidden_grad = F.linear, operator.matmul
    assert [target for target in graphs[0] if target in (logits, operator.matmul)] == [logits, hidden_grad]


class Schedule(TorchDispatchMode):
    """Notes products as P, all-gathers as G, other collectives as C, and which of them block, in lower case."""

    def __init__(self):
        super().__init__()
        self.events = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if function.namespace == "c10d":
            event = "G" if "allgather" in function.name() else "C"
            is_async = dict(zip(argument_names(function), args, strict=False)).get("async_op", True)
            self.events += event if is_async else event.lower()
        self.events += "P" * (function is torch.ops.aten.mm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("training", "expected"), [(True, "PG PG PP PG PP PP C"), (False, "PG PG PG C")])
def test_ranks_exchange_the_sums_of_a_chunk_while_they_compute_others(training, expected):
    init_fake_process_group(rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        hidden, weight, targets = example(torch.bfloat16)
        hidden = DTensor.from_local(hidden, mesh, [Replicate()])
        weight = DTensor.from_local(weight, mesh, [Shard(0)])
        loss_fn = build_loss(chunk_tokens=20, compile_backend=None)
        with torch.set_grad_enabled(training), Schedule() as schedule:
            loss_fn(hidden, weight, targets)
    finally:
        dist.destroy_process_group()
    assert schedule.events.upper() == expected.replace(" ", "")
    assert "g" not in schedule.events
