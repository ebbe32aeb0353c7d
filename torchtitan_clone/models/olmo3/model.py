"""OLMo 2 and 3: norms after attention and feed-forward, and of queries and keys over all heads.

Source: arXiv 2501.00656 (OLMo 2); OLMo 3 adds windows.
"""

from dataclasses import dataclass, field

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.composed import PostNormBlock
from torchtitan_clone.models.decoder import Decoder, Epsilon, Hidden, Vocabulary
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.models.rope import RopeArgs
from torchtitan_clone.models.windowed import LayerType, WindowedArgs
from torchtitan_clone.ops.layers import SwiGLU


@dataclass(frozen=True, kw_only=True)
class Olmo2Args(DividedHeads):
    """Arguments of OLMo 2."""

    hidden_dim: Hidden = 11008
    vocab_size: Vocabulary = 100352
    norm_eps: Epsilon = 1e-6
    max_seq_len: Size = 4096


@dataclass(frozen=True, kw_only=True)
class Olmo3Args(Olmo2Args, WindowedArgs):
    """Arguments of OLMo 3: three layers with windows, whose rotary positions are not scaled, and a full one."""

    vocab_size: Vocabulary = 100278
    max_seq_len: Size = 65536
    layer_types: list[LayerType] = field(default_factory=lambda: ["window", "window", "window", "full"])

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and not self.rope_scaling.truncate:
            rule = "transformers does not read it in a config.json of olmo3"
            errors.append(f"model.args.rope_scaling.truncate = false: {rule}; set it to true")
        return errors

    def window_rope_args(self) -> RopeArgs:
        return RopeArgs(dim=self.head_dim, theta=self.rope_theta)


def build(args: Olmo2Args) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block)


def build_block(args: Olmo2Args, _layer: int) -> PostNormBlock:
    """Returns the block of a layer."""
    attention = Attention(
        dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
        qk_norm_eps=args.norm_eps, norm_all_heads=True,
    )  # fmt: skip
    return PostNormBlock(args, attention=attention, feed_forward=SwiGLU(dim=args.dim, hidden_dim=args.hidden_dim))
