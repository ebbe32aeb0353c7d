"""Options of the commands that open a trained model."""

import argparse
from pathlib import Path

import torch

from torchtitan_clone.commands.parsing import add_tokenizer_options
from torchtitan_clone.tools.trained_model import TrainedModel, open_trained_model


def open_from_options(options: argparse.Namespace) -> TrainedModel:
    """Returns the model that the options of add_model_options() name; ConfigError as open_trained_model()."""
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    return open_trained_model(options.folder, dtype=dtype, device=device, hf_assets_path=options.hf_assets_path)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the folder of a trained model, and how it is opened."""
    parser.add_argument("folder", type=Path, help="a run's folder, a step-N folder, or a Hugging Face folder")
    parser.add_argument("--batch_size", type=int, default=8, help="texts that are computed together")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add_tokenizer_options(parser)
