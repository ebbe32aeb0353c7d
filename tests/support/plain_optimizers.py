"""The optimizers of the reference loop, with groups of parameters and their rates, written again in plain PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_clone.config import Config
from torchtitan_clone.ops.stochastic_rounding import chunks, round_into


def build_optimizers(
    config: Config, *, args: Any, parameters: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of all parameters, AdamW last; "lr_share" of a group is what multiplies its rate."""
    options = config.optimizer
    # Biases of experts are stacked, and are no matrices.
    matrices = {name: p for name, p in parameters.items() if p.ndim >= 2 and "bias" not in name}
    vectors = {name: p for name, p in parameters.items() if name not in matrices}
    hidden = {name: p for name, p in matrices.items() if name.startswith("layers.") and "_conv." not in name}
    share = args.mup_base_dim / args.dim if args.mup_base_dim else 1.0
    if options.name == "Muon" or share != 1.0:
        matrices = {name: p for name, p in matrices.items() if name not in hidden}
    groups: list[dict[str, Any]] = [
        {"params": [*matrices.items()]},
        {"params": [*vectors.items()], "weight_decay": 0.0},
    ]
    muon: list[torch.optim.Optimizer] = []
    if options.name == "Muon":
        muon = [PlainMuon([*hidden.values()], lr=options.lr, weight_decay=options.weight_decay)]
    elif share != 1.0:
        decay = options.weight_decay / share
        groups += [{"params": [*hidden.items()], "lr_share": share, "weight_decay": decay}]
    common: dict[str, Any] = {
        "lr": options.lr,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
    }
    if options.args.get("state_dtype") == "bfloat16":
        return [*muon, PlainRoundedAdamW(groups, seed=config.debug.seed, **common)]
    return [*muon, torch.optim.AdamW(groups, fused=True, **common)]


class PlainRoundedAdamW(torch.optim.Optimizer):
    """AdamW with moments in bfloat16, on whole tensors; the draws that round them are those of the package."""

    def __init__(self, groups: list[dict[str, Any]], *, seed: int, **common: Any) -> None:
        super().__init__(groups, common)
        self._seed = seed
        self._step = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self._step += 1
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                self._update(name, parameter, group)

    def _update(self, name: str, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        zeros = {key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in ("first", "second")}
        state = self.state[parameter] or zeros
        beta1, beta2 = group["betas"]
        first = beta1 * state["first"].float() + (1 - beta1) * parameter.grad
        second = beta2 * state["second"].float() + (1 - beta2) * parameter.grad.square()
        parameter *= 1 - group["lr"] * group["weight_decay"]
        denominator = (second / (1 - beta2**self._step)).sqrt() + group["eps"]
        parameter -= group["lr"] / (1 - beta1**self._step) * first / denominator
        for chunk in chunks(parameter, seed=self._seed, step=self._step, name=name):
            round_into(chunk.of(state["first"]), chunk.of(first), chunk.first)
            round_into(chunk.of(state["second"]), chunk.of(second), chunk.second)
        self.state[parameter] = state


class PlainMuon(torch.optim.Optimizer):
    """Muon in fp32, one matrix after the other, with the rates of AdamW. Source: arXiv 2502.16982, algorithm 1."""

    def __init__(self, params: list[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.95).add_(parameter.grad, alpha=0.05)
                nesterov = 0.05 * parameter.grad + 0.95 * momentum
                parameter *= 1 - group["lr"] * group["weight_decay"]
                stacks = (x.view(-1, *x.shape[-2:]) for x in (parameter, nesterov))
                for weight, update in zip(*stacks, strict=True):
                    weight -= group["lr"] * 0.2 * max(weight.shape) ** 0.5 * newton_schulz(update)


def newton_schulz(x: Tensor) -> Tensor:
    """Returns a matrix whose singular values are moved close to 1 by five iterations."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x
