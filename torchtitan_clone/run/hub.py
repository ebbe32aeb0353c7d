"""What a run exchanges with the Hugging Face hub: the weights it starts from, and the files beside those it exports.

Brings together what rooms that do not know each other know: the model's mapping, the tokenizer, folders of weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.hf import CONFIG_FILE, WeightFolder, open_weight_folder
from torchtitan_clone.checkpoint.tensor_file import Entry
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.render import toml_like
from torchtitan_clone.config.schema import Checkpoint, Model
from torchtitan_clone.data.tokenizer import Tokenizer, tokenizer_files
from torchtitan_clone.models.spec import ModelSpec

EXPORT_FOLDER = "hf"
"""Folder of the exports below the run's folder."""


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """A folder of weights that fits the model."""

    folder: WeightFolder
    hub_names: Mapping[str, str]
    warnings: tuple[str, ...]

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        """Copies the weights into parameters, whole or shards, by our names."""
        self.folder.fill({self.hub_names[name]: parameter.detach() for name, parameter in parameters.items()})


def initial_weights_path(checkpoint: Checkpoint, model: Model) -> Path:
    """The folder that `checkpoint.initial_load_in_hf` reads; ConfigError where neither option names one."""
    path = checkpoint.initial_load_path or model.hf_assets_path
    if path is None:
        raise ConfigError(
            "checkpoint.initial_load_in_hf = true: set checkpoint.initial_load_path, or model.hf_assets_path, to the "
            "folder that holds the .safetensors files"
        )
    return Path(path)


def open_initial_weights(
    path: Path, *, spec: ModelSpec, model_args: Any, parameters: Mapping[str, Tensor]
) -> InitialWeights:
    """The folder, after everything in it was compared with the model; ConfigError with all that does not fit."""
    folder = open_weight_folder(path)
    problems, warnings = _compare_arguments(folder, spec=spec, model_args=model_args)
    if not problems:
        problems = _compare_tensors(folder, spec=spec, tied=model_args.tied_embeddings, parameters=parameters)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    names = {name: spec.hugging_face.to_name(name) for name in parameters}
    return InitialWeights(folder=folder, hub_names=names, warnings=tuple(warnings))


_MAY_DIFFER_SILENTLY = {"max_seq_len"}
_MAY_DIFFER = {"rope_theta", "rope_scaling"}
"""What is changed on purpose to train on with longer sequences."""


def _compare_arguments(folder: WeightFolder, *, spec: ModelSpec, model_args: Any) -> tuple[list[str], list[str]]:
    """Problems and warnings: how the model differs from the one that config.json describes."""
    try:
        theirs = spec.hugging_face.from_config(folder.config)
    except ConfigError as error:
        return error.messages, []
    ours = spec.hugging_face.arguments(model_args)
    problems: list[str] = []
    warnings: list[str] = []
    for name in theirs:
        if theirs[name] == ours[name] or name in _MAY_DIFFER_SILENTLY:
            continue
        now, wanted = ("unset" if value is None else toml_like(value) for value in (ours[name], theirs[name]))
        text = f"model.args.{name} is {now}, but {CONFIG_FILE} asks for {wanted}"
        if name in _MAY_DIFFER:
            warnings.append(f"{text}; training goes on with the former")
        else:
            problems.append(f"{text}; set model.args.{name} = {wanted}")
    return problems, warnings


def _compare_tensors(
    folder: WeightFolder, *, spec: ModelSpec, tied: bool, parameters: Mapping[str, Tensor]
) -> list[str]:
    hub = spec.hugging_face
    wanted = {hub.to_name(name): parameter for name, parameter in parameters.items()}
    missing = [name for name in wanted if name not in folder.entries]
    extra = [name for name in folder.entries if name not in wanted and not hub.is_leftover(name, tied=tied)]
    problems = [f"lacks {_listed(missing)}"] if missing else []
    problems += [f"holds {_listed(extra)}, which {spec.name} has not"] if extra else []
    for name, parameter in wanted.items():
        if name in folder.entries and (problem := _mismatch(folder.entries[name], parameter)):
            problems.append(problem)
    return problems


def _mismatch(entry: Entry, parameter: Tensor) -> str | None:
    if entry.shape != tuple(parameter.shape):
        return f"{entry.name} has shape {list(entry.shape)}, and the model's has {list(parameter.shape)}"
    dtype = entry.torch_dtype
    both_float = dtype is not None and dtype.is_floating_point and parameter.is_floating_point()
    if dtype != parameter.dtype and not (both_float and entry.item_bytes > 1):
        return f"{entry.name} has type {entry.dtype}; quantized weights cannot be trained on"
    return None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


def export_files(
    *, spec: ModelSpec, model_args: Any, model: Model, tokenizer: Tokenizer, dtype: torch.dtype
) -> dict[str, bytes]:
    """config.json, generation_config.json and the tokenizer's files, by name."""
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id}
    config = {**spec.hugging_face.to_config(model_args), **special, "torch_dtype": str(dtype).removeprefix("torch.")}
    generation = {"_from_model_config": True, **special}
    files = {CONFIG_FILE: config, "generation_config.json": generation}
    written = {name: json.dumps(content, indent=2).encode() + b"\n" for name, content in files.items()}
    return tokenizer_files(model.hf_assets_path) | written
