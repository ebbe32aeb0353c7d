"""The decoder of all families.

Legend: B batch, T tokens, D model, H head dim, V vocabulary, A auxiliary terms, K depths of multi-token prediction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, Self, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.config.checks import find_range_errors
from torchtitan_clone.config.schema_training import Range, Size
from torchtitan_clone.interfaces import FSDPGroup
from torchtitan_clone.models.attention import DocumentMask
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.rope import Positions, RopeArgs, RopeScaling, Rotary
from torchtitan_clone.ops.attention import AttentionMask, OnHost
from torchtitan_clone.ops.layers import Embedding, RMSNorm
from torchtitan_clone.torch_compat import persistent_buffers

LossFn = Callable[..., Tensor]
"""Maps hidden states [B, T, D], output weight [V, D] and targets [B, T] to the sum of the loss over the targets.

Batches with groups pass them too [B, T]; `later=True` comes with targets later than the next token.
"""

Width = Annotated[int, Range(1, 2**20)]
Layers = Annotated[int, Range(1, 1024)]
Heads = Annotated[int, Range(1, 2**16)]
Vocabulary = Annotated[int, Range(1, 2**24)]
Hidden = Annotated[int, Range(1, 2**24)]
Epsilon = Annotated[float, Range(0.0, 1.0)]
RopeTheta = Annotated[float, Range(1e-6, 1e30)]


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Arguments that families share; a family adds the sizes of its feed-forward, and may make `head_dim` a field."""

    dim: Width = 4096
    n_layers: Layers = 32
    n_heads: Heads = 32
    n_kv_heads: Heads | None = None
    vocab_size: Vocabulary = 128256
    norm_eps: Epsilon = 1e-5
    rope_theta: RopeTheta = 500000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: Size = 131072
    tied_embeddings: bool = False
    mup_base_dim: Annotated[int, Range(0, 2**20)] = 0
    """Width at which settings were tuned, of which those of `dim` follow by muP, see models/mup.py; 0: none do."""
    mup_base_head_dim: Annotated[int, Range(0, 2**20)] = 0
    """Size of the heads at that width; 0: that of the heads here."""
    has_mup: ClassVar[bool] = False
    learns_positions: ClassVar[bool] = False
    """Whether a vector for each of `max_seq_len` positions is added to the embeddings."""
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def num_experts(self) -> int:
        """Experts of each layer with a mixture of experts; 0 for a dense model."""
        return 0

    @property
    def experts_per_token(self) -> int:
        """Experts of each layer that process one token; 0 for a dense model."""
        return 0

    @property
    def mtp_depth(self) -> int:
        """Depths of multi-token prediction, whose layers follow the others; 0 without."""
        return 0

    @property
    def attention_dim(self) -> float:
        """Mean of the dimensions of a head's keys and values."""
        return self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def heads(self) -> dict[str, int]:
        """Numbers of heads that tensor parallelism shards, by argument."""
        return {"n_heads": self.n_heads, "n_kv_heads": self.kv_heads}

    def scales(self) -> tuple[float, float]:
        """Returns the factors of the embeddings, rounded to their dtype, and of the logits."""
        return 1.0, 1.0

    def rope_args(self) -> RopeArgs:
        """Returns the rotary positions of all features of a head."""
        return RopeArgs(dim=self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling)

    def layer_kinds(self) -> Sequence[LayerKind]:
        """Returns the kind of each layer; a family whose layers differ overrides it."""
        return [LayerKind(positions=self.rope_args())] * (self.n_layers + self.mtp_depth)

    def violations(self) -> list[str]:
        """Returns one sentence for each invalid value."""
        found = list(find_range_errors(self, at="model.args."))
        if self.mup_base_dim and not self.has_mup:
            rule = "muP is for llama3, qwen3 and qwen3_moe, whose widths it knows; set it to 0"
            found.append(f"model.args.mup_base_dim = {self.mup_base_dim}: {rule}")
        if self.kv_heads >= 1 and self.n_heads % self.kv_heads:
            problem = f"n_kv_heads {self.kv_heads} does not divide n_heads {self.n_heads}; set n_kv_heads to a divisor"
            found.append(f"model.args: {problem}")
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and self.rope_theta <= 1.0:
            found.append(
                f"model.args.rope_theta = {self.rope_theta}: must be above 1 with YaRN; set for example 10000.0"
            )
        return found


