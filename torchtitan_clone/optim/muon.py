"""Muon: momentum, of which each matrix is orthogonalized.

Sources: https://kellerjordan.github.io/posts/muon, arXiv 2502.16982.
The update of a matrix needs all of it, so each has one owner among the ranks that share it (see `matrices.py`). Results
do not depend on the mesh: orthogonalizing shards alone would be another optimizer, whose update differs by a half.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_clone.config.schema_training import Fraction, Range
from torchtitan_clone.interfaces import MatrixLayout
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.ops.orthogonalize import orthogonalize, orthogonalize_flops
from torchtitan_clone.optim.adam import StateDtype, state_dtype_of
from torchtitan_clone.optim.matrices import (
    Flight,
    Gathering,
    Matrix,
    MatrixExchange,
    Routes,
    assign_owners,
    group_for,
    row_values,
)
from torchtitan_clone.torch_compat import is_fake, simulates_gpu

_EPS = 1e-10
Coefficients = Literal["quintic", "polar_express"]


@dataclass(frozen=True, kw_only=True)
class MuonArgs:
    """Options of Muon, in `[optimizer.args]` or the `args` of a group."""

    momentum: Fraction = 0.95
    """Decay rate of the momentum, a running average of gradients."""
    nesterov: bool = True
    """Orthogonalize the average of the momentum and the gradient instead of the momentum."""
    adjust_lr: Literal["match_rms_adamw", "original", "spectral"] = "match_rms_adamw"
    """Factor of the learning rate by the shape of a matrix: 0.2 sqrt(max(rows, columns)), with which updates are as
    large as those of AdamW; sqrt(max(1, rows / columns)); or sqrt(rows / columns), for transfer between widths."""
    iterations: Annotated[int, Range(1, 100)] = 5
    """Newton-Schulz iterations."""
    coefficients: Coefficients = "quintic"
    """Coefficients of the iterations: ops.orthogonalize.COEFFICIENTS."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the iterations and of the matrices that ranks exchange for them; auto: bfloat16 on a GPU, and
    float32 on a CPU, most of which multiply it faster."""
    blocks: Literal["none", "head"] = "none"
    """What is orthogonalized by itself: each matrix, or of the projections to queries, keys and values each head's
    rows."""
    normalize: Literal["none", "neuron"] = "none"
    """Divide each row of the update by the root of its running mean square, whose decay rate is optimizer.beta2, and
    keep the norm of the update (NorMuon, arXiv 2510.05491)."""
    cautious: bool = False
    """Decay only weights whose update has their sign (arXiv 2510.12402)."""
    state_dtype: StateDtype = "auto"
    """Data type of the momentum, as in AdamArgs."""


def _iteration_dtype(args: MuonArgs, *, like: Tensor) -> torch.dtype:
    """Returns the data type of the iterations on the device of this shard."""
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    return torch.float32 if like.device.type == "cpu" and not simulates_gpu(like) else torch.bfloat16


def lr_adjustment(rows: int, cols: int, *, adjust_lr: str) -> float:
    """Returns what the learning rate of a matrix is multiplied by. Sources: torch.optim.Muon, arXiv 2502.16982."""
    match adjust_lr:
        case "original":
            return math.sqrt(max(1, rows / cols))
        case "spectral":
            return math.sqrt(rows / cols)
        case _:
            return 0.2 * math.sqrt(max(rows, cols))


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Matrices that are exchanged together, of some parameters, and the ways of their parts from and to this rank."""

    parameters: Sequence[int]
    to_owners: Routes
    to_holders: Routes
    columns: Mapping[Matrix, Matrix]
    """With args.normalize: the column of row moments of each matrix."""
    columns_to_holders: Routes


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What one param group computes with: its parameters, their matrices in buckets, and the exchange of those."""

    parameters: Sequence[torch.nn.Parameter]
    buckets: Sequence[_Bucket]
    exchange: MatrixExchange
    column_exchange: MatrixExchange


class Muon(torch.optim.Optimizer):
    """Muon on matrices and stacks of them, DTensors or plain tensors; equal on any mesh.

    Args:
        param_groups: each with the keys "params" (pairs of name and parameter), "lr", "weight_decay", "momentum",
            "beta2" and "args" (MuonArgs), of which "momentum" is that of the first step.
        layout: how ranks share the matrices, and the heads in them.
        seed: that of the run, for momentum that is rounded.
    """

    def __init__(self, param_groups: list[dict[str, object]], *, layout: MatrixLayout, seed: int = 0) -> None:
        super().__init__(param_groups, {})
        self._seed = seed
        self._plans = [_plan(each, layout=layout) for each in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:  # the types of torch's overloads
        """Updates the parameters by their gradients times `factor`; a collective. A gradient of None counts as zero.

        The exchange of one bucket of matrices goes on while another is computed.
        """
        for settings, plan in zip(self.param_groups, self._plans, strict=True):
            buckets = iter(plan.buckets)
            gathering = self._start(next(buckets), plan, settings, factor=factor)
            returning: _Returning | None = None
            for bucket in plan.buckets:
                complete = gathering.wait()
                following = next(buckets, None)
                if following is not None:
                    gathering = self._start(following, plan, settings, factor=factor)
                previous, returning = returning, self._compute(bucket, complete, plan, settings)
                if previous is not None:
                    previous.apply(plan, settings)
            if returning is not None:
                returning.apply(plan, settings)

    def _start(self, bucket: _Bucket, plan: _Plan, settings: Mapping[str, Any], *, factor: float) -> Gathering:
        """Updates the momentum of a bucket's parameters, and starts to send what is to be orthogonalized."""
        args: MuonArgs = settings["args"]
        shards = {}
        for index in bucket.parameters:
            parameter, state = plan.parameters[index], self._state_of(plan.parameters[index], args)
            momentum = local_shard(state["momentum_buffer"])
            momentum = momentum.float() if args.state_dtype == "bfloat16" else momentum
            update = _updated(momentum, parameter.grad, settings, factor=factor)
            shards[index] = update.to(_iteration_dtype(args, like=update))
            if args.state_dtype == "bfloat16":
                self._store(momentum, parameter, state, name=settings["param_names"][index])
        return plan.exchange.to_owners(bucket.to_owners, shards)

    def _compute(
        self, bucket: _Bucket, complete: Sequence[tuple[Matrix, Tensor]], plan: _Plan, settings: Mapping[str, Any]
    ) -> "_Returning":
        """Orthogonalizes the matrices of this rank, and starts to send the results to all that hold parts of them."""
        args: MuonArgs = settings["args"]
        results = _orthogonalized(complete, args)
        shard = local_shard(plan.parameters[0])
        like = torch.empty(0, dtype=_iteration_dtype(args, like=shard), device=shard.device)
        if args.normalize == "none":
            return _Returning(updates=plan.exchange.to_holders(bucket.to_holders, results, like=like))
        states = {index: self._state_of(plan.parameters[index], args) for index in bucket.parameters}
        shards = {index: local_shard(state["row_second_moment"]) for index, state in states.items()}
        moments = {}
        for matrix, _ in complete:
            column = bucket.columns[matrix]
            moments[column] = plan.column_exchange.window(shards[matrix.parameter], column, column.region)
            results[matrix] = _normalize_rows(results[matrix], moments[column], beta2=settings["beta2"])
        return _Returning(
            updates=plan.exchange.to_holders(bucket.to_holders, results, like=like),
            moments=plan.column_exchange.to_holders(bucket.columns_to_holders, moments, like=like.float()),
            shards=shards,
        )

    def _store(self, momentum: Tensor, parameter: Tensor, state: Mapping[str, Tensor], *, name: str) -> None:
        """Rounds the momentum [shard] to the data type of the state."""
        from torchtitan_clone.ops.stochastic_rounding import chunks, round_into

        state["step"].add_(1)
        step = 1 if is_fake(state["step"]) else int(state["step"].item())  # on the CPU
        for chunk in chunks(parameter, seed=self._seed, step=step, name=name):
            round_into(chunk.of(state["momentum_buffer"]), chunk.of(momentum), chunk.first)

    def _state_of(self, parameter: torch.nn.Parameter, args: MuonArgs) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state.update(muon_state(parameter.detach(), args))
        return state


