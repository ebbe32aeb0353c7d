"""How a decoder is split over the tensor axis, in torch's own styles by the names of modules.

Between the matrices activations are shards of the sequence (sequence parallelism); inside attention and feed-forward
they are shards of heads and of the hidden size. The output projection is absent: the loss knows how to split it.
Source: arXiv 1909.08053, arXiv 2205.05198.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a family's modules are split over the tensor axis.

    Attributes:
        styles: torch's ParallelStyle by module name; * matches one component of a name.
        replicated: names of parameters that stay plain tensors; * as in fnmatch. Nothing sums their gradients over the
            axis, so that each rank must compute the complete gradient. Every other parameter must become a DTensor.
    """

    styles: Mapping[str, ParallelStyle]
    replicated: tuple[str, ...] = ()


def decoder_styles() -> dict[str, ParallelStyle]:
    """Returns styles for embedding, norms, attention and SwiGLU, by module name."""
    gather = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": gather,
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        # As DTensors, which know the hidden size even where the degree does not divide it.
        "layers.*.feed_forward.w1": ColwiseParallel(use_local_output=False),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward.w3": ColwiseParallel(use_local_output=False),
        "norm": SequenceParallel(),
    }


def qk_norm_styles() -> dict[str, ParallelStyle]:
    """Returns styles for norms of queries and keys per head.

    Their weights are replicated DTensors whose gradients are summed over the axis, for each rank has some heads only.
    """
    norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {"layers.*.attention.q_norm": norm, "layers.*.attention.k_norm": norm}
