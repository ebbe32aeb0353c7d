"""Qwen3's arguments and blocks: heads of a given size, with norms of queries and keys. Source: arXiv 2505.09388."""

from dataclasses import dataclass, field
from typing import ClassVar

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import (
    Decoder,
    Epsilon,
    Heads,
    Hidden,
    RopeTheta,
    TransformerBlock,
    Vocabulary,
)
from torchtitan_clone.models.heads import SizedHeads
from torchtitan_clone.models.moe import MoE, MoEArgs, MoEModelArgs
from torchtitan_clone.ops.layers import SwiGLU


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(SizedHeads):
    """Arguments of dense Qwen3."""

    has_mup: ClassVar[bool] = True
    hidden_dim: Hidden = 12288
    n_kv_heads: Heads | None = 8
    vocab_size: Vocabulary = 151936
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 1000000.0
    max_seq_len: Size = 40960


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEArgs(Qwen3Args, MoEModelArgs):  # pyright: ignore[reportIncompatibleVariableOverride], head_dim is a field
    """Arguments of Qwen3 with a mixture of experts in each layer; `hidden_dim` is unused, and kept for the hub."""

    n_kv_heads: Heads | None = 4
    moe: MoEArgs = field(default_factory=lambda: MoEArgs(num_experts=128, top_k=8, hidden_dim=768))


def build(args: Qwen3Args) -> Decoder:
    """Returns the model."""
    auxiliary = args.moe.auxiliary if isinstance(args, Qwen3MoEArgs) else None
    return Decoder(args, build_block=build_block, auxiliary=auxiliary)


def build_block(args: Qwen3Args, _layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention = Attention(
        dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim, qk_norm_eps=args.norm_eps
    )
    is_moe = isinstance(args, Qwen3MoEArgs)
    feed_forward = MoE(args.moe, dim=args.dim) if is_moe else SwiGLU(dim=args.dim, hidden_dim=args.hidden_dim)
    return TransformerBlock(args, attention=attention, feed_forward=feed_forward)
