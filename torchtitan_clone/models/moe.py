"""Mixture of experts: every token is processed by the few experts that a router chooses for it. No token is dropped.

Source: arXiv 1701.06538; top-k of sigmoid scores in groups, and scores without auxiliary loss, arXiv 2412.19437.
Legend: B batch, T tokens, N tokens of all rows, D model, F hidden, E experts, K experts of a token, G groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchtitan_clone.config.checks import find_range_errors
from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.interfaces import RowShards, TokenExchange
from torchtitan_clone.models.balancing import (
    BATCH,
    SEQUENCE,
    ExpertLoads,
    TokenCounter,
    Z,
    auxiliary_sums,
    count_experts,
)
from torchtitan_clone.models.decoder import Hidden, ModelArgs
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad, share_of_sum
from torchtitan_clone.ops.grouped_mm import grouped_mm, rows_of_groups
from torchtitan_clone.ops.layers import SwiGLU, TokenLinear
from torchtitan_clone.ops.permutation import Permute, inverse
from torchtitan_clone.ops.weight_use import LAST, MATRIX, REPLICATED, VECTOR, WeightUses

NumExperts = Annotated[int, Range(1, 2**16)]
Coefficient = Annotated[float, Range(0.0, 1e6)]


@dataclass(frozen=True, kw_only=True)
class MoEArgs:
    """Arguments of the mixture of experts in each layer."""

    num_experts: NumExperts = 8
    top_k: NumExperts = 2
    hidden_dim: Hidden = 768
    """Hidden size of an expert."""
    num_shared_experts: Annotated[int, Range(0, 4096)] = 0
    """Size of the feed-forward that every token passes, in experts."""
    shared_gate: bool = False
    """Whether the results of shared experts are multiplied by sigmoid(w x), one number for each token."""
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    normalize_scores: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    score_scale: Annotated[float, Range(0.0, 1000.0, above=True)] = 1.0
    score_inputs: bool = False
    """Whether scores multiply what experts get, instead of what they return."""
    num_groups: NumExperts = 1
    """Groups that the experts are divided into; a token chooses experts of `top_groups` of them only."""
    top_groups: NumExperts = 1
    group_score: Literal["sum of best two", "best"] = "sum of best two"
    """By which scores of its experts a group is chosen."""
    expert_bias: bool = False
    """Add a bias to the scores for choosing experts only, and after each step adapt it to their load."""
    bias_update_rate: Annotated[float, Range(0.0, 1.0)] = 1e-3
    """What a step adds to the bias of an expert with less than the mean load, and takes from one with more."""
    biases: bool = False
    """Whether the router and the products of experts have biases."""
    swiglu_limit: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Largest size of what the products give to the activation, which then is gpt-oss's; 0: SwiGLU without limit."""
    batch_balance: Coefficient = 0.0
    """Coefficient of the batch-wise auxiliary loss; see balancing.auxiliary_sums() for this and the next two."""
    sequence_balance: Coefficient = 0.0
    router_z: Coefficient = 0.0

    @property
    def auxiliary(self) -> dict[str, float]:
        """Coefficients of the auxiliary losses in use, by name."""
        terms = {BATCH: self.batch_balance, SEQUENCE: self.sequence_balance, Z: self.router_z}
        return {name: coefficient for name, coefficient in terms.items() if coefficient}

    def violations(self, *, dim: int) -> list[str]:
        """Returns one sentence for each value that is invalid in a model of that dimension."""
        where = "model.args.moe"
        if any(find_range_errors(self, at="")):  # the model's arguments report them
            return []
        if self.shared_gate and not self.num_shared_experts:
            return [f"{where}.shared_gate = true: needs shared experts; set num_shared_experts to 1 or more"]
        if self.num_experts % self.num_groups:
            rule = "must divide num_experts; set a divisor"
            return [f"{where}.num_groups = {self.num_groups}: {rule} of {self.num_experts}"]
        if self.top_groups > self.num_groups:
            return [f"{where}.top_groups = {self.top_groups}: must be at most num_groups {self.num_groups}"]
        available = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > available:
            return [f"{where}.top_k = {self.top_k}: must be at most {available}, the experts that a token may choose"]
        rule = "must be a multiple of 8, because grouped products need rows of a multiple of 16 bytes"
        sizes = {f"{where}.hidden_dim": self.hidden_dim, "model.args.dim": dim}
        return [f"{name} = {size}: {rule}" for name, size in sizes.items() if size % 8]


