"""Qwen3's arguments and blocks: heads of a given size, with norms of queries and keys. Source: arXiv 2505.09388."""

from dataclasses import dataclass

from torchtitan_clone.config.schema import Size
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import (
    Decoder,
    Epsilon,
    Heads,
    Hidden,
    ModelArgs,
    RopeTheta,
    TransformerBlock,
    Vocabulary,
    Width,
)
from torchtitan_clone.models.feed_forward import SwiGLU


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(ModelArgs):
    """Arguments of dense Qwen3."""

    head_dim: Width = 128  # pyright: ignore[reportIncompatibleMethodOverride], a field instead of a property
    hidden_dim: Hidden = 12288
    n_kv_heads: Heads | None = 8
    vocab_size: Vocabulary = 151936
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 1000000.0
    max_seq_len: Size = 40960

    @property
    def ffn_hidden_dim(self) -> int:
        return self.hidden_dim

    def violations(self) -> list[str]:
        found = super().violations()
        if self.head_dim % 2:
            found.append(f"model.args.head_dim = {self.head_dim} must be even, for rotary positions")
        return found


def build(args: Qwen3Args) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block)


def build_block(args: Qwen3Args, _layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention = Attention(
        dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim, qk_norm_eps=args.norm_eps
    )
    feed_forward = SwiGLU(dim=args.dim, hidden_dim=args.hidden_dim)
    return TransformerBlock(args, attention=attention, feed_forward=feed_forward)
