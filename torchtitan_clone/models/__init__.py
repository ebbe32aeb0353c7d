"""Models: plain single-device PyTorch, one folder a family, and the leaf math they share."""

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Model
from torchtitan_clone.models.llama3 import SPEC as LLAMA3
from torchtitan_clone.models.spec import ModelSpec

MODELS: dict[str, ModelSpec] = {"llama3": LLAMA3}


def find_model(model: Model) -> ModelSpec:
    """The family that `model.name` names; ConfigError for an unknown one."""
    if model.name not in MODELS:
        raise ConfigError([f'model.name = "{model.name}": no such model; known: {", ".join(MODELS)}'])
    return MODELS[model.name]
