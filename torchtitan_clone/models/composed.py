"""Families whose blocks are composed of parts that exist: their arguments say how these differ from Llama's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypedDict

from torch import Tensor, nn

from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.interfaces import TensorPlan
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import Decoder, Hidden, ModelArgs, TransformerBlock
from torchtitan_clone.models.moe import MoE, MoEModelArgs
from torchtitan_clone.models.mtp import PredictingModelArgs, PredictionBlock
from torchtitan_clone.models.plan import (
    Styles,
    decoder_styles,
    heads_norm_styles,
    moe_styles,
    prediction_styles,
    qk_norm_styles,
)
from torchtitan_clone.models.rope import Positions
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.layers import SwiGLU


class AttentionOptions(TypedDict, total=False):
    """Arguments of `Attention` besides its sizes."""

    qk_norm_eps: float | None
    norm_all_heads: bool
    bias: bool
    output_bias: bool
    score_scale: float


class PostNormBlock(TransformerBlock):
    """Attention and feed-forward, each with a norm after it and a residual connection around both."""

    def forward(
        self, x_BTD: Tensor, rope: Positions, mask: AttentionMask, is_context_BT: Tensor | None = None
    ) -> Tensor:
        """Returns [B, T, D]; there is no router that would ask for context."""
        x_BTD = x_BTD + self.attention_norm(self.attention(x_BTD, rope, mask))
        return x_BTD + self.ffn_norm(self.feed_forward(x_BTD))


@dataclass(frozen=True, kw_only=True)
class ComposedArgs(ModelArgs):
    """Arguments of a composed family, which overrides the methods in which it differs from Llama."""

    @property
    def auxiliary(self) -> Mapping[str, float]:
        """Coefficients of the terms that the loss of the next token is added to, by name."""
        return {}

    def attention_options(self) -> AttentionOptions:
        """Returns the arguments of attention besides its sizes."""
        return {}

    def build_attention(self, layer: int) -> nn.Module:
        """Returns the attention of a layer."""
        return Attention(
            dim=self.dim, n_heads=self.n_heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            norm_class=self.norm_class, **self.attention_options(),
        )  # fmt: skip

    def build_feed_forward(self, layer: int) -> nn.Module:
        """Returns the feed-forward of a layer."""
        raise NotImplementedError

    def block_class(self, layer: int) -> type[TransformerBlock]:
        """Returns the class of a layer's block of attention and feed-forward."""
        return TransformerBlock

    def styles(self) -> Styles:
        """Returns the tensor-parallel styles by module name, without those of norms that attention_options() has."""
        return decoder_styles()


@dataclass(frozen=True, kw_only=True)
class DenseArgs(ComposedArgs):
    """Arguments of a composed family without experts."""

    hidden_dim: Hidden = 11008

    def build_feed_forward(self, layer: int) -> nn.Module:
        return SwiGLU(dim=self.dim, hidden_dim=self.hidden_dim)


@dataclass(frozen=True, kw_only=True)
class ExpertsArgs(MoEModelArgs, ComposedArgs):
    """Arguments of a composed family with experts in each layer."""

    @property
    def auxiliary(self) -> Mapping[str, float]:
        return self.moe.auxiliary

    def build_feed_forward(self, layer: int) -> nn.Module:
        return MoE(self.moe, dim=self.dim)

    def styles(self) -> Styles:
        return moe_styles(self.moe)


@dataclass(frozen=True, kw_only=True)
class DenseThenExpertsArgs(ExpertsArgs):
    """Arguments of a composed family with dense layers first, then experts."""

    hidden_dim: Hidden = 11008
    """Hidden size of the dense layers."""
    n_dense_layers: Annotated[int, Range(0, 1024)] = 1
    """First layers without experts."""

    def build_feed_forward(self, layer: int) -> nn.Module:
        is_dense = layer < self.n_dense_layers
        return SwiGLU(dim=self.dim, hidden_dim=self.hidden_dim) if is_dense else super().build_feed_forward(layer)

    def styles(self) -> Styles:
        return moe_styles(self.moe, dense_layers=range(self.n_dense_layers))

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.n_dense_layers >= self.n_layers:
            rule = f"must be below n_layers {self.n_layers}, so that a layer has experts"
            errors.append(f"model.args.n_dense_layers = {self.n_dense_layers}: {rule}")
        return errors


@dataclass(frozen=True, kw_only=True)
class DenseFirstArgs(PredictingModelArgs, DenseThenExpertsArgs):  # pyright: ignore[reportIncompatibleVariableOverride], a field
    """Arguments of a composed family with dense layers first, then experts, and layers that predict later tokens."""

    def block_class(self, layer: int) -> type[TransformerBlock]:
        return PredictionBlock if layer >= self.n_layers else super().block_class(layer)

    def styles(self) -> Styles:
        return super().styles() | (prediction_styles() if self.mtp_depth else {})


def build(args: ComposedArgs) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block, auxiliary=args.auxiliary)


def build_block(args: ComposedArgs, layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention, feed_forward = args.build_attention(layer), args.build_feed_forward(layer)
    return args.block_class(layer)(args, attention=attention, feed_forward=feed_forward)


def tensor_plan(args: ComposedArgs) -> TensorPlan:
    """Returns the plan of a composed decoder."""
    options, styles = args.attention_options(), args.styles()
    if options.get("qk_norm_eps") is not None:
        styles |= heads_norm_styles() if options.get("norm_all_heads") else qk_norm_styles()
    return TensorPlan(styles=styles)
