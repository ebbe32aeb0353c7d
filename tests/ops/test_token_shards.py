"""Tokens are gathered and summed over ranks, with gradients, in the bits of DTensor's redistribution."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.support.harness import run_ranks
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.ops.token_shards import gather_tokens, sum_and_shard_tokens
from torchtitan_clone.parallel.runtime import Launch, process_group

RANKS, B, T, D = 3, 2, 6, 4


def redistribute(x, mesh, source, target):
    partial = [Partial()] if target == Replicate() else [target]
    return DTensor.from_local(x, mesh, [source]).redistribute(placements=[target]).to_local(grad_placements=partial)


def both_directions(compiled):
    """Returns pairs of results and gradients, of the functions and of DTensor."""
    pairs = []
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", (RANKS,))
        torch.manual_seed(mesh.get_local_rank())
        cases = [
            (gather_tokens, (B, T // RANKS, D), (Shard(1), Replicate())),
            (sum_and_shard_tokens, (B, T, D), (Partial(), Shard(1))),
        ]
        for function, shape, placements in cases:
            x = torch.randn(shape, requires_grad=True)
            run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
            results = [run(x, mesh), redistribute(x, mesh, *placements)]
            grad = torch.randn_like(results[0])
            pairs += [results, [torch.autograd.grad(result, x, grad)[0] for result in results]]
    return [[x.detach() for x in pair] for pair in pairs]


def test_they_equal_a_redistribution_and_so_do_their_gradients():
    for compiled in (False, True):
        for pairs in run_ranks(both_directions, RANKS, compiled):
            assert len(pairs) == 4
            for found, expected in pairs:
                assert found.abs().max() > 0
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # sums in another order
