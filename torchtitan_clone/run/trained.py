"""Finds what a folder holds: a checkpoint of any mesh, or weights in the format of the Hugging Face hub."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from torchtitan_clone.checkpoint.folder import CONFIG_FILE
from torchtitan_clone.checkpoint.offline import Weights
from torchtitan_clone.config import Config, ConfigError, load_config
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.data import Tokenizer, build_tokenizer
from torchtitan_clone.data.opening import ending_as_trained
from torchtitan_clone.data.tokenizer import TOKENIZER_FILE
from torchtitan_clone.hub.folder import CONFIG_FILE as HUB_CONFIG_FILE
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.weights import InitialWeights, family_of_folder, model_of_folder, open_initial_weights
from torchtitan_clone.models import find_model
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.run.plan import build_plan, plan_of
from torchtitan_clone.run.weights_folder import find_weights_folder, is_hub_folder


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model with its weights, which are not read yet."""

    path: Path
    spec: ModelSpec
    args: ModelArgs
    tokenizer: Tokenizer | None
    """None where the folder has none, and none was given."""
    weights: Weights | InitialWeights

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the weights into parameters and buffers, global tensors or shards, by our names. ConfigError."""
        self.weights.fill(tensors)

    def find_tokenizer_errors(self, tokenizer: Tokenizer) -> Iterator[str]:
        """Yields why a teacher does not predict the tokens of a run with this tokenizer."""
        if self.tokenizer is not None and self.tokenizer.digest != tokenizer.digest:
            digests = self.tokenizer.digest[:12], tokenizer.digest[:12]
            rule = f"its tokenizer.json has the digest {digests[0]}, and that of the run {digests[1]}"
            yield f"{rule}; choose a teacher with the same, or set model.hf_assets_path to the folder of its tokenizer."


def find_trained(path: Path, *, hf_assets_path: str | None = None, digests: bool = True) -> Trained:
    """Opens a step-N folder, the newest complete step of a run's folder, or a folder of the Hugging Face hub.

    `hf_assets_path` has the tokenizer where it is not where the run found it. ConfigError if there is no such folder,
    or if something in it is missing, damaged or does not fit. With a process group a collective over all ranks.
    """
    folder = find_weights_folder(path)
    if is_hub_folder(folder):
        return _find_hub_model(folder, hf_assets_path=hf_assets_path)
    return _find_checkpoint(folder, hf_assets_path=hf_assets_path, digests=digests)


def _find_checkpoint(folder: Path, *, hf_assets_path: str | None, digests: bool) -> Trained:
    weights = Weights(folder, digests=digests)
    config = load_config([f"--job.config_file={folder / CONFIG_FILE}"])
    config = replace(config, model=replace(config.model, hf_assets_path=hf_assets_path or config.model.hf_assets_path))
    spec = find_model(config.model)
    tokenizer = tokenizer_at_step(config, weights=weights)
    args = args_at_step(config, weights=weights, spec=spec, tokenizer=tokenizer)
    state, found = spec.state_on_meta(args), weights.meta()
    if unlike := [name for name, tensor in state.items() if name not in found or found[name].shape != tensor.shape]:
        raise ConfigError(f"{folder} has no {', '.join(unlike[:5])} of the shape that its {CONFIG_FILE} asks for")
    return Trained(path=folder, spec=spec, args=args, tokenizer=tokenizer, weights=weights)


def tokenizer_at_step(config: Config, *, weights: Weights) -> Tokenizer:
    """Returns the tokenizer of a checkpoint; version 0.1 put nothing before texts, whatever the files say."""
    tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    if tokenizer.bos_id is not None and weights.progress.data.get("tokenizer") == tokenizer.digest:
        tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=False)
    return ending_as_trained(tokenizer, training=config.training, data=config.data)


def args_at_step(config: Config, *, weights: Weights, spec: ModelSpec, tokenizer: Tokenizer) -> ModelArgs:
    """Returns the arguments of the model, with the rotary positions of the stage of the data that the step is in."""
    args = spec.resolve_args(config.model)
    if problems := args.violations():
        raise ConfigError([f"{weights.folder / CONFIG_FILE}: {problem}" for problem in problems])
    config = replace(config, parallelism=Parallelism(), training=replace(config.training, freeze_schedule=[]))
    plan = build_plan(config, world_size=1, spec=spec, model_args=args, tokenizer=tokenizer)
    return plan_of(weights.progress, first=plan).model_args


def _find_hub_model(path: Path, *, hf_assets_path: str | None) -> Trained:
    folder = open_weight_folder(path)
    spec = family_of_folder(folder)
    args = spec.resolve_args(model_of_folder(folder, spec=spec))
    if problems := args.violations():
        raise ConfigError([f"{path / HUB_CONFIG_FILE}: {problem}" for problem in problems])
    weights = open_initial_weights(path, spec=spec, model_args=args, state=spec.state_on_meta(args))
    has_tokenizer = hf_assets_path is not None or (path / TOKENIZER_FILE).exists()
    tokenizer = build_tokenizer(hf_assets_path or str(path)) if has_tokenizer else None
    return Trained(path=path, spec=spec, args=args, tokenizer=tokenizer, weights=weights)
