"""Forward and backward of a step as one CUDA graph.

A small model leaves a GPU waiting for the host, which launches each kernel anew in every step. A graph keeps the
launches of a step with all addresses, and the host starts it by one call. Source: CUDA C++ Programming Guide, "CUDA
Graphs".
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan_clone.parallel.forward_backward import ForwardBackward, Rows, StepOutput, optional_tensors


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """A graph, and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Rows]
    output: StepOutput
    gradients: Sequence[tuple[nn.Parameter, Tensor]]


class GraphedForwardBackward:
    """Runs a forward_backward of one GPU without collectives: two equal steps as it is, the following by a graph.

    Rows have no documents. Steps of other shapes, or of another number of targets, run as they are. Results have the
    same bits. They are at the same addresses in every step, so that a step overwrites those of the last, and the memory
    of a step stays in use between steps.
    """

    def __init__(self, forward_backward: ForwardBackward, parameters: Iterable[nn.Parameter]) -> None:
        self._forward_backward = forward_backward
        self._parameters = list(parameters)
        self._shapes: object = None
        self._has_warmed_up = False
        self._recording: _Recording | None = None

    def __call__(self, microbatches: Iterable[Rows], *, num_targets: int) -> StepOutput:
        if not torch.is_grad_enabled():
            return self._forward_backward(microbatches, num_targets=num_targets)
        inputs = list(microbatches)
        shapes = num_targets, [[x.shape for x in _tensors_of(rows)] for rows in inputs]
        if shapes != self._shapes or any(p.grad is not None for p in self._parameters):
            if self._recording is None:
                self._shapes, self._has_warmed_up = shapes, False
            return self._forward_backward(inputs, num_targets=num_targets)
        if not self._has_warmed_up:
            self._has_warmed_up = True
            return self._run_in_stream(inputs, num_targets=num_targets)
        if self._recording is None:
            self._recording = self._record(inputs, num_targets=num_targets)
        for kept, given in zip(self._recording.inputs, inputs, strict=True):
            for to, tensor in zip(_tensors_of(kept), _tensors_of(given), strict=True):
                to.copy_(tensor)
        self._recording.graph.replay()
        for parameter, gradient in self._recording.gradients:
            parameter.grad = gradient
        return self._recording.output

    def _run_in_stream(self, inputs: Sequence[Rows], *, num_targets: int) -> StepOutput:
        """Runs a step in a stream of its own, as a recording does: libraries set up what they need for it."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            output = self._forward_backward(inputs, num_targets=num_targets)
        current.wait_stream(stream)
        return output

    def _record(self, inputs: Sequence[Rows], *, num_targets: int) -> _Recording:
        """Records a step, which computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, as that of asynchronous saves, go on to use the GPU.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = self._forward_backward(inputs, num_targets=num_targets)
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        return _Recording(graph=graph, inputs=inputs, output=output, gradients=gradients)


def _tensors_of(rows: Rows) -> Iterator[Tensor]:
    yield from (rows.tokens_BT, rows.positions_BT, rows.targets_BT)
    yield from optional_tensors(rows).values()
