"""A run that may start: what preflight.py hands to the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchtitan_clone.checkpoint.folder import CONFIG_FILE, initial_folder
from torchtitan_clone.config import Config, load_config
from torchtitan_clone.config.resolved import output_folder
from torchtitan_clone.config.schema_training import FROM_FOLDER
from torchtitan_clone.data import Dataset
from torchtitan_clone.run.folder import RunFolder
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.validation import Evaluator

if TYPE_CHECKING:
    from torchtitan_clone.hub.weights import InitialWeights


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that may start."""

    plan: RunPlan
    dataset: Dataset
    initial_weights: "InitialWeights | None"
    completed_steps: int
    """Steps that the run's folder shows as done: where this reaches training.steps, nothing is left to train."""
    folder: RunFolder | None
    """The locked output folder; rank 0 has it."""
    evaluators: Sequence[Evaluator] = ()


def resolved_model(config: Config) -> Config:
    """Returns the configuration with the model of the Hugging Face folder that it starts from, if that decides.

    Once the run has a folder of its own, the Hugging Face folder need not be there any more.
    """
    if config.model.name != FROM_FOLDER:
        return config
    from torchtitan_clone.hub.weights import initial_weights_path, model_of_start

    before = output_folder(config) / CONFIG_FILE
    if before.is_file() and not initial_weights_path(config.checkpoint, config.model).exists():
        found = load_config([f"--job.config_file={before}"]).model
        assets = config.model.hf_assets_path or found.hf_assets_path
        return replace(config, model=replace(found, args=found.args | config.model.args, hf_assets_path=assets))
    return replace(config, model=model_of_start(config.checkpoint, config.model))


def find_initial_weights(plan: RunPlan) -> "InitialWeights | None":
    """Opens the weights that a new run starts from; None for random weights or those of a checkpoint. ConfigError."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.initial_load_in_hf:
        initial_folder(checkpoint)  # loaded once all ranks are there
        return None
    from torchtitan_clone.hub.weights import check_tokenizer, initial_weights_path, open_initial_weights

    path = initial_weights_path(checkpoint, plan.config.model)
    check_tokenizer(path, model=plan.config.model, tokenizer=plan.tokenizer)
    return open_initial_weights(
        path, spec=plan.spec, model_args=plan.model_args, state=plan.model_tensors, chosen=plan.config.model.args,
        resize=checkpoint.resize_vocabulary,
    )  # fmt: skip
