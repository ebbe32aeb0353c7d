"""A trained model in one process, from a checkpoint of any mesh or a folder in the format of the Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data import Tokenizer, build_tokenizer
from torchtitan_clone.models.decoder import Decoder, ModelArgs, named_state
from torchtitan_clone.run.trained import Trained, find_trained


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with its weights, which takes no gradients, and its tokenizer."""

    path: Path
    model: Decoder
    args: ModelArgs
    tokenizer: Tokenizer
    device: torch.device


def open_trained_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, hf_assets_path: str | None = None
) -> TrainedModel:
    """Reads what find_trained() finds. ConfigError as there, and where there is no tokenizer."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no GPU on this machine; give --device=cpu")
    trained = find_trained(path, hf_assets_path=hf_assets_path)
    tokenizer = trained.tokenizer or build_tokenizer(str(trained.path))
    model = read_model(trained, dtype=dtype, device=device)
    return TrainedModel(path=trained.path, model=model, args=trained.args, tokenizer=tokenizer, device=device)


def read_model(trained: Trained, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Returns the model with its weights."""
    with torch.device("meta"):
        model = trained.spec.build(trained.args).to(dtype)
        model.init_buffers()  # of their own types
    model.to_empty(device=device)
    model.init_buffers(device)
    trained.fill(named_state(model))
    return model.requires_grad_(False).eval()
