"""Exponential moving averages (EMA) of the weights, each laid out as its parameter, so that no update communicates.

A half-life in proportion to the updates so far: arXiv 2312.02696 (the power function of section 3.1).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchtitan_clone.config.schema import EMA
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.torch_compat import foreach_lerp_


def decay_after(updates: int, *, options: EMA) -> float:
    """Returns the share of an average that is left after the update of weights with this number, counted from 1.

    It is that of ema.freq updates together.
    """
    decay = options.decay if options.half_life is None else 2 ** (-1 / (options.half_life * updates))
    return decay**options.freq


class AveragedWeights:
    """The averages of a rank's parameters in fp32, those of frozen ones too, which approach their weights."""

    def __init__(self, options: EMA, *, parameters: Mapping[str, nn.Parameter]) -> None:
        self._options = options
        self._parameters = parameters
        self._averages: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def averages(self) -> dict[str, Tensor]:
        """Returns the averages by the parameter's name: the tensors themselves, NaN until they are filled."""
        if not self._averages:
            weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
            self._averages = {name: torch.full_like(w, torch.nan, dtype=torch.float32) for name, w in weights.items()}
        return self._averages

    def load_state_dict(self, averages: Mapping[str, Tensor]) -> None:
        """Installs these tensors themselves, not copies; named as the parameters."""
        self._averages = dict(averages)

    def with_averages(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors of the state with the averages, and the weights where averages are in their place."""
        state = state | {f"model/{name}": weight for name, weight in self._weights.items()}
        return state | {f"ema/{name}": average for name, average in self.averages().items()}

    def forget(self) -> None:
        """Makes the averages those of a new run, until they are loaded or filled."""
        for average in self.averages().values():
            local_shard(average).fill_(torch.nan)

    @torch.no_grad()
    def fill(self) -> None:
        """Sets averages that were not loaded to the weights."""
        for name, average in self.averages().items():
            if bool(local_shard(average).isnan().any()):
                local_shard(average).copy_(local_shard(self._parameters[name]))

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Moves the averages towards the weights, which were updated so many times, if ema.freq divides that."""
        if updates % self._options.freq:
            return
        share = 1 - decay_after(updates, options=self._options)
        averages = [local_shard(average) for average in self.averages().values()]
        weights = [local_shard(self._parameters[name]) for name in self._averages]
        if all(weight.dtype == torch.float32 for weight in weights):
            foreach_lerp_(averages, weights, share)
        else:  # one at a time: converted, all together would take as much memory as the averages
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.float(), share)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Lets parameters have the values of the averages; the state still has the weights."""
        with torch.no_grad():
            weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            self._copy(self.averages())
        self._weights = weights
        try:
            yield
        finally:
            self._weights = {}
            self._copy(weights)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_shard(parameter).copy_(local_shard(values[name]))
