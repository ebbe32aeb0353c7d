"""Models: plain single-device PyTorch, one folder per family, and the decoder that they share.

Of the package this file imports only the names of options: a family is imported when it is asked for.
"""

from collections import UserDict
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.checks import find_unknown_model
from torchtitan_clone.config.schema_training import Model

if TYPE_CHECKING:
    from torchtitan_clone.models.spec import ModelSpec


class Families(UserDict[str, "ModelSpec"]):
    """A dict of families, in which "module:NAME" stands for one until it is read."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__(cast("dict[str, ModelSpec]", names))

    def __getitem__(self, key: str) -> "ModelSpec":
        if isinstance(name := cast("object", self.data[key]), str):
            self.data[key] = resolve_name(name)
        return self.data[key]


MODELS = Families(
    {
        "llama3": "torchtitan_clone.models.llama3:SPEC",
        "qwen3": "torchtitan_clone.models.qwen3:SPEC",
        "qwen3_moe": "torchtitan_clone.models.qwen3:MOE_SPEC",
        "qwen3_5": "torchtitan_clone.models.qwen3_5:SPEC",
        "qwen3_5_moe": "torchtitan_clone.models.qwen3_5:MOE_SPEC",
        "qwen3_next": "torchtitan_clone.models.qwen3_5:NEXT_SPEC",
        "deepseek_v3": "torchtitan_clone.models.deepseek_v3:SPEC",
        "deepseek_v32": "torchtitan_clone.models.deepseek_v3:V3_2_SPEC",
        "gpt_oss": "torchtitan_clone.models.gpt_oss:SPEC",
        "llama4": "torchtitan_clone.models.llama4:SPEC",
        "olmo2": "torchtitan_clone.models.olmo3:OLMO2_SPEC",
        "olmo3": "torchtitan_clone.models.olmo3:SPEC",
        "olmo_hybrid": "torchtitan_clone.models.olmo_hybrid:SPEC",
        "qwen2": "torchtitan_clone.models.qwen2:SPEC",
        "mistral": "torchtitan_clone.models.mistral:SPEC",
        "ministral3": "torchtitan_clone.models.mistral:MINISTRAL3_SPEC",
        "mistral4": "torchtitan_clone.models.mistral:MISTRAL4_SPEC",
        "smollm3": "torchtitan_clone.models.smollm3:SPEC",
        "granite": "torchtitan_clone.models.granite:SPEC",
        "kimi_k2": "torchtitan_clone.models.deepseek_v3:KIMI_K2_SPEC",
        "kimi_linear": "torchtitan_clone.models.kimi_linear:SPEC",
        "glm4_moe": "torchtitan_clone.models.glm4_moe:SPEC",
        "glm_moe_dsa": "torchtitan_clone.models.deepseek_v3:GLM5_SPEC",
        "minimax_m2": "torchtitan_clone.models.minimax_m2:SPEC",
        "gemma3": "torchtitan_clone.models.gemma3:SPEC",
        "apertus": "torchtitan_clone.models.apertus:SPEC",
        "gpt2": "torchtitan_clone.models.gpt2:SPEC",
    }
)
"""Families by the value of `model.name`, to which a program may add a ModelSpec of its own."""


def find_model(model: Model) -> "ModelSpec":
    """Returns the family of `model.name`, or one related to it that has the flavor; ConfigError for an unknown name."""
    if unknown := [*find_unknown_model(model, known=MODELS)]:
        raise ConfigError(unknown)
    spec = MODELS[model.name]
    related = [] if model.flavor in spec.flavors else [MODELS[name] for name in spec.related]
    return next((other for other in related if model.flavor in other.flavors), spec)