@runtime_checkable
class HasBuffers(Protocol):
    """A module whose buffers must be computed after construction on the meta device, on `device` or where they are."""

    def init_buffers(self, device: torch.device | None = None) -> None: ...


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection around it."""

    def __init__(self, args: ModelArgs, *, attention: nn.Module, feed_forward: nn.Module):
        super().__init__()
        self.attention_norm = args.norm_class(args.dim, eps=args.norm_eps)
        self.attention = attention
        self.ffn_norm = args.norm_class(args.dim, eps=args.norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self, x_BTD: Tensor, rope: Positions, mask: AttentionMask, is_context_BT: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns [B, T, D], and sums [A] of auxiliary terms where the feed-forward does, of context if it is given."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask)
        given = () if is_context_BT is None else (is_context_BT,)
        out = self.feed_forward(self.ffn_norm(x_BTD), *given)
        return x_BTD + out if isinstance(out, Tensor) else (x_BTD + out[0], out[1])


class OutputProjection(nn.Module):
    """Maps hidden states to logits, or directly to the loss, since FSDP frees the full weight after its forward."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        _, self.scale = args.scales()
        self.weight = nn.Parameter(torch.empty(args.vocab_size, args.dim))
        nn.init.normal_(self.weight, std=args.dim**-0.5)

    def forward(
        self, hidden_BTD: Tensor, targets_BT: Tensor | None = None, loss_fn: LossFn | None = None,
        later: Sequence[tuple[Tensor, Tensor]] = (), groups_BT: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns logits [B, T, V], or the loss; with hidden states and targets of `later` tokens losses [1 + K].

        `groups_BT` are those of the next tokens: losses of later ones are summed by no group.
        """
        if self.scale != 1.0:
            hidden_BTD, later = hidden_BTD * self.scale, [(hidden * self.scale, targets) for hidden, targets in later]
        if loss_fn is None or targets_BT is None:
            return F.linear(hidden_BTD, self.weight)
        groups = () if groups_BT is None else (groups_BT,)
        losses = [loss_fn(hidden_BTD, self.weight, targets_BT, *groups)]
        losses += [loss_fn(hidden, self.weight, targets, later=True) for hidden, targets in later]
        return torch.stack(losses) if later else losses[0]


class Decoder(nn.Module):
    """A decoder-only transformer, or a pipeline stage of it: an absent embedding, norm or output passes its input on.

    `auxiliary`: coefficients of loss terms by name; blocks return a sum over this rank's tokens for each, in order;
    tensor parallelism shards tokens too. Before them come the losses of the depths of multi-token prediction.
    """

    tok_embeddings: nn.Embedding | None
    norm: nn.Module | None
    output: OutputProjection | None

    def __init__(
        self,
        args: ModelArgs,
        *,
        build_block: Callable[[Any, int], nn.Module],
        auxiliary: Mapping[str, float] | None = None,
    ):
        super().__init__()
        self.args = args
        self.auxiliary: Mapping[str, float] = auxiliary or {}
        self.tok_embeddings = Embedding(args.vocab_size, args.dim, positions=args.max_seq_len * args.learns_positions)
        self.attention_mask = DocumentMask()
        self.layers = nn.ModuleDict({str(i): build_block(args, i) for i in range(args.n_layers + args.mtp_depth)})
        self.norm = args.norm_class(args.dim, eps=args.norm_eps)
        self.output = OutputProjection(args)
        if args.tied_embeddings:
            self.output.weight = cast("nn.Parameter", self.tok_embeddings.weight)
        # By number, which torch.compile can trace: the distinct settings, and those of each layer.
        kinds = args.layer_kinds()
        settings = list(dict.fromkeys(kind.positions for kind in kinds))
        self._limits = list(dict.fromkeys(kind.limits for kind in kinds))
        self._kinds = [(settings.index(kind.positions), self._limits.index(kind.limits)) for kind in kinds]
        self.rotary = nn.ModuleList(Rotary(setting) for setting in settings)
        if args.mup_base_dim:
            from torchtitan_clone.models.mup import scale_results

            scale_results(self, args)
        self.init_buffers()

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Sets buffers to initial values, in place or on `device`; persistent ones too, so call it before loading."""
        for module in self.modules():
            if module is not self and isinstance(module, HasBuffers):
                module.init_buffers(device)

    def forward(
        self,
        tokens_BT: Tensor,
        sums_A: Tensor | None = None,
        *,
        positions_BT: Tensor,
        documents_BT: OnHost | Tensor | None = None,
        targets_BT: Tensor | None = None,
        mtp_targets_BKT: Tensor | None = None,
        is_context_BKT: Tensor | None = None,
        groups_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns logits [B, T, V], or with `loss_fn` the loss, or with auxiliary terms [1 + A]: the loss, their sums.

        `documents_BT` numbers the documents of a row; None: attention is causal only. Those of a GPU cost a host sync.
        Without `mtp_targets_BKT` the layers of multi-token prediction do not run, and their terms are zero. Other
        stages than the last return hidden_BTD, or `(hidden_BTD, sums_A)`, which the next stage gets in place of the
        tokens; the embeddings of the tokens of each depth follow the hidden states: [B + K B, T, D].
        `is_context_BKT` says which tokens count in routers, of the layers and of each depth; None: all do. `groups_BT`
        is passed to the loss.
        """
        ropes = [rotary(positions_BT) for rotary in self.rotary]
        later_BKT = [] if mtp_targets_BKT is None else list(mtp_targets_BKT.unbind(1))
        h_BTD, *embedded = self._embed(tokens_BT, positions_BT, targets_BT, later_BKT)
        masks = [
            self.attention_mask(documents_BT, positions_BT, window=w, chunk=c, recurrent=recurrent, dtype=h_BTD.dtype)
            for w, c, recurrent in self._limits
        ]
        contexts = [(ropes[rope], masks[mask]) for rope, mask in self._kinds]
        if self.auxiliary and sums_A is None:
            sums_A = torch.zeros(len(self.auxiliary), device=h_BTD.device)
        is_context = [None] * (1 + len(embedded)) if is_context_BKT is None else is_context_BKT.unbind(1)
        for name in [name for name in self.layers if int(name) < self.args.n_layers]:
            h_BTD, sums_A = self._run_layer(name, h_BTD, *contexts[int(name)], is_context[0], sums_A=sums_A)
        h_BTD = self.norm(h_BTD) if self.norm is not None else h_BTD
        if self.output is None:
            h_BTD = torch.cat((h_BTD, *embedded)) if embedded else h_BTD
            return h_BTD if sums_A is None else (h_BTD, sums_A)
        states = [h_BTD]
        for depth, embedded_BTD in enumerate(embedded, start=1):
            index = self.args.n_layers + depth - 1
            inputs = (states[-1], *contexts[index], is_context[depth], embedded_BTD)
            h_BTD, sums_A = self._run_layer(str(index), *inputs, sums_A=sums_A)
            states.append(h_BTD)
        out = self.output(states[0], targets_BT, loss_fn, list(zip(states[1:], later_BKT, strict=True)), groups_BT)
        if loss_fn is None or sums_A is None:
            return out
        return torch.cat((out.view(-1), sums_A[len(embedded) :]))

    def _embed(
        self, tokens_BT: Tensor, positions_BT: Tensor, targets_BT: Tensor | None, later_BKT: list[Tensor]
    ) -> Sequence[Tensor]:
        """Returns the embeddings of the tokens and of those that each depth reads, or the same of the stage before."""
        if self.tok_embeddings is None:
            return tokens_BT.chunk(1 + len(later_BKT)) if later_BKT else [tokens_BT]
        tokens = tokens_BT
        if later_BKT:
            assert targets_BT is not None
            # In one call, for which FSDP gathers the weight. Where a document ends, token 0 stands for the next one:
            # what reads it has no target.
            tokens = torch.cat((tokens_BT, targets_BT, *later_BKT[:-1])).clamp_min(0)
        out = self.tok_embeddings(tokens, positions_BT=positions_BT)
        if (scale := self.args.scales()[0]) != 1.0:
            out = out * out.new_full((), scale)
        return out.chunk(1 + len(later_BKT)) if later_BKT else [out]

    def _run_layer(self, name: str, *inputs: object, sums_A: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the hidden states of a layer, and the sums with those of its terms added."""
        out = self.layers[name](*inputs)
        if isinstance(out, Tensor):
            return out, sums_A
        assert sums_A is not None
        return out[0], sums_A + F.pad(out[1], (len(sums_A) - len(out[1]), 0))

    @property
    def is_tied(self) -> bool:
        """Whether embedding and output projection are here and share one weight."""
        embedding, output = self.tok_embeddings, self.output
        return embedding is not None and output is not None and embedding.weight is output.weight

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Does what torch's does, and keeps embedding and output projection tied: leaving the meta device unties."""
        was_tied = self.is_tied
        super().to_empty(device=device, recurse=recurse)
        if was_tied and not self.is_tied and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = cast("nn.Parameter", self.tok_embeddings.weight)
        return self

    def keep_modules(self, names: Iterable[str]) -> None:
        """Removes the modules that are not among `names`; names of parameters do not change."""
        kept = set(names)
        for name in {"tok_embeddings", "norm", "output"} - kept:
            setattr(self, name, None)
        for name in list(self.layers):
            if f"layers.{name}" not in kept:
                del self.layers[name]

    def fsdp_groups(self) -> list[FSDPGroup]:
        """Returns the groups in which FSDP shards this model, in forward order; a shared weight is in one group."""
        ends = tuple(module for module in (self.norm, self.output) if module is not None)
        # Validation does not run the layers of multi-token prediction, so that nothing may prefetch their weights.
        blocks = {name: int(name) < self.args.n_layers for name in self.layers}
        groups = [FSDPGroup(modules=(self.layers[name],), is_block=is_block) for name, is_block in blocks.items()]
        if self.tok_embeddings is not None and self.is_tied:
            ends = (self.tok_embeddings, *ends)
        elif self.tok_embeddings is not None:
            groups.insert(0, FSDPGroup(modules=(self.tok_embeddings,), is_lookup=True))
        return [*groups, FSDPGroup(modules=ends, starts_backward=True)] if ends else groups


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name, in the order of the model; a tied weight comes once."""
    return dict(model.named_parameters()) | dict(persistent_buffers(model))