@dataclass(frozen=True, kw_only=True)
class MoEModelArgs(ModelArgs):
    """Arguments of a model with a mixture of experts; a base after those that have other defaults."""

    moe: MoEArgs = field(default_factory=MoEArgs)

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts

    @property
    def experts_per_token(self) -> int:
        return self.moe.top_k

    def violations(self) -> list[str]:
        return super().violations() + self.moe.violations(dim=self.dim)


class Router(nn.Module):
    """Chooses K experts for each token and computes their scores, in fp32 in every mixed precision.

    `counts_E` are the tokens of this rank that were trained by expert. With `is_forced` tokens take experts in turn.
    Tokens that are no context of a target are not counted, and add nothing to auxiliary losses.
    """

    WEIGHT_USES: ClassVar[WeightUses] = {"weight": REPLICATED}
    expert_bias: Tensor | None
    expert_load: Tensor | None
    counts_E: Tensor

    def __init__(self, args: MoEArgs, *, dim: int):
        super().__init__()
        self.args = args
        self.bias_update_rate = args.bias_update_rate
        self.is_forced = False
        self.rows: RowShards | None = None
        self.weight = nn.Parameter(torch.empty(args.num_experts, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(args.num_experts)) if args.biases else None
        self.register_buffer("expert_bias", torch.empty(args.num_experts) if args.expert_bias else None)
        self.register_buffer("expert_load", torch.empty(args.num_experts) if args.batch_balance else None)
        self.register_buffer("counts_E", torch.empty(args.num_experts, dtype=torch.int64), persistent=False)
        self.init_buffers()

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Sets bias and counts to zero and the load to balanced; in fp32, also where the model has another type."""
        device = device or self.counts_E.device
        size = self.args.num_experts
        self.counts_E = torch.zeros(size, dtype=torch.int64, device=device)
        if self.expert_bias is not None:
            self.expert_bias = torch.zeros(size, dtype=torch.float32, device=device)
        if self.expert_load is not None:
            self.expert_load = torch.ones(size, dtype=torch.float32, device=device)

    def forward(self, x_BTD: Tensor, is_context_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns scores [B, T, K] of the chosen experts, fp32, their numbers, and auxiliary sums [A] or None.

        `is_context_BT` says which tokens are context of a target; None: all.
        """
        args = self.args
        bias_E = None if self.bias is None else local_with_partial_grad(self.bias).float()
        logits_BTE = F.linear(x_BTD.float(), local_with_partial_grad(self.weight).float(), bias_E)
        scores_BTE = logits_BTE.softmax(dim=-1) if args.score_func == "softmax" else logits_BTE.sigmoid()
        # Scores saturate, so that different logits have equal ones; a bias and groups need scores.
        by_logits = self.expert_bias is None and args.num_groups == 1
        ranked_BTE = (logits_BTE if by_logits else scores_BTE).detach()
        experts_BTK = self._in_turn(ranked_BTE) if self.is_forced else self._choose(ranked_BTE)
        scores_BTK = scores_BTE.gather(-1, experts_BTK)
        if torch.is_grad_enabled():
            scores_BTK = cast("Tensor", TokenCounter.apply(scores_BTK, experts_BTK, is_context_BT, self.counts_E))
        if args.normalize_scores:
            scores_BTK = scores_BTK / (scores_BTK.sum(dim=-1, keepdim=True) + 1e-20)
        sums_A = auxiliary_sums(
            logits_BTE, scores_BTE, experts_BTK, is_context_BT, terms=list(args.auxiliary), load_E=self.expert_load,
            rows=self.rows,
        )  # fmt: skip
        return scores_BTK * args.score_scale, experts_BTK, sums_A

    def _choose(self, scores_BTE: Tensor) -> Tensor:
        """Returns the experts [B, T, K] with the largest scores, biased and in the best groups."""
        scores_BTE = scores_BTE if self.expert_bias is None else scores_BTE + self.expert_bias
        scores_NE = _masked_to_groups(scores_BTE.flatten(0, 1), self.args)
        return scores_NE.topk(self.args.top_k, dim=-1).indices.unflatten(0, scores_BTE.shape[:2])

    def _in_turn(self, scores_BTE: Tensor) -> Tensor:
        """Returns experts [B, T, K] by the index of each token in its row, so that every mesh has the same."""
        rows, count, experts = scores_BTE.shape
        tokens_T = torch.arange(count) if self.rows is None else self.rows.indices(count)
        slots_TK = tokens_T[:, None] * self.args.top_k + torch.arange(self.args.top_k)
        return (slots_TK % experts).to(scores_BTE.device).expand(rows, -1, -1)


def build_loads(modules: Mapping[str, nn.Module], *, parameters: Mapping[str, Tensor]) -> ExpertLoads:
    """Returns the tokens by expert of all routers, given the modules of this rank and the parameters of all ranks."""
    suffix = ".router.weight"
    sizes = {name.removesuffix(".weight"): len(weight) for name, weight in parameters.items() if name.endswith(suffix)}
    routers = {name: module for name, module in modules.items() if isinstance(module, Router)}
    return ExpertLoads(routers=routers, sizes=sizes)


def force_load_balance(model: nn.Module) -> None:
    """Lets the tokens of each row take the experts in turn, whatever their scores: for benchmarks and debugging."""
    for module in model.modules():
        if isinstance(module, Router):
            module.is_forced = True


def _masked_to_groups(scores_NE: Tensor, args: MoEArgs) -> Tensor:
    """Hides the experts outside of each token's best groups."""
    if args.num_groups == 1:
        return scores_NE
    scores_NGe = scores_NE.unflatten(1, (args.num_groups, -1))
    count = min(2 if args.group_score == "sum of best two" else 1, scores_NGe.shape[2])
    best_NG = scores_NGe.topk(count, dim=-1).values.sum(dim=-1)
    hidden_NG = torch.ones_like(best_NG, dtype=torch.bool)
    hidden_NG.scatter_(1, best_NG.topk(args.top_groups, dim=-1).indices, False)
    return scores_NGe.masked_fill(hidden_NG[..., None], -torch.inf).flatten(1)


class Experts(nn.Module):
    """SwiGLU of E experts: w2(silu(w1 x) * w3 x). The weights of all are stacked, [E, F, D] and for w2 [E, D, F].

    Biases of w1 and w3 are [E, F], of w2 [E, D].
    """

    WEIGHT_USES: ClassVar[WeightUses] = {
        # The result, its activation or the product of both; of w2 the rows before and after the exchange too.
        "w1": MATRIX.of_experts(saved=2.0), "w3": MATRIX.of_experts(saved=2.0), "w2": LAST.of_experts(saved=4.0),
        **dict.fromkeys(("w1_bias", "w2_bias", "w3_bias"), VECTOR.of_experts()),
    }  # fmt: skip

    def __init__(self, args: MoEArgs, *, dim: int):
        super().__init__()
        count, hidden_dim = args.num_experts, args.hidden_dim
        self.num_experts = count
        self.limit = args.swiglu_limit
        self.score_inputs = args.score_inputs
        self.exchange: TokenExchange | None = None
        self.w1 = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(count, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(count, hidden_dim, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        self.w1_bias = nn.Parameter(torch.zeros(count, hidden_dim)) if args.biases else None
        self.w2_bias = nn.Parameter(torch.zeros(count, dim)) if args.biases else None
        self.w3_bias = nn.Parameter(torch.zeros(count, hidden_dim)) if args.biases else None

    def forward(self, x_BTD: Tensor, scores_BTK: Tensor, experts_BTK: Tensor) -> Tensor:
        """Returns [B, T, D]: the sum of the results of each token's experts, times their scores."""
        experts_NK = experts_BTK.flatten(0, 1)
        rows, counts_E, positions_NK = dispatch(x_BTD.flatten(0, 1), experts_NK, num_experts=self.num_experts)
        scores_NK = scores_BTK.flatten(0, 1)
        if self.score_inputs:
            scores = Permute.apply(scores_NK.flatten(), inverse(positions_NK.flatten()))
            rows, scores_NK = (rows * scores[:, None]).to(rows.dtype), torch.ones_like(scores_NK)
        if self.exchange is None:
            results = self._by_expert(rows, counts_E)
        else:
            received, counts_E, route = self.exchange.send(rows, counts_E)
            results = self.exchange.send_back(self._by_expert(received, counts_E), route)
        return combine(results, scores_NK, positions_NK).unflatten(0, x_BTD.shape[:2])

    def _by_expert(self, rows: Tensor, counts_E: Tensor) -> Tensor:
        """Returns the results of rows that are sorted by expert, `counts_E` of each."""
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        gate = self._product(rows, self.w1, self.w1_bias, ends_E)
        up = self._product(rows, self.w3, self.w3_bias, ends_E)
        return self._product(self.activate(gate, up), self.w2, self.w2_bias, ends_E)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns the activation of what w1 and w3 return."""
        return clamped_swiglu(gate, up, limit=self.limit) if self.limit else F.silu(gate) * up

    @staticmethod
    def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, ends_E: Tensor) -> Tensor:
        out = grouped_mm(rows, local_with_partial_grad(weight), ends_E)
        if bias is None:
            return out
        # In float32: backward adds the gradient of one row after another, of which bfloat16 loses most.
        return out + rows_of_groups(share_of_sum(bias).float(), ends_E, num_rows=len(rows)).type_as(out)


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float, alpha: float = 1.702) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha gate), of values up to `limit`. Source: arXiv 2508.10925."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


class MoE(nn.Module):
    """A feed-forward layer of experts, chosen by a router, and of shared experts that process every token."""

    WEIGHT_USES: ClassVar[WeightUses] = {"shared_gate.weight": REPLICATED}

    def __init__(self, args: MoEArgs, *, dim: int):
        super().__init__()
        self.router = Router(args, dim=dim)
        self.experts = Experts(args, dim=dim)
        shared = args.num_shared_experts * args.hidden_dim
        self.shared_experts = SwiGLU(dim=dim, hidden_dim=shared) if shared else None
        self.shared_gate = TokenLinear(dim, 1, bias=False) if args.shared_gate else None

    def forward(self, x_BTD: Tensor, is_context_BT: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Returns [B, T, D], and with auxiliary losses the sums [A] of their terms."""
        scores_BTK, experts_BTK, sums_A = self.router(x_BTD, is_context_BT)
        out_BTD = self.experts(x_BTD, scores_BTK, experts_BTK)
        if self.shared_experts is not None:
            shared_BTD = self.shared_experts(x_BTD)
            gate_BT1 = None if self.shared_gate is None else self.shared_gate(x_BTD).sigmoid()
            out_BTD = out_BTD + (shared_BTD if gate_BT1 is None else shared_BTD * gate_BT1)
        return out_BTD if sums_A is None else (out_BTD, sums_A)


def dispatch(x_ND: Tensor, experts_NK: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows [N * K, D] sorted by expert and within by token, their counts [E], and their positions [N, K]."""
    order = experts_NK.flatten().argsort(stable=True)
    counts_E = count_experts(experts_NK.flatten(), num_experts=num_experts)
    positions_NK = inverse(order).view_as(experts_NK)
    return _Dispatch.apply(x_ND, order, positions_NK), counts_E, positions_NK


def combine(rows: Tensor, scores_NK: Tensor, positions_NK: Tensor) -> Tensor:
    """Returns [N, D]: the rows of each token, at `positions_NK`, times their scores and summed in the order of K."""
    return cast("Tensor", _Combine.apply(rows, scores_NK, positions_NK))


class _Combine(torch.autograd.Function):
    """In the type of the scores. A part of the tokens and one of their experts at a time: temporaries stay small."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, scores_NK: Tensor, positions_NK: Tensor) -> Tensor:
        ctx.save_for_backward(rows, scores_NK, positions_NK)
        out_ND = rows.new_empty((len(scores_NK), rows.shape[1]))
        size = _part_size(scores_NK)
        parts = zip(out_ND.split(size), scores_NK.split(size), positions_NK.split(size), strict=True)
        for out, scores, positions in parts:
            total = rows[positions[:, 0]] * scores[:, :1]
            for k in range(1, scores.shape[1]):
                total.addcmul_(rows[positions[:, k]], scores[:, k : k + 1])
            out.copy_(total)
        return out_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        rows, scores_NK, positions_NK = ctx.saved_tensors
        grad_rows, grad_scores_NK = torch.empty_like(rows), torch.empty_like(scores_NK)
        size = _part_size(scores_NK)
        tensors = (grads[0], scores_NK, positions_NK, grad_scores_NK)
        for grad, scores, positions, grad_scores in zip(*(each.split(size) for each in tensors), strict=True):
            grad = grad.to(scores.dtype)
            for k in range(scores.shape[1]):
                grad_rows[positions[:, k]] = (grad * scores[:, k : k + 1]).to(rows.dtype)
                grad_scores[:, k] = (grad * rows[positions[:, k]]).sum(dim=1)
        return grad_rows, grad_scores_NK, None


def _part_size(scores_NK: Tensor) -> int:
    """Returns how many tokens are combined at a time: all on a GPU, whose allocator keeps its memory."""
    return max(512, len(scores_NK) // 16) if scores_NK.device.type == "cpu" else max(1, len(scores_NK))


class _Dispatch(torch.autograd.Function):
    """Rows of tokens in the order of experts. Backward sums the rows of a token in the order of K: deterministic."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_ND: Tensor, order: Tensor, positions_NK: Tensor) -> Tensor:
        ctx.save_for_backward(positions_NK)
        return x_ND[order // positions_NK.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (positions_NK,) = ctx.saved_tensors
        return grads[0][positions_NK].sum(dim=1), None, None
