"""Qwen3's arguments and blocks: heads of a given size, with norms of queries and keys. Source: arXiv 2505.09388."""

from dataclasses import dataclass, field
from typing import ClassVar

from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import Decoder, ModelArgs, TransformerBlock
from torchtitan_clone.models.feed_forward import SwiGLU
from torchtitan_clone.models.moe import MoE, MoEArgs


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(ModelArgs):
    """Arguments of dense Qwen3."""

    head_dim: int = 128  # pyright: ignore[reportIncompatibleMethodOverride], a field instead of a property
    hidden_dim: int = 12288
    n_kv_heads: int | None = 8
    vocab_size: int = 151936
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    max_seq_len: int = 40960

    POSITIVE: ClassVar[tuple[str, ...]] = (*ModelArgs.POSITIVE, "n_heads", "head_dim", "hidden_dim")

    @property
    def ffn_hidden_dim(self) -> int:
        return self.hidden_dim

    def violations(self) -> list[str]:
        found = super().violations()
        if self.head_dim % 2:
            found.append(f"model.args.head_dim = {self.head_dim} must be even, for rotary positions")
        return found


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEArgs(Qwen3Args):
    """Arguments of Qwen3 with a mixture of experts in each layer; `hidden_dim` is unused, and kept for the hub."""

    n_kv_heads: int | None = 4
    moe: MoEArgs = field(default_factory=lambda: MoEArgs(num_experts=128, top_k=8, hidden_dim=768))

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts

    def violations(self) -> list[str]:
        return super().violations() + self.moe.violations(dim=self.dim)


def build(args: Qwen3Args) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block)


def build_block(args: Qwen3Args, _layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention = Attention(
        dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim, qk_norm_eps=args.norm_eps
    )
    is_moe = isinstance(args, Qwen3MoEArgs)
    feed_forward = MoE(args.moe, dim=args.dim) if is_moe else SwiGLU(dim=args.dim, hidden_dim=args.hidden_dim)
    return TransformerBlock(args, attention=attention, feed_forward=feed_forward)
