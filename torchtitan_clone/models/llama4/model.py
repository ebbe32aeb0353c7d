"""Llama 4's arguments and blocks (text): chunks, layers without rotary positions, and scores that multiply inputs.

Source: https://ai.meta.com/blog/llama-4-multimodal-intelligence; temperature of attention, arXiv 2501.19399.
"""

from dataclasses import dataclass
from typing import Annotated

from torchtitan_clone.config.schema_training import Range, Size
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import (
    Decoder,
    Heads,
    Hidden,
    Layers,
    TransformerBlock,
    Vocabulary,
    Width,
)
from torchtitan_clone.models.heads import SizedHeads
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.moe import MoE, MoEArgs, MoEModelArgs
from torchtitan_clone.models.rope import QueryScale
from torchtitan_clone.ops.layers import SwiGLU

ROUTER = MoEArgs(score_func="sigmoid", normalize_scores=False, score_inputs=True, num_shared_experts=1)
FIXED = (
    "score_func", "normalize_scores", "score_inputs", "num_shared_experts", "score_scale", "num_groups", "expert_bias",
)  # fmt: skip
"""Arguments that are equal in all releases, and that config.json of the hub has no entries for."""


@dataclass(frozen=True, kw_only=True)
class Llama4Args(SizedHeads, MoEModelArgs):  # pyright: ignore[reportIncompatibleVariableOverride], head_dim is a field
    """Arguments of Llama 4."""

    dim: Width = 5120
    n_layers: Layers = 48
    n_heads: Heads = 40
    n_kv_heads: Heads | None = 8
    hidden_dim: Hidden = 16384
    """Hidden size of layers without experts."""
    vocab_size: Vocabulary = 202048
    moe_every: Layers = 1
    """Every layer of this number has experts: 2 stands for the second, the fourth and so on."""
    full_every: Layers = 4
    """Every layer of this number attends to all tokens, without rotary positions; the others attend within chunks."""
    chunk: Size = 8192
    qk_norm: bool = True
    """Whether queries and keys are normalized in layers with rotary positions."""
    query_scale: Annotated[float, Range(0.0, 1e6)] = 0.1
    """How queries of layers without rotary positions grow with the position, see QueryScale; 0: not at all."""
    query_scale_floor: Size = 8192

    def is_full(self, layer: int) -> bool:
        """Returns whether a layer attends to all tokens, without rotary positions."""
        return (layer + 1) % self.full_every == 0

    def has_experts(self, layer: int) -> bool:
        return (layer + 1) % self.moe_every == 0

    def layer_kinds(self) -> list[LayerKind]:
        scale = QueryScale(scale=self.query_scale, floor=self.query_scale_floor) if self.query_scale else None
        full = LayerKind(positions=scale)
        chunked = LayerKind(positions=self.rope_args(), chunk=self.chunk)
        return [full if self.is_full(layer) else chunked for layer in range(self.n_layers)]

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.moe_every > self.n_layers:
            errors.append(f"model.args.moe_every = {self.moe_every}: must be at most n_layers {self.n_layers}")
        return errors + [
            f"model.args.moe.{name} = {getattr(self.moe, name)!r}: must be {getattr(ROUTER, name)!r}, as in all "
            "releases of Llama 4"
            for name in FIXED
            if getattr(self.moe, name) != getattr(ROUTER, name)
        ]


def build(args: Llama4Args) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block, auxiliary=args.moe.auxiliary)


def build_block(args: Llama4Args, layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention = Attention(
        dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
        rotated_norm_eps=args.norm_eps if args.qk_norm and not args.is_full(layer) else None,
    )  # fmt: skip
    is_moe = args.has_experts(layer)
    feed_forward = MoE(args.moe, dim=args.dim) if is_moe else SwiGLU(dim=args.dim, hidden_dim=args.hidden_dim)
    return TransformerBlock(args, attention=attention, feed_forward=feed_forward)
