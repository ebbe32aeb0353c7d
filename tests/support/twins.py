"""transformers' model with the weights of one of ours."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, PreTrainedConfig
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models.decoder import ModelArgs, named_state
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of

TYPES = {"kimi_k2": "deepseek_v3"}
"""Types of transformers' models by those of releases that it has no class for."""
# transformers 5.23 has the class, but does not find it; without exist_ok it would ignore the call.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def config_of(spec: ModelSpec, args: ModelArgs) -> PreTrainedConfig:
    """Returns transformers' config.json of a model."""
    config = format_of(spec).to_config(args)
    kind = str(config["model_type"])
    return AutoConfig.for_model(**{**config, "model_type": TYPES.get(kind, kind)})  # pyright: ignore[reportArgumentType]


def twin_of(spec: ModelSpec, model: nn.Module, args: ModelArgs) -> nn.Module:
    """Returns transformers' model in float32."""
    state = {name: tensor.detach() for name, tensor in named_state(model).items()}
    sources = sources_of(format_of(spec).map_state(state, args=args))
    exported = {
        name: assemble_source(users, read=state.__getitem__, dtype=torch.float32) for name, users in sources.items()
    }
    with TemporaryDirectory() as folder:  # transformers stacks experts when it reads files
        config_of(spec, args).save_pretrained(folder)
        save_file(exported, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        twin, loading = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues], a pair
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    assert not any(loading.values()), loading
    return twin.eval()
