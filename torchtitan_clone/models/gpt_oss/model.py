"""gpt-oss's arguments and blocks: windows, attention sinks and experts with biases. Source: arXiv 2508.10925."""

from dataclasses import dataclass, field

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import (
    Decoder,
    Heads,
    Layers,
    RopeTheta,
    TransformerBlock,
    Vocabulary,
    Width,
)
from torchtitan_clone.models.heads import SizedHeads
from torchtitan_clone.models.moe import MoE, MoEArgs, MoEModelArgs
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.windowed import LayerType, Window, WindowedArgs

YARN = RopeScaling(rope_type="yarn", factor=32.0, original_max_seq_len=4096, truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssArgs(SizedHeads, WindowedArgs, MoEModelArgs):
    """Arguments of gpt-oss."""

    dim: Width = 2880
    n_layers: Layers = 36
    n_heads: Heads = 64
    n_kv_heads: Heads | None = 8
    head_dim: Width = 64  # pyright: ignore[reportIncompatibleMethodOverride], a field instead of a property
    vocab_size: Vocabulary = 201088
    rope_theta: RopeTheta = 150000.0
    rope_scaling: RopeScaling | None = YARN
    max_seq_len: Size = 131072
    layer_types: list[LayerType] = field(default_factory=lambda: ["window", "full"])
    window: Window = 128
    moe: MoEArgs = field(
        default_factory=lambda: MoEArgs(num_experts=128, top_k=4, hidden_dim=2880, biases=True, swiglu_limit=7.0)
    )

    def violations(self) -> list[str]:
        errors = super().violations()
        if not self.moe.biases or not self.moe.swiglu_limit:
            given = f"biases = {str(self.moe.biases).lower()}, swiglu_limit = {self.moe.swiglu_limit}"
            errors.append(f"model.args.moe: {given}: gpt_oss has both; set biases to true and swiglu_limit above 0")
        if shared := self.moe.num_shared_experts:
            errors.append(f"model.args.moe.num_shared_experts = {shared}: gpt_oss has none; set it to 0")
        return errors


def build(args: GptOssArgs) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block, auxiliary=args.moe.auxiliary)


def build_block(args: GptOssArgs, _layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention = Attention(
        dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim, bias=True, output_bias=True,
        sinks=True,
    )  # fmt: skip
    return TransformerBlock(args, attention=attention, feed_forward=MoE(args.moe, dim=args.dim))
