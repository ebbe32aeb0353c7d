"""FLOPs of a dense decoder in training, from the parameters of its modules."""

from functools import cache

import torch

from torchtitan_clone.models.decoder import Decoder, ModelArgs
from torchtitan_clone.models.spec import BuildModel
from torchtitan_clone.observe.flops import training_flops_per_token


def dense_flops_per_token(args: ModelArgs, *, build: BuildModel, seq_len: int, frozen_layers: int) -> float:
    """Returns the FLOPs of forward and backward for one token, where all parameters take part in each token.

    The first `frozen_layers` blocks run forward only, which is a third of their FLOPs.
    """
    sizes = _parameter_sizes(args, build)
    embedding = 0 if args.tied_embeddings else args.vocab_size * args.dim
    frozen_blocks = tuple(f"layers.{index}." for index in range(frozen_layers))
    frozen = sum(size for name, size in sizes.items() if name.startswith(frozen_blocks))

    def flops(matmul_parameters: int, n_layers: int) -> float:
        return training_flops_per_token(
            matmul_parameters=matmul_parameters,
            n_layers=n_layers,
            n_heads=args.n_heads,
            head_dim=args.head_dim,
            seq_len=seq_len,
        )

    total = flops(sum(sizes.values()) - embedding, args.n_layers)
    return total - flops(frozen, frozen_layers) * 2 / 3


@cache
def _parameter_sizes(args: ModelArgs, build: BuildModel) -> dict[str, int]:
    with torch.device("meta"):
        model: Decoder = build(args)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}
