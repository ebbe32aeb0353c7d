"""A trained model in one process, from a checkpoint of any mesh or a folder in the format of the Hugging Face hub."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torchtitan_clone.checkpoint.folder import CONFIG_FILE, MANIFEST_FILE, newest_complete_step, step_folder
from torchtitan_clone.checkpoint.offline import Weights
from torchtitan_clone.config import Config, ConfigError, load_config
from torchtitan_clone.config.messages import describe_download
from torchtitan_clone.config.schema import Checkpoint, Parallelism
from torchtitan_clone.data import Tokenizer, build_tokenizer
from torchtitan_clone.hub.folder import CONFIG_FILE as HUB_CONFIG_FILE
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.weights import family_of_folder, model_of_folder, open_initial_weights
from torchtitan_clone.models import find_model
from torchtitan_clone.models.decoder import Decoder, ModelArgs, named_state
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.run.plan import build_plan, plan_of


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
    """Reads a step-N folder, the newest complete step of a run's folder, or a folder of the Hugging Face hub.

    `hf_assets_path` has the tokenizer where it is not where the run found it. ConfigError if there is no such folder,
    or if something in it is missing, damaged or does not fit.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no GPU on this machine; give --device=cpu")
    if not path.is_dir():
        hint = describe_download(str(path), repository="model")
        raise ConfigError(f"{path}: there is no such folder; give that of a run, a step or a Hugging Face model{hint}")
    if (path / HUB_CONFIG_FILE).is_file():
        return _open_hub_folder(path, dtype=dtype, device=device, hf_assets_path=hf_assets_path)
    return _open_checkpoint(_find_step(path), dtype=dtype, device=device, hf_assets_path=hf_assets_path)


def _find_step(path: Path) -> Path:
    """Returns a folder that is a checkpoint, or the newest complete one of a run, or of a folder of checkpoints."""
    if (path / MANIFEST_FILE).exists():
        return path
    file = path / CONFIG_FILE
    options = load_config([f"--job.config_file={file}"]).checkpoint if file.is_file() else Checkpoint()
    for folder in (path / options.folder, path):
        if (step := newest_complete_step(folder)) is not None:
            return step_folder(folder, step)
    raise ConfigError(f"{path}: the folder has no complete checkpoint; give the folder of a run that has saved a step")


def _open_checkpoint(
    folder: Path, *, dtype: torch.dtype, device: torch.device, hf_assets_path: str | None
) -> TrainedModel:
    weights = Weights(folder)
    config = load_config([f"--job.config_file={folder / CONFIG_FILE}"])
    config = replace(config, model=replace(config.model, hf_assets_path=hf_assets_path or config.model.hf_assets_path))
    spec = find_model(config.model)
    tokenizer = tokenizer_at_step(config, weights=weights)
    args = args_at_step(config, weights=weights, spec=spec, tokenizer=tokenizer)
    state, found = spec.state_on_meta(args), weights.meta()
    if unlike := [name for name, tensor in state.items() if name not in found or found[name].shape != tensor.shape]:
        raise ConfigError(f"{folder} has no {', '.join(unlike[:5])} of the shape that its {CONFIG_FILE} asks for")
    model = _empty_model(spec, args, dtype=dtype, device=device)
    for name, tensor in named_state(model).items():
        tensor.detach().copy_(weights.read(name))
    return TrainedModel(path=folder, model=model, args=args, tokenizer=tokenizer, device=device)


def tokenizer_at_step(config: Config, *, weights: Weights) -> Tokenizer:
    """Returns the tokenizer of a checkpoint; version 0.1 put nothing before texts, whatever the files say."""
    tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    if tokenizer.bos_id is None or weights.progress.data.get("tokenizer") != tokenizer.digest:
        return tokenizer
    return build_tokenizer(config.model.hf_assets_path, add_bos=False)


def args_at_step(config: Config, *, weights: Weights, spec: ModelSpec, tokenizer: Tokenizer) -> ModelArgs:
    """Returns the arguments of the model, with the rotary positions of the stage of the data that the step is in."""
    args = spec.resolve_args(config.model)
    if problems := args.violations():
        raise ConfigError([f"{weights.folder / CONFIG_FILE}: {problem}" for problem in problems])
    config = replace(config, parallelism=Parallelism(), training=replace(config.training, freeze_schedule=[]))
    plan = build_plan(config, world_size=1, spec=spec, model_args=args, tokenizer=tokenizer)
    return plan_of(weights.progress, first=plan).model_args


def _open_hub_folder(
    path: Path, *, dtype: torch.dtype, device: torch.device, hf_assets_path: str | None
) -> TrainedModel:
    model, args = read_hub_model(path, dtype=dtype, device=device)
    tokenizer = build_tokenizer(hf_assets_path or str(path))
    return TrainedModel(path=path, model=model, args=args, tokenizer=tokenizer, device=device)


def read_hub_model(path: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[Decoder, ModelArgs]:
    """Returns the model of a folder of the Hugging Face hub and its arguments; ConfigError as open_trained_model()."""
    folder = open_weight_folder(path)
    spec = family_of_folder(folder)
    args = spec.resolve_args(model_of_folder(folder, spec=spec))
    if problems := args.violations():
        raise ConfigError([f"{path / HUB_CONFIG_FILE}: {problem}" for problem in problems])
    weights = open_initial_weights(path, spec=spec, model_args=args, state=spec.state_on_meta(args))
    model = _empty_model(spec, args, dtype=dtype, device=device)
    weights.fill(named_state(model))
    return model, args


def _empty_model(spec: ModelSpec, args: ModelArgs, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = spec.build(args).to(dtype)
        model.init_buffers()  # of their own types
    model.to_empty(device=device)
    model.init_buffers(device)
    return model.requires_grad_(False).eval()
