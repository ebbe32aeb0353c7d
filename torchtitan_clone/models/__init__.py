"""Models: plain single-device PyTorch, one folder per family, and the decoder that they share."""

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.names import find_unknown_model
from torchtitan_clone.config.schema import Model
from torchtitan_clone.models.decoder import Decoder, ModelArgs
from torchtitan_clone.models.deepseek_v3 import SPEC as DEEPSEEK_V3
from torchtitan_clone.models.gpt_oss import SPEC as GPT_OSS
from torchtitan_clone.models.llama3 import SPEC as LLAMA3
from torchtitan_clone.models.llama4 import SPEC as LLAMA4
from torchtitan_clone.models.olmo3 import OLMO2_SPEC as OLMO2
from torchtitan_clone.models.olmo3 import SPEC as OLMO3
from torchtitan_clone.models.qwen3 import MOE_SPEC as QWEN3_MOE
from torchtitan_clone.models.qwen3 import SPEC as QWEN3
from torchtitan_clone.models.spec import ModelSpec

__all__ = ["MODELS", "Decoder", "ModelArgs", "ModelSpec", "find_model"]

_SPECS = (LLAMA3, QWEN3, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS, LLAMA4, OLMO2, OLMO3)
MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}


def find_model(model: Model) -> ModelSpec:
    """Returns the family of `model.name`, or one related to it that has the flavor; ConfigError for an unknown name."""
    if unknown := [*find_unknown_model(model, known=MODELS)]:
        raise ConfigError(unknown)
    spec = MODELS[model.name]
    related = [] if model.flavor in spec.flavors else [MODELS[name] for name in spec.related]
    return next((other for other in related if model.flavor in other.flavors), spec)
