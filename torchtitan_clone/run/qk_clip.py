"""QK-clip: weights of queries and keys are scaled down after a step in which a head had a logit above a threshold.

Source: arXiv 2507.20534 (MuonClip). Legend: L layers, N heads.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.models.qk_clip import SoftmaxAttention, row_factors
from torchtitan_clone.ops.dtensor_shards import local_shard_and_offset
from torchtitan_clone.parallel.apply import named_modules, named_parameters
from torchtitan_clone.parallel.max_logits import MaxLogits
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.run.plan import RunPlan


class QKClip:
    """Measures the largest attention logits of each step, and clips the weights of this rank."""

    size = 2

    def __init__(self, plan: RunPlan, *, mesh: Mesh, model_parts: Sequence[Decoder], device: torch.device) -> None:
        args, optimizer = plan.model_args, plan.config.optimizer
        assert optimizer.qk_clip is not None
        self._threshold = optimizer.qk_clip
        self._alpha = optimizer.qk_clip_alpha
        self._kv_heads = args.kv_heads
        self._parameters = named_parameters(model_parts)
        modules = named_modules(model_parts).items()
        self._attentions = {name: module for name, module in modules if isinstance(module, SoftmaxAttention)}
        self.logits = MaxLogits(
            {_layer(name): module for name, module in self._attentions.items()},
            models=model_parts,
            num_layers=args.n_layers + args.mtp_depth,
            heads=args.n_heads,
            tp=mesh.tp,
            device=device,
        )
        self._columns: dict[str, float] = {}

    def begin_step(self, _step: int) -> None:
        """Forgets the logits of the step before."""
        self.logits.reset()

    def own(self) -> Tensor:
        """Returns what take() gets, on the first rank, and zeros on others: [2]. A collective over all ranks."""
        self.logits.reduce()
        max_LN = self.logits.max_LN
        is_clipped = (max_LN > self._threshold).sum() / (max_LN > -torch.inf).sum()
        return torch.stack([max_LN.max(), is_clipped]) if dist.get_rank() == 0 else max_LN.new_zeros(2)

    def take(self, values: Sequence[float]) -> None:
        """Takes the largest logit of the step, and the share of heads above the threshold."""
        self._columns = {"attention/max_logit": values[0], "attention/clipped_heads": values[1]}

    def columns(self) -> dict[str, float]:
        """Returns the columns of the step."""
        return self._columns

    def before_update(self, *, grad_norm: float) -> None:
        """Does nothing."""

    @torch.no_grad()
    def after_update(self) -> None:
        """Scales weights and biases so that no logit of the step would have been above the threshold."""
        if self._columns["attention/clipped_heads"] == 0:
            return
        for name, attention in self._attentions.items():
            max_N = self.logits.max_LN[_layer(name)]
            factor_N = torch.where(max_N > self._threshold, self._threshold / max_N, 1.0)
            factors = row_factors(attention, factor_N, kv_heads=self._kv_heads, alpha=self._alpha)
            for projection, factor_R in factors.items():
                for kind in ("weight", "bias"):
                    self._scale(f"{name}.{projection}.{kind}", factor_R)

    def _scale(self, name: str, factor_R: Tensor) -> None:
        """Multiplies the rows of a parameter of which this rank has a shard; a frozen one stays as it is."""
        parameter = self._parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            return
        local, offset = local_shard_and_offset(parameter)
        rows = factor_R[offset[0] : offset[0] + len(local)].to(local)
        local.mul_(rows.view(-1, *[1] * (local.ndim - 1)))


def _layer(name: str) -> int:
    """Returns the number of the layer of a module "layers.NUMBER.attention"."""
    return int(name.split(".")[1])
