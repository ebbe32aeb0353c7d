"""Teachers with random weights, as checkpoints of one step."""

import shutil
from pathlib import Path

import torch

from tests.support.runs import options
from torchtitan_clone.checkpoint.folder import CONFIG_FILE
from torchtitan_clone.checkpoint.offline import write_weights_checkpoint
from torchtitan_clone.config import load_config, to_toml
from torchtitan_clone.models import find_model
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.tools.predictions import Choices, store_predictions

SIZES = {"dim": 96, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4}


STORED = 16
"""Predictions that are stored of each token."""


def write_predictions(argv: list[str], teacher: Path, k: int = STORED) -> list[str]:
    """Stores the predictions of a teacher for the data of a run, as one rank of several."""
    choices = Choices(teacher=teacher, k=k, dtype="float32", rows=8, compute_dtype=torch.float32)
    return store_predictions(load_config(argv), choices)


def write_teacher(folder: Path, corpus: Path, *, seed: int = 5, **changes: object) -> Path:
    """Writes step-0 of a model that differs from the run's in all sizes but the vocabulary; returns its folder."""
    sizes = {f"model__args__{name}": value for name, value in SIZES.items()}
    config = load_config(options(corpus, folder, **sizes | changes))
    spec = find_model(config.model)
    args = spec.resolve_args(config.model)
    model = spec.build(args)
    init_weights(dict(model.named_parameters()), seed=seed, std_of=spec.std_of(args))
    state = named_state(model)
    with torch.no_grad():  # sharper than random logits
        state["output.weight"].mul_(3.0)
    shutil.rmtree(folder, ignore_errors=True)
    write_weights_checkpoint(
        folder / "step-0",
        meta=state,
        read=lambda name: state[name].detach(),
        extra_files={CONFIG_FILE: to_toml(config)},
    )
    return folder
