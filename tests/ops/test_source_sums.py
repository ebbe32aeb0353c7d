"""Losses by source are the sums of the losses of their tokens, and the loss itself does not change."""

import pytest
import torch

from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.ops.cross_entropy import build_loss
from torchtitan_clone.ops.source_sums import SourceSums


@pytest.mark.parametrize("is_training", [True, False])
def test_losses_by_source_add_up_to_the_loss(is_training):
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(0, 11, (4, 6))
    targets[0, 3] = targets[2, 5] = IGNORE_INDEX
    sources = torch.tensor([0, 2, 2, 0])[:, None].expand(4, 6)
    sizes = torch.arange(11)
    sums = SourceSums(["a", "b", "c"], bytes_V=sizes, device=torch.device("cpu"))
    with torch.set_grad_enabled(is_training):
        expected = build_loss(chunk_tokens=5, compile_backend=None)(hidden, weight, targets)
        found = build_loss(chunk_tokens=5, compile_backend=None, sums=sums)(hidden, weight, targets, sources)
    assert torch.equal(found, expected)
    losses = torch.nn.functional.cross_entropy(
        (hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    ).view(4, 6)
    by_source = sums.by_source(sums.own(counts=True).tolist())
    for index, name in enumerate(("a", "b", "c")):
        chosen = (sources == index) & (targets != IGNORE_INDEX)
        wanted = (losses[chosen].sum().item(), chosen.sum().item(), sizes[targets[chosen]].sum().item())
        assert by_source[name] == pytest.approx(wanted, rel=1e-5)
    assert sums.by_source(sums.own(counts=False).tolist())["c"] == (by_source["c"][0], 0, 0)
    with torch.no_grad():  # of tokens without a group, as those of multi-token prediction
        build_loss(chunk_tokens=5, compile_backend=None, sums=sums)(hidden, weight, targets)
    assert sums.by_source(sums.own(counts=True).tolist()) == by_source
    sums.reset()
    assert sums.own(counts=True).tolist() == [0.0] * 9


def test_sums_over_a_large_set_are_those_of_float64():
    """float32 counts to 2^24."""
    sums = SourceSums(["a", "b"], bytes_V=torch.tensor([3]), device=torch.device("cpu"))
    batch = 1 << 16
    losses, targets = torch.full((batch,), 2.5), torch.zeros(batch, dtype=torch.int64)
    for _ in range(300):
        sums.add([losses], targets_N=targets, groups_N=torch.full((batch,), 1))
    total = 300 * batch
    assert total > 2**24
    assert sums.by_source(sums.own(counts=True).tolist()) == {"a": (0, 0, 0), "b": (2.5 * total, total, 3 * total)}
