"""Maximal update parametrization (muP): settings that are best for a narrow model are best for a wide one.

Source: arXiv 2203.03466, Table 8 for Adam; the weight decay as in its package `mup`. With m = dim / mup_base_dim:

    weights                        initial std    learning rate    weight decay    result
    embedding, norms, biases       1              1                1
    matrices of layers             1 / sqrt(m)    1 / m            m
    routers                        1 / m          1 / m            m
    output                         1              1                1               logits 1 / m

each times what the model has at the base. A learning rate times its weight decay is then equal for all widths.
Muon keeps its learning rate with adjust_lr = "spectral". Scores are multiplied by sqrt(base head dim) / head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from torchtitan_clone.models.attention import Attention

StdOf = Callable[[str], Any]
_UNSCALED = ("tok_embeddings.", "output.")


def _is_unscaled(name: str) -> bool:
    return name.startswith(_UNSCALED) or any(word in name for word in ("norm", "bias", "sinks"))


def lr_factor(args: Any, name: str) -> float:
    """Returns what the learning rate of a parameter under Adam is multiplied by."""
    return 1.0 if _is_unscaled(name) else args.mup_base_dim / args.dim


def scaled_std(args: Any, std_of_args: Callable[[Any, str], Any]) -> StdOf:
    """Returns the standard deviation of initial values by name, given those by arguments and name of any width."""
    base = replace(args, dim=args.mup_base_dim)
    share = args.mup_base_dim / args.dim

    def std_of(name: str) -> Any:
        std = std_of_args(base, name)
        if not isinstance(std, float) or _is_unscaled(name):
            return std
        return std * (share if name.endswith("router.weight") else share**0.5)

    return std_of


def scale_results(model: nn.Module, args: Any) -> None:
    """Scales attention scores and logits of a decoder by its width, in place."""
    for module in model.modules():
        if isinstance(module, Attention) and args.mup_base_head_dim:
            module.score_scale *= (args.mup_base_head_dim / module.head_dim) ** 0.5
    output: Any = model.get_submodule("output")
    output.scale *= args.mup_base_dim / args.dim
