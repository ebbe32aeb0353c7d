"""Tests of parallel/state_exchange.py: pieces of rows on several ranks equal linear attention over whole rows."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.ops.dense_attention import distance
from tests.ops.test_delta_rule import inputs
from tests.support.harness import run_ranks
from torchtitan_clone.models.attention import DocumentMask
from torchtitan_clone.models.delta_net import DeltaRule, ShortConvolution
from torchtitan_clone.ops.delta_rule import gated_delta_rule
from torchtitan_clone.parallel.mesh import local_tokens
from torchtitan_clone.parallel.state_exchange import (
    PieceStarts,
    StateExchange,
    context_convolutions,
    context_convolutions_backward,
    context_delta_rule,
    context_delta_rule_backward,
)

B, T, W = 2, 160, 4
PIECE = T // 8
"""Tokens of a piece on four ranks with two pieces each; other pieces are of several of these."""
METHODS = ["ring", "alltoall"]
SHARES = {"one": 0.0, "long": 0.02, "short": 0.3, "of a token": 1.0}
"""Share of the tokens that begin a document, by the kind of documents."""
KINDS = [None, *SHARES, "of a piece", "of a piece, the first token apart"]
CASES = [
    *itertools.product(METHODS, KINDS, [1.0], [False]),
    *itertools.product(METHODS, [None], [60.0], [False]),
    *itertools.product(METHODS, ["long"], [1.0], [True]),
]
"""Method, documents, fastest decay, and whether dimensions of keys decay apart."""


def documents(kind):
    if kind in SHARES:
        return (torch.rand(B, T) < SHARES[kind]).int().cumsum(1)
    place_T = torch.arange(T) % PIECE
    return ((place_T == 0) | ((place_T == 1) & (kind != "of a piece"))).int().cumsum(0).expand(B, T)


def tokens_of(group, method):
    pieces = local_tokens(T, rank=group.rank(), degree=group.size(), method=method)
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])


def convolve(core, x, *weights_and_starts):
    """Returns a convolution of each of three tensors of some channels."""
    *weights, starts = weights_and_starts
    convolutions = [ShortConvolution(4, W) for _ in weights]
    for convolution, weight in zip(convolutions, weights, strict=True):
        del convolution.weight
        convolution.weight = weight
    return torch.cat(core.convolve(convolutions, x.chunk(3, dim=-1), starts), dim=-1)


def results(function, tensors, starts):
    """Returns the result, and the gradients that follow from the last tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:-1]]
    out = function(*leaves, starts)
    return out, *torch.autograd.grad(out, leaves, tensors[-1])


def error(got, right):
    """Returns the distance, of what is zero ten times the largest difference."""
    return min(distance(got, right), 10 * (got - right).abs().max().item())


def errors(cases):
    """Returns the errors on this rank of results, and the largest ones of gradients, in each case."""
    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, []
    rows = torch.arange(T).expand(B, -1)
    for method, kind, fastest, by_channel in cases:
        cores = DeltaRule(), StateExchange(group_name=group.group_name, method=method)
        own = tokens_of(group, method)
        tensors = inputs(B=B, T=T, H=2, N=4, fastest=fastest, by_channel=by_channel)
        tensors.append(torch.randn(B, T, 4, 12))
        x, *weights, grad = torch.randn(B, T, 12), *torch.randn(3, 4, W), torch.randn(B, T, 12)
        numbers = None if kind is None else documents(kind)
        masks = DocumentMask(), PieceStarts(DocumentMask(), group=group, method=method)
        starts, own_starts = (mask(numbers, rows, recurrent=True) for mask in masks)

        right = results(cores[0], tensors, starts)
        got = results(cores[1], [x[:, own] for x in tensors], own_starts)
        of_rule = [error(x, y[:, own]) for x, y in zip(got, right, strict=True)]
        whole, by_piece = (partial(convolve, core) for core in cores)
        right = results(whole, [x, *weights, grad], starts)
        got = results(by_piece, [x[:, own], *weights, grad[:, own]], own_starts)
        for total in got[2:]:  # each rank has a share of the gradients of weights
            dist.all_reduce(total)
        rights = [*(y[:, own] for y in right[:2]), *right[2:]]
        of_convolution = [error(x, y) for x, y in zip(got, rights, strict=True)]
        found.append((max(of_rule[0], of_convolution[0]), max(*of_rule[1:], *of_convolution[1:])))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_of_rows_equal_whole_rows(ranks):
    for found in run_ranks(errors, ranks, CASES):
        wrong = {case: each for case, each in zip(CASES, found, strict=True) if each[0] > 1e-6 or each[1] > 1e-5}
        assert not wrong


def check_bfloat16_and_operators():
    """Returns how far results in bfloat16 are from those in fp32, over the error of rounding them once."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    exchange, own = ("ring", group.group_name), tokens_of(group, "ring")
    exact = inputs(B=B, T=T)
    low = [x.bfloat16() for x in exact[:3]] + exact[3:]
    right = gated_delta_rule(*(x.float() for x in low))[0][:, own]
    got = StateExchange(method="ring", group_name=group.group_name)(*(x[:, own] for x in low), None)

    leaves = [x[:, :20].requires_grad_() for x in exact]
    starts = torch.full((B, 20), -3, dtype=torch.int32)
    torch.library.opcheck(context_delta_rule, (*leaves, starts, *exchange), test_utils="test_faketensor")
    out, *saved = context_delta_rule(*leaves, starts, *exchange)
    arguments = torch.ones_like(out), *leaves, starts, *saved, *exchange
    torch.library.opcheck(context_delta_rule_backward, arguments, test_utils="test_faketensor")
    x, weight = torch.randn(B, 20, 6, requires_grad=True), torch.randn(6, W, requires_grad=True)
    arguments = [x, x], [weight, weight], starts, *exchange
    torch.library.opcheck(context_convolutions, arguments, test_utils="test_faketensor")
    *outs, before = context_convolutions(*arguments)
    arguments = outs, *arguments[:3], before, *exchange
    torch.library.opcheck(context_convolutions_backward, arguments, test_utils="test_faketensor")
    return got.dtype, distance(got, right) / distance(right.bfloat16(), right)


def test_bfloat16_is_rounded_once_and_operators_return_what_they_promise():
    for dtype, over_rounding in run_ranks(check_bfloat16_and_operators, 2):
        assert dtype == torch.bfloat16
        assert over_rounding < 1.01
