"""DeepSeek's arguments and blocks: latent attention, first layers dense, then experts. Source: arXiv 2412.19437."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torch import nn

from torchtitan_clone.config.schema_training import Range, Size
from torchtitan_clone.models.composed import DenseFirstArgs
from torchtitan_clone.models.composed import build as build_composed
from torchtitan_clone.models.decoder import (
    Decoder,
    Epsilon,
    Heads,
    Hidden,
    RopeTheta,
    TransformerBlock,
    Vocabulary,
    Width,
)
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.mla import QueryLatentArgs
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.plan import Styles, indexer_styles
from torchtitan_clone.models.sparse_latent import (
    INDEXER_KL,
    IndexedBlock,
    IndexedPredictionBlock,
    IndexSizes,
    SparseLatentAttention,
)

V3_ROUTER = MoEArgs(score_func="sigmoid", normalize_scores=True, expert_bias=True, group_score="sum of best two")
V2_ROUTER = MoEArgs(score_func="softmax", normalize_scores=False, expert_bias=False, group_score="best")
ROUTER = ("score_func", "normalize_scores", "expert_bias", "group_score")
"""Names of the arguments in which the routers of the two releases on the hub differ."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3Args(QueryLatentArgs, DenseFirstArgs):  # pyright: ignore[reportIncompatibleVariableOverride], a field
    """Arguments of DeepSeek V3, and of V2, whose router has softmax scores that are not normalized, and no bias."""

    dim: Width = 7168
    n_layers: Annotated[int, Range(1, 1024)] = 61
    n_heads: Heads = 128
    vocab_size: Vocabulary = 129280
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 10000.0
    max_seq_len: Size = 163840
    hidden_dim: Hidden = 18432
    n_dense_layers: Annotated[int, Range(0, 1024)] = 3

    def violations(self) -> list[str]:
        return super().violations() + self._router_violations()

    def _router_violations(self) -> list[str]:
        """The hub has a format for each of two routers only."""
        wanted = V3_ROUTER if self.moe.score_func == "sigmoid" else V2_ROUTER
        errors = [
            f"model.args.moe.{name} = {getattr(self.moe, name)!r}: must be {getattr(wanted, name)!r} with score_func "
            f"{self.moe.score_func!r}, as in the published models"
            for name in ROUTER
            if getattr(self.moe, name) != getattr(wanted, name)
        ]
        if not self.moe.num_shared_experts:
            errors.append("model.args.moe.num_shared_experts = 0: must be at least 1, as in the published models")
        return errors


@dataclass(frozen=True, kw_only=True)
class SparseDeepSeekArgs(DeepSeekV3Args):
    """Arguments of DeepSeek V3.2, and of GLM-5: V3 with attention to selected keys. Source: arXiv 2512.02556."""

    index_n_heads: Heads = 64
    index_head_dim: Width = 128
    index_topk: Annotated[int, Range(1, 2**24)] = 2048
    """Keys that a query attends to."""
    indexer_stage: Literal["warm-up", "sparse"] = "sparse"
    """"warm-up" trains the indexers only, while attention is to all keys; "sparse" all weights."""
    indexer_loss_weight: Annotated[float, Range(0.0, 1e6, above=True)] = 1.0
    """What the loss of the indexers is multiplied by; no other weights have gradients of it."""

    @property
    def is_warming_up(self) -> bool:
        return self.indexer_stage == "warm-up"

    @property
    def auxiliary(self) -> dict[str, float]:
        return {**super().auxiliary, INDEXER_KL: self.indexer_loss_weight}

    def layer_kinds(self) -> Sequence[LayerKind]:
        selected = self.max_seq_len if self.is_warming_up else self.index_topk
        dim = self.index_n_heads * self.index_head_dim
        return [replace(kind, selected=selected, index_dim=dim) for kind in super().layer_kinds()]

    def build_attention(self, layer: int) -> nn.Module:
        top_k = 0 if self.is_warming_up else self.index_topk
        return SparseLatentAttention(
            self.latent_sizes, dim=self.dim, n_heads=self.n_heads, score_scale=self.score_scale,
            index_sizes=IndexSizes(heads=self.index_n_heads, head_dim=self.index_head_dim, top_k=top_k),
        )  # fmt: skip

    def block_class(self, layer: int) -> type[TransformerBlock]:
        return IndexedPredictionBlock if layer >= self.n_layers else IndexedBlock

    def styles(self) -> Styles:
        return super().styles() | indexer_styles()

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.q_lora_rank == 0:
            errors.append("model.args.q_lora_rank = 0: indexers read the latent of queries; set its size")
        if self.index_head_dim < self.qk_rope_head_dim:
            rule = f"must be at least qk_rope_head_dim {self.qk_rope_head_dim}, which it rotates"
            errors.append(f"model.args.index_head_dim = {self.index_head_dim}: {rule}")
        return errors


def build_sparse(args: SparseDeepSeekArgs) -> Decoder:
    """Returns the model, of which only the indexers are trained in their warm-up."""
    model = build_composed(args)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not args.is_warming_up or ".indexer." in name)
    return model
