"""overlay: model arguments updated with a user's values."""

from dataclasses import dataclass

import pytest

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.rope import RopeScaling


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Nested arguments, one of them required."""

    factor: float
    low: int = 1


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of a model."""

    n_layers: int = 2
    tied: bool = False
    scaling: Scaling | None = None


def messages(base: Args, values: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        overlay(base, values, where="model.args")
    return caught.value.messages


def test_overlay_returns_an_updated_copy() -> None:
    base = Args()
    assert overlay(base, {"n_layers": 4}, where="model.args") == Args(n_layers=4)
    assert base == Args()
    assert overlay(base, {}, where="model.args") == base


def test_nested_dataclass_is_built_if_unset() -> None:
    assert overlay(Args(), {"scaling": {"factor": 8}}, where="model.args") == Args(scaling=Scaling(factor=8.0))


def test_nested_dataclass_is_updated() -> None:
    base = Args(scaling=Scaling(factor=2.0, low=5))
    assert overlay(base, {"scaling": {"low": 7}}, where="model.args").scaling == Scaling(factor=2.0, low=7)


def test_all_problems_are_reported() -> None:
    assert messages(Args(), {"n_layer": 4, "tied": 1, "scaling": {"low": 2.0, "facto": 1}}) == [
        "model.args.n_layer: unknown option; did you mean model.args.n_layers?",
        "model.args.tied = 1: must be true or false",
        "model.args.scaling: missing required key factor",
        "model.args.scaling.low = 2.0: must be an integer",
        "model.args.scaling.facto: unknown option; did you mean model.args.scaling.factor?",
    ]
    assert messages(Args(), {"scaling": 3}) == ["model.args.scaling = 3: must be a table"]


def test_an_empty_table_does_not_set_what_is_unset() -> None:
    with pytest.raises(ConfigError) as caught:
        overlay(Llama3Args(), {"rope_scaling": {}}, where="model.args")
    assert caught.value.messages == ["model.args.rope_scaling = {}: must have a key; remove it to leave it unset"]
    scaled = Llama3Args(rope_scaling=RopeScaling())
    assert overlay(scaled, {"rope_scaling": {}}, where="model.args") == scaled
