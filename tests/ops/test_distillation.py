"""The loss of a student with a teacher, against probabilities computed token by token in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_cross_entropy import B, D, T, V, example
from torchtitan_clone.ops import IGNORE_INDEX, softmax
from torchtitan_clone.ops.distillation import ModelPredictions, StoredPredictions, build_distilled_loss

ALPHA, TEMPERATURE, K = 0.3, 2.5, 7


class Divergence:
    """Sums KL over the targets as LoggedTerm does."""

    def __init__(self):
        self.total = 0.0

    def add(self, values, *, targets_N):
        self.total += torch.cat(values).flatten()[targets_N != IGNORE_INDEX].sum().item()


def teacher_of(dtype=torch.float32, *, vocabulary=V):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, 24, generator=generator)
    weight = torch.randn(vocabulary, 24, generator=generator) / 2
    return hidden.to(dtype), weight.to(dtype)


def stored(hidden, weight, *, k, temperature=TEMPERATURE):
    """Returns what is stored of the model: the k largest of its log-probabilities."""
    top = (hidden @ weight.T / temperature).log_softmax(dim=-1).topk(k)
    return StoredPredictions(
        ids_BKT=top.indices.transpose(1, 2).contiguous(), values_BKT=top.values.transpose(1, 2).contiguous()
    )


def run(predictions, *, chunk_tokens=16, backend=None, alpha=ALPHA, temperature=TEMPERATURE, dtype=torch.float32):
    """Returns the cross-entropy, KL and the gradients of the objective over 5."""
    hidden, weight, targets = example(dtype)
    divergence = Divergence()
    loss_fn = build_distilled_loss(
        alpha=alpha, temperature=temperature, divergence=divergence, chunk_tokens=chunk_tokens, compile_backend=backend
    )
    loss = loss_fn(hidden, weight, targets, teacher=lambda of: of(predictions))
    return loss.detach(), divergence.total, torch.autograd.grad(loss / 5, (hidden, weight))


def expected(log_p, *, buckets=None, alpha=ALPHA, temperature=TEMPERATURE):
    """Returns the same in float64, of all targets at once; `buckets` [B, T, K] are the tokens that count one by one."""
    hidden, weight, targets = example(torch.float64)
    logits = hidden @ weight.T
    is_target = targets != IGNORE_INDEX
    loss = F.cross_entropy(logits[is_target], targets[is_target], reduction="sum")
    log_q = (logits / temperature).log_softmax(dim=-1)
    if buckets is not None:
        p, q = (x.exp().gather(2, buckets) for x in (log_p, log_q))
        p, q = (torch.cat((x, 1 - x.sum(2, keepdim=True)), dim=2) for x in (p, q))
        log_p, log_q = p.log(), q.log()
    divergence = (log_p.exp() * (log_p - log_q))[is_target].sum()
    objective = (1 - alpha) * loss + alpha * temperature**2 * divergence
    return loss.detach(), divergence.item(), torch.autograd.grad(objective / 5, (hidden, weight))


def assert_equal(found, wanted, *, tolerance=1e-6):
    assert found[0].item() == pytest.approx(wanted[0].item(), rel=1e-6)
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)
    for ours, theirs in zip(found[2], wanted[2], strict=True):
        assert (ours - theirs).norm() < tolerance * theirs.norm()


@pytest.mark.parametrize(("alpha", "temperature"), [(ALPHA, TEMPERATURE), (1.0, 1.0), (0.0, 0.5)])
@pytest.mark.parametrize("chunk_tokens", [7, 60])
def test_a_model_as_teacher(chunk_tokens, alpha, temperature):
    log_p = torch.matmul(*(x.double().mT if x.ndim == 2 else x.double() for x in teacher_of())) / temperature
    wanted = expected(log_p.log_softmax(dim=-1), alpha=alpha, temperature=temperature)
    hidden, weight = teacher_of()
    predictions = ModelPredictions(hidden_BTD=hidden, weight_VD=weight)
    assert_equal(run(predictions, chunk_tokens=chunk_tokens, alpha=alpha, temperature=temperature), wanted)


def test_stored_predictions_are_buckets():
    hidden, weight = (x.double() for x in teacher_of())
    predictions = stored(hidden, weight, k=K)
    log_p = (hidden @ weight.T / TEMPERATURE).log_softmax(dim=-1)
    assert log_p.exp().gather(2, predictions.ids_BKT.transpose(1, 2)).sum(2).mean() < 0.95  # the bucket matters
    wanted = expected(log_p, buckets=predictions.ids_BKT.transpose(1, 2))
    assert_equal(run(predictions), wanted, tolerance=3e-6)


def test_all_stored_predictions_equal_those_of_the_model():
    hidden, weight = teacher_of()
    of_model = run(ModelPredictions(hidden_BTD=hidden, weight_VD=weight))
    assert_equal(run(stored(hidden, weight, k=V)), of_model)


@pytest.mark.parametrize("kind", ["model", "stored"])
def test_compiled_and_divided_rows_equal_the_others(kind, monkeypatch):
    hidden, weight = teacher_of()
    predictions = (
        ModelPredictions(hidden_BTD=hidden, weight_VD=weight) if kind == "model" else stored(hidden, weight, k=K)
    )
    wanted = run(predictions)
    assert_equal(run(predictions, backend="aot_eager"), wanted)
    monkeypatch.setattr(softmax, "_CACHED_LOGITS", V)
    assert_equal(run(predictions), wanted)


def test_rounded_probabilities_may_exceed_one():
    """In float16 those of a confident teacher may."""
    hidden, weight = teacher_of()
    exact = stored(8 * hidden, weight, k=V - 1)
    rounded = StoredPredictions(ids_BKT=exact.ids_BKT, values_BKT=(exact.values_BKT + 1e-4).half())
    assert (rounded.values_BKT.float().exp().sum(1) > 1).any()
    found, wanted = run(rounded), run(exact)
    assert found[1] == pytest.approx(wanted[1], rel=1e-2)
    for ours, theirs in zip(found[2], wanted[2], strict=True):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


def test_validation_and_later_tokens_have_the_cross_entropy_alone():
    def teacher(_):
        raise AssertionError("it was asked")

    loss_fn = build_distilled_loss(
        alpha=ALPHA, temperature=TEMPERATURE, divergence=Divergence(), chunk_tokens=16, compile_backend=None
    )
    later = loss_fn(*example(), later=True, teacher=teacher)
    with torch.no_grad():
        assert loss_fn(*example(), teacher=teacher).item() == pytest.approx(later.item(), rel=1e-6)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and not function.is_view:
                self.bytes = max(self.bytes, x.nbytes)
        return result


@pytest.mark.parametrize("kind", ["model", "stored"])
def test_no_tensor_is_larger_than_a_chunk_of_logits(kind):
    vocabulary, chunk = 5000, 12
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(vocabulary, D, generator=generator, requires_grad=True)
    hidden, _, targets = example()
    other_hidden, other_weight = teacher_of(vocabulary=vocabulary)
    predictions = ModelPredictions(hidden_BTD=other_hidden, weight_VD=other_weight)
    predictions = predictions if kind == "model" else stored(other_hidden, other_weight, k=K)
    loss_fn = build_distilled_loss(
        alpha=ALPHA, temperature=TEMPERATURE, divergence=Divergence(), chunk_tokens=chunk, compile_backend=None
    )
    with Largest() as largest:
        loss_fn(hidden, weight, targets, teacher=lambda of: of(predictions)).backward()
    assert largest.bytes <= max(chunk * (vocabulary + 1), vocabulary * D) * 4 < B * T * vocabulary * 4 / 3
