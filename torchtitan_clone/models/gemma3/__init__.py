"""Gemma 3 (text) and its sizes: two more norms in a block, all zero-centered, and windows with a theta of their own.

Source: arXiv 2503.19786.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import AttentionOptions, DenseArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Epsilon, Heads, RopeTheta, TransformerBlock, Vocabulary, Width
from torchtitan_clone.models.heads import SizedHeads
from torchtitan_clone.models.plan import REPLICATED, Styles
from torchtitan_clone.models.rope import Positions, RopeArgs, RopeScaling
from torchtitan_clone.models.spec import ModelSpec, initial_std
from torchtitan_clone.models.windowed import LayerType, Window, WindowedArgs
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.layers import GeGLU, RMSNorm, ZeroCenteredRMSNorm


def _types(n_layers: int) -> list[LayerType]:
    return ["window" if (layer + 1) % 6 else "full" for layer in range(n_layers)]


@dataclass(frozen=True, kw_only=True)
class Gemma3Args(SizedHeads, DenseArgs, WindowedArgs):  # pyright: ignore[reportIncompatibleVariableOverride], as in Qwen3
    """Arguments of Gemma 3."""

    n_kv_heads: Heads | None = 4
    head_dim: Width = 256  # pyright: ignore[reportIncompatibleMethodOverride], a field instead of a property
    vocab_size: Vocabulary = 262208
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 1000000.0
    """Of full layers; the scaling is theirs too."""
    window_rope_theta: RopeTheta = 10000.0
    """Of layers with a window."""
    max_seq_len: Size = 131072
    tied_embeddings: bool = True
    layer_types: list[LayerType] = field(default_factory=lambda: _types(6))
    window: Window = 1024
    query_size: Width = 256
    """Scores are divided by its square root."""
    norm_class: ClassVar[type[RMSNorm]] = ZeroCenteredRMSNorm

    def scales(self) -> tuple[float, float]:
        return self.dim**0.5, 1.0

    def window_rope_args(self) -> RopeArgs:
        return RopeArgs(dim=self.head_dim, theta=self.window_rope_theta)

    def attention_options(self) -> AttentionOptions:
        return {"qk_norm_eps": self.norm_eps, "score_scale": (self.head_dim / self.query_size) ** 0.5}

    def build_feed_forward(self, layer: int) -> nn.Module:
        return GeGLU(dim=self.dim, hidden_dim=self.hidden_dim)

    def block_class(self, layer: int) -> type[TransformerBlock]:
        return SandwichBlock

    def styles(self) -> Styles:
        norms = ("post_attention_norm", "post_ffn_norm")
        return super().styles() | {f"layers.*.{name}": REPLICATED for name in norms}


class SandwichBlock(TransformerBlock):
    """A block with norms before and after attention and feed-forward."""

    def __init__(self, args: Gemma3Args, *, attention: nn.Module, feed_forward: nn.Module):
        super().__init__(args, attention=attention, feed_forward=feed_forward)
        self.post_attention_norm = args.norm_class(args.dim, eps=args.norm_eps)
        self.post_ffn_norm = args.norm_class(args.dim, eps=args.norm_eps)

    def forward(
        self, x_BTD: Tensor, rope: Positions, mask: AttentionMask, is_context_BT: Tensor | None = None
    ) -> Tensor:
        """Returns [B, T, D]; there is no router that would ask for context."""
        x_BTD = x_BTD + self.post_attention_norm(self.attention(self.attention_norm(x_BTD), rope, mask))
        return x_BTD + self.post_ffn_norm(self.feed_forward(self.ffn_norm(x_BTD)))


def _initial_std(args: Gemma3Args, name: str) -> float | None:
    return 0.0 if "norm" in name else initial_std(args, name)


def _small(dim: int, n_layers: int, hidden_dim: int) -> Gemma3Args:
    return Gemma3Args(
        dim=dim, n_layers=n_layers, n_heads=4, n_kv_heads=1, hidden_dim=hidden_dim, vocab_size=262144,
        max_seq_len=32768, layer_types=_types(n_layers), window=512,
    )  # fmt: skip


_LINEAR = RopeScaling(rope_type="linear", factor=8.0)

FLAVORS = {
    # The shipped tokenizer's vocabulary, and windows shorter than rows; learns on two CPU cores.
    "debugmodel": Gemma3Args(
        dim=256, n_layers=6, n_heads=8, head_dim=64, hidden_dim=768, vocab_size=2048, max_seq_len=8192, window=128,
        query_size=64,
    ),
    "270M": _small(640, 18, 2048),
    "1B": _small(1152, 26, 6912),
    "4B": Gemma3Args(
        dim=2560, n_layers=34, n_heads=8, hidden_dim=10240, layer_types=_types(34), rope_scaling=_LINEAR
    ),
    "12B": Gemma3Args(dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, hidden_dim=15360, rope_scaling=_LINEAR),
    "27B": Gemma3Args(
        dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128, hidden_dim=21504, layer_types=_types(62),
        rope_scaling=_LINEAR, query_size=168,
    ),
}  # fmt: skip

SPEC = ModelSpec(
    name="gemma3",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.gemma3.hf:HUB",
    initial_std=_initial_std,
)