@dataclass(frozen=True, kw_only=True)
class _Returning:
    """Results of a bucket on their way to the ranks that hold parts of its matrices."""

    updates: Flight
    moments: Flight | None = None
    shards: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])

    def apply(self, plan: _Plan, settings: Mapping[str, Any]) -> None:
        """Decays and updates the weights of this rank by what the owners computed."""
        args: MuonArgs = settings["args"]
        lr, decay = settings["lr"], settings["weight_decay"]
        for matrix, part, update in self.updates.wait():
            weight = plan.exchange.window(local_shard(plan.parameters[matrix.parameter].detach()), matrix, part)
            if args.cautious:
                weight.sub_(weight * (update * weight > 0), alpha=lr * decay)
            elif decay:
                weight.mul_(1 - lr * decay)
            weight.add_(update, alpha=-lr * lr_adjustment(*matrix.shape, adjust_lr=args.adjust_lr))
        for column, part, values in self.moments.wait() if self.moments else ():
            plan.column_exchange.window(self.shards[column.parameter], column, part).copy_(values)


def _updated(momentum: Tensor, gradient: Tensor | None, settings: Mapping[str, Any], *, factor: float) -> Tensor:
    """Updates the momentum [shard] by a gradient times `factor`; returns what is to be orthogonalized.

    Both are updated in place: the result may be the gradient's memory.
    """
    decay, nesterov = settings["momentum"], settings["args"].nesterov
    if gradient is None:
        momentum.mul_(decay)
        return momentum * decay if nesterov else momentum
    gradient = local_shard(gradient).to(momentum.dtype)
    gradient = gradient.mul_(factor) if factor != 1.0 else gradient
    momentum.lerp_(gradient, 1 - decay)
    return gradient.lerp_(momentum, decay) if nesterov else momentum


