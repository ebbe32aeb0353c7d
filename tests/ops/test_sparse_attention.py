"""Tests of sparse_attention.py against attention, selection and loss of one token at a time in float64."""

import pytest
import torch

from torchtitan_clone.ops import sparse_attention as sparse
from torchtitan_clone.ops.sparse_attention import SparseCore, index_scores, select_keys

NAMES = ("q", "k", "v", "index_q", "index_k", "weights")


def random_inputs(*, rows=2, tokens=40, heads=4, index_heads=3):
    torch.manual_seed(0)
    shapes = [(heads, 12), (heads, 12), (heads, 8), (index_heads, 16), (16,), (index_heads,)]
    return [torch.randn(rows, tokens, *shape) for shape in shapes]


def starts_of(*rows):
    """Returns the first tokens of documents of these lengths."""
    lengths = [torch.tensor(row) for row in rows]
    return torch.stack([(each.cumsum(0) - each).repeat_interleave(each) for each in lengths])


def token_by_token(q, k, v, index_q, index_k, weights, *, starts, top_k):
    """Returns results and losses of all tokens, each of a loop over tokens and a sorted list of keys."""
    outs, losses = [], []
    for row in range(len(q)):
        for token in range(q.shape[1]):
            keys = range(0 if starts is None else int(starts[row, token]), token + 1)
            products = torch.stack([index_q[row, token] @ index_k[row, key] for key in keys])
            scores = ((products * index_q.shape[-1] ** -0.5).relu() * weights[row, token]).sum(-1)
            ranked = sorted(range(len(keys)), key=lambda number: -scores[number].item())  # stable
            chosen = sorted(ranked[: top_k or None])
            at = [keys[number] for number in chosen]
            logits = torch.einsum("nh,snh->ns", q[row, token], k[row, at]) * q.shape[-1] ** -0.5
            probs = logits.softmax(-1)
            outs.append(torch.einsum("ns,snv->nv", probs, v[row, at]))
            target = probs.detach().mean(0)
            losses.append((target * (target.log() - scores[chosen].log_softmax(-1))).sum())
    return torch.stack(outs).view(*q.shape[:3], -1), torch.stack(losses).view(q.shape[:2])


def with_gradients(compute, inputs):
    """Returns results, losses and the gradients of a sum with random weights of both."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    out, loss = compute(*inputs)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=random) for x in (out, loss)]
    grads = torch.autograd.grad((out * weights[0]).sum() + (loss * weights[1]).sum(), inputs)
    return {"out": out, "loss": loss, **dict(zip(NAMES, grads, strict=True))}


@pytest.mark.parametrize("top_k", [0, 1, 7, 40])
@pytest.mark.parametrize("lengths", [None, ([40], [1, 13, 26])], ids=["causal", "documents"])
def test_equals_a_loop_over_tokens(top_k, lengths):
    inputs, starts = random_inputs(), None if lengths is None else starts_of(*lengths)
    found = with_gradients(lambda *x: SparseCore(top_k=top_k)(*x[:3], x[3:], starts), inputs)
    expected = with_gradients(
        lambda *x: token_by_token(*x, starts=starts, top_k=top_k), [x.double() for x in inputs]
    )  # fmt: skip
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=2e-5, atol=2e-6, msg=lambda text, n=name: n + text)


def test_blocks_of_queries_are_computed_alone():
    """Several blocks, none of which has more scores than it may, give the results of pieces of the row."""
    inputs = random_inputs(tokens=520, heads=8)
    q, k, v, *index = inputs
    blocks = [*sparse._blocks(q, k, tuple(index), None, [0], 30)]
    assert len(blocks) > 2
    assert max(x.numel() for block in blocks for x in (block.probs_BNts, block.heads_BMts)) <= sparse._SCORES["cpu"]
    whole, pieces = SparseCore(top_k=30), [range(130, 260), range(390, 520)]
    expected = whole(q, k, v, tuple(index), None)
    at = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
    found = whole(q[:, at], k, v, (index[0][:, at], index[1], index[2][:, at]), None, [130, 390])
    for some, complete in zip(found, expected, strict=True):
        torch.testing.assert_close(some, complete[:, at], rtol=1e-5, atol=1e-6)


def test_of_equal_scores_the_first_are_selected():
    scores = torch.tensor([[[1.0, 0.0, 0.0, 2.0, 0.0, -1.0]]])
    visible = torch.tensor([[[True, False, True, True, True, True]]])
    assert select_keys(scores, visible, top_k=3)[0, 0].tolist() == [True, False, True, True, False, False]
    assert select_keys(scores, visible, top_k=5)[0, 0].tolist() == visible[0, 0].tolist()
    few = torch.tensor([[[True, False, False, False, False, False]]])
    assert select_keys(scores, few, top_k=3)[0, 0].tolist() == few[0, 0].tolist()


def test_a_query_selects_as_many_keys_as_it_may_of_its_document():
    *_, index_q, index_k, weights = random_inputs()
    starts = starts_of([40], [1, 13, 26])
    token = torch.arange(40)
    visible = (token <= token[:, None]) & (token >= starts[..., None])
    selected = select_keys(index_scores((index_q, index_k, weights)), visible, top_k=7)
    assert not (selected & ~visible).any()
    assert torch.equal(selected.sum(-1), visible.sum(-1).clamp_max(7))


def test_without_gradients_there_is_no_loss():
    q, k, v, *index = random_inputs()
    with torch.no_grad():
        out, loss = SparseCore(top_k=7)(q, k, v, tuple(index), None)
    assert not loss.any()
    assert torch.equal(out, SparseCore(top_k=7)(q, k, v, tuple(index), None)[0])
