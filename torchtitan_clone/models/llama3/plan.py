"""How Llama 3 is split over the tensor axis, in torch's own styles by the names of modules.

Between the matrices activations are shards of the sequence (sequence parallelism); inside attention and feed-forward
they are shards of heads and of the hidden size. The output projection is missing: the loss knows how to split it.
Source: arXiv 1909.08053, arXiv 2205.05198.
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


def tensor_plan() -> dict[str, ParallelStyle]:
    """Styles by module name; * stands for one part of a name."""
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