def _plan(settings: Mapping[str, Any], *, layout: MatrixLayout) -> _Plan:
    parameters, args = settings["params"], settings["args"]
    block_rows = [layout.block_rows(name) if args.blocks == "head" else None for name in settings["param_names"]]
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = group_for(parameters, stage=layout.group)
    cost = partial(orthogonalize_flops, iterations=args.iterations)
    exchange = MatrixExchange(dict(enumerate(parameters)), group=group, rank=rank)
    moments = {index: _zeros_by_row(x.detach()) for index, x in enumerate(parameters) if args.normalize == "neuron"}
    column_exchange = MatrixExchange(moments, group=group, rank=rank)
    buckets = []
    for matrices in assign_owners(parameters, block_rows=block_rows, cost=cost, rank=rank):
        columns = {each: row_values(each, moments[each.parameter], rank=rank) for each in matrices if moments}
        to_owners, to_holders = exchange.routes(matrices)
        buckets.append(
            _Bucket(
                parameters=[*dict.fromkeys(matrix.parameter for matrix in matrices)],
                to_owners=to_owners,
                to_holders=to_holders,
                columns=columns,
                columns_to_holders=column_exchange.routes([*columns.values()])[1],
            )
        )
    return _Plan(parameters=parameters, buckets=buckets, exchange=exchange, column_exchange=column_exchange)


def muon_state(parameter: Tensor, args: MuonArgs) -> dict[str, Tensor]:
    """Returns the state of a parameter before its first step, by torch's names; of rows, fp32 [..., rows, 1]."""
    state = {"momentum_buffer": torch.zeros_like(parameter, dtype=state_dtype_of(parameter, args.state_dtype))}
    if args.state_dtype == "bfloat16":
        state["step"] = torch.zeros((), dtype=torch.float32)
    return state | ({"row_second_moment": _zeros_by_row(parameter)} if args.normalize == "neuron" else {})


def _zeros_by_row(parameter: Tensor) -> Tensor:
    """Returns zeros [..., rows, 1] that are sharded as stacks are, and otherwise equal on all ranks."""
    shape = (*parameter.shape[:-1], 1)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    stacked = parameter.ndim - 2
    placements = [each if getattr(each, "dim", stacked) < stacked else Replicate() for each in parameter.placements]
    local = torch.zeros(*parameter.to_local().shape[:stacked], *shape[stacked:], device=parameter.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _normalize_rows(update: Tensor, moment: Tensor, *, beta2: float) -> Tensor:
    """Divides each row by the root of its running mean square `moment` [rows, 1], which it updates; keeps the norm."""
    squares = update.float().square()
    moment.lerp_(squares.mean(dim=-1, keepdim=True), 1 - beta2)
    normalized = update * (moment + _EPS).rsqrt()
    return (normalized * (squares.sum().sqrt() / normalized.norm().clamp(min=_EPS))).to(update.dtype)


def _orthogonalized(complete: Sequence[tuple[Matrix, Tensor]], args: MuonArgs) -> dict[Matrix, Tensor]:
    """Returns the update of each matrix; those of one shape are computed in one batched product."""
    by_shape: dict[tuple[int, int], list[tuple[Matrix, Tensor]]] = defaultdict(list)
    for matrix, values in complete:
        by_shape[matrix.shape].append((matrix, values))
    results = {}
    for same in by_shape.values():
        stacked = torch.stack([values for _, values in same]) if len(same) > 1 else same[0][1][None]
        updates = orthogonalize(
            stacked, coefficients=args.coefficients, iterations=args.iterations, dtype=stacked.dtype
        )
        results |= {matrix: update for (matrix, _), update in zip(same, updates, strict=True)}
    return results
