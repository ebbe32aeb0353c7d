"""When a graph is used, on a CPU; tests/gpu/test_gpu.py compares its results."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchtitan_clone.parallel.cuda_graph import GraphedForwardBackward
from torchtitan_clone.parallel.forward_backward import StepOutput


def rows(count=2):
    tokens = torch.arange(count * 3).view(count, 3)
    return SimpleNamespace(
        tokens_BT=tokens,
        positions_BT=tokens,
        targets_BT=tokens,
        documents_BT=None,
        mtp_targets_BKT=None,
        is_context_BKT=None,
        groups_BT=None,
    )


def graphed():
    """Returns a forward_backward of one weight, and the weight."""
    weight = nn.Parameter(torch.ones(()))

    def forward_backward(microbatches, *, num_targets):
        total = sum((weight * x.tokens_BT.sum() for x in microbatches), start=torch.zeros(())) / num_targets
        if torch.is_grad_enabled():
            total.backward()
        return StepOutput(loss=total.detach(), auxiliary={})

    return GraphedForwardBackward(forward_backward, [weight]), weight


def test_steps_that_differ_from_the_first_one_run_as_they_are():
    run, weight = graphed()
    for microbatches, targets in (([rows()], 1), ([rows()], 2), ([rows(), rows()], 2), ([rows(), rows(1)], 2)):
        weight.grad = None
        output = run(iter(microbatches), num_targets=targets)
        expected = sum(int(x.tokens_BT.sum()) for x in microbatches) / targets
        assert output.loss == weight.grad == expected
    with torch.no_grad():
        assert run([rows(), rows(1)], num_targets=2).loss == expected
    assert run([rows(), rows(1)], num_targets=2).loss == expected
    assert weight.grad == 2 * expected  # added, as a graph would not


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU records it")
def test_an_equal_step_is_run_for_a_recording():
    run, weight = graphed()
    run([rows()], num_targets=1)
    weight.grad = None
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        run([rows()], num_targets=1)
