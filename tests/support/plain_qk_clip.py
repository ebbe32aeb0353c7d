"""QK-clip in plain PyTorch, with all scores in memory, written again from arXiv 2507.20534 for the reference loop."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from torchtitan_clone.models.attention import CoreAttention


class PlainQKClip:
    """Keeps the largest logit of each head while gradients are computed, and clips the weights after a step."""

    def __init__(self, model: nn.Module, *, threshold: float, alpha: float) -> None:
        self.max_logits: dict[str, Tensor] = {}
        """[heads] by the name of the attention module, of the last step."""
        self._threshold = threshold
        self._alpha = alpha
        self._attentions: dict[str, Any] = {}
        for name, module in model.named_modules():
            if isinstance(module, CoreAttention):
                self._attentions[name.removesuffix(".core")] = model.get_submodule(name.removesuffix(".core"))
                module.register_forward_pre_hook(lambda _, args, name=name: self._measure(name, *args))

    def _measure(
        self, core: str, q_BTNH: Tensor, k_BTKH: Tensor, _v: Tensor, starts_BT: Tensor | None, *_: Any
    ) -> None:
        with torch.no_grad():
            k_BTNH = k_BTKH.repeat_interleave(q_BTNH.shape[2] // k_BTKH.shape[2], dim=2)
            scores = torch.einsum("btnh,bsnh->bnts", q_BTNH.double(), k_BTNH.double()) / q_BTNH.shape[3] ** 0.5
            index = torch.arange(q_BTNH.shape[1])
            visible = index <= index[:, None]
            if starts_BT is not None:
                visible = visible & (index >= starts_BT[:, :, None])
                visible = visible[:, None]
            self.max_logits[core.removesuffix(".core")] = scores.where(visible, -torch.inf).amax((0, 2, 3))

    @torch.no_grad()
    def clip(self) -> None:
        """Scales the rows of each head."""
        for name, attention in self._attentions.items():
            gammas = [min(1.0, self._threshold / top) if top > 0 else 1.0 for top in self.max_logits[name].tolist()]
            (self._clip_latent if hasattr(attention, "sizes") else self._clip_grouped)(attention, gammas)

    def _clip_grouped(self, attention: Any, gammas: list[float]) -> None:
        size = attention.head_dim
        group = len(gammas) // (len(attention.wk.weight) // size)
        for head, gamma in enumerate(gammas):
            first = head // group * group
            of_keys = min(gammas[first : first + group]) ** (1 - self._alpha)
            _scale(attention.wq, head * size, size, gamma / of_keys)
            if head == first:
                _scale(attention.wk, head // group * size, size, of_keys)

    def _clip_latent(self, attention: Any, gammas: list[float]) -> None:
        sizes = attention.sizes
        wq = attention.wq_b if sizes.q_latent else attention.wq
        for head, gamma in enumerate(gammas):
            q, kv = head * (sizes.nope + sizes.rope), head * (sizes.nope + sizes.value)
            _scale(wq, q, sizes.nope, gamma**self._alpha)
            _scale(wq, q + sizes.nope, sizes.rope, gamma)
            _scale(attention.wkv_b, kv, sizes.nope, gamma ** (1 - self._alpha))


def _scale(linear: nn.Module, first: int, rows: int, factor: float) -> None:
    for parameter in linear.parameters():
        cast("Tensor", parameter.data)[first : first + rows] *= factor
