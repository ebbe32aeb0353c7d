"""By what QK-clip multiplies the rows of projections, so that each head's logits are multiplied by a factor exactly.

Legend: N heads, K kv heads, G query heads of a kv head. Source: arXiv 2507.20534, algorithm 1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchtitan_clone.models.attention import Attention, CoreAttention
from torchtitan_clone.models.mla import LatentAttention

SoftmaxAttention = Attention | LatentAttention


def row_factors(attention: nn.Module, factor_N: Tensor, *, kv_heads: int, alpha: float) -> dict[str, Tensor]:
    """Returns the factor of each row of the weight and bias of projections, by name, if logits get `factor_N`.

    Keys get the factor to the power of 1 - `alpha`, queries the rest. Query heads that share keys divide theirs by what
    the keys got, which is that of the head with the smallest factor.
    """
    if isinstance(attention, LatentAttention):
        sizes, ones_N = attention.sizes, torch.ones_like(factor_N)
        # All heads share the rotary part of the keys: only queries can get its factor.
        q = _rows((factor_N**alpha, sizes.nope), (factor_N, sizes.rope))
        kv = _rows((factor_N ** (1 - alpha), sizes.nope), (ones_N, sizes.value))
        return {"wq_b" if sizes.q_latent else "wq": q, "wkv_b": kv}
    assert isinstance(attention, Attention)
    factor_KG = factor_N.unflatten(0, (kv_heads, -1))
    of_keys_K = factor_KG.amin(1) ** (1 - alpha)
    size = attention.head_dim
    return {"wq": _rows(((factor_KG / of_keys_K[:, None]).flatten(), size)), "wk": _rows((of_keys_K, size))}


def _rows(*parts: tuple[Tensor, int]) -> Tensor:
    """Returns the factors of all rows: of each head so many rows of the first part, then those of the second."""
    return torch.cat([factor_N[:, None].expand(-1, size) for factor_N, size in parts], dim=1).flatten()


def find_unclippable(model: nn.Module) -> Iterator[str]:
    """Yields why weights cannot be clipped, for the first layer of each kind that has a reason."""
    found: dict[str, str] = {}
    attentions = {
        name.rpartition(".")[0] for name, module in model.named_modules() if isinstance(module, CoreAttention)
    }
    for name, attention in ((name, model.get_submodule(name)) for name in sorted(attentions)):
        if not isinstance(attention, SoftmaxAttention):
            found.setdefault("kind", f"{name} is {type(attention).__name__}, of which it knows no weights of queries")
        elif isinstance(attention, Attention) and (attention.q_norm is not None or attention.rotated_norm_eps):
            found.setdefault("norm", f"{name} normalizes queries and keys, which undoes any factor of their weights")
    yield from found.values() if attentions else ["the model has no attention with logits"]
