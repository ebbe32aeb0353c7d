"""How tensor and sequence parallelism shard a decoder: torch's ParallelStyle objects by module name.

parallel/tensor.py shards the output projection. Source: arXiv 1909.08053, arXiv 2205.05198.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How tensor parallelism shards the modules of a family."""

    styles: Mapping[str, ParallelStyle]
    """Styles by module name; * matches one component of a name."""
    replicated: tuple[str, ...] = ()
    """Parameters that stay plain tensors; * as in fnmatch. Each rank must compute their gradients completely."""


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
        # DTensors know the hidden size even where the degree does not divide it.
        "layers.*.feed_forward.w1": ColwiseParallel(use_local_output=False),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward.w3": ColwiseParallel(use_local_output=False),
        "norm": SequenceParallel(),
    }


def qk_norm_styles() -> dict[str, ParallelStyle]:
    """Returns styles for norms of queries and keys, whose gradients are summed over the axis: a rank has some heads."""
    norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {"layers.*.attention.q_norm": norm, "layers.*.attention.k_norm": norm}
