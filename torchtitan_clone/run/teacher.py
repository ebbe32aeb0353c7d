"""The frozen teacher of a run, on the mesh of its model."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import EMA, ActivationCheckpoint
from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.ops.attention import OnHost
from torchtitan_clone.ops.distillation import ModelPredictions, Predictions, StoredPredictions
from torchtitan_clone.parallel.apply import named_buffers, named_parameters
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.stages import Stages, model_modules
from torchtitan_clone.parallel.teacher import TeacherOfRows
from torchtitan_clone.run.model_parts import parallelize_model_parts
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.rules import find_errors_of_teacher
from torchtitan_clone.run.trained import Trained, find_trained


class ModelTeacher:
    """Predicts by a model that is complete on this rank. Called inside the output projection of the student.

    There the final hidden states of both and, gathered by their forwards, both output projections are at hand.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def __call__(
        self, loss_of: Callable[[Predictions], Tensor], *, documents_BT: Tensor | None = None, **tensors: Tensor
    ) -> Tensor:
        losses: list[Tensor] = []

        def take(hidden_BTD: Tensor, weight_VD: Tensor, _targets_BT: Tensor) -> Tensor:
            with torch.enable_grad():
                losses.append(loss_of(ModelPredictions(hidden_BTD=hidden_BTD, weight_VD=weight_VD)))
            return losses[0].detach()

        documents = None if documents_BT is None else OnHost(documents_BT)
        with torch.no_grad():
            self.model(**tensors, documents_BT=documents, loss_fn=take)
        return losses[0]


def predict_as_stored(
    loss_of: Callable[[Predictions], Tensor], *, teacher_ids_BKT: Tensor, teacher_values_BKT: Tensor, **_: Tensor
) -> Tensor:
    """Predicts by what a batch has of a store."""
    return loss_of(StoredPredictions(ids_BKT=teacher_ids_BKT, values_BKT=teacher_values_BKT))


def find_teacher_plan(plan: RunPlan) -> RunPlan | None:
    """Returns the plan of the model that teaches, None without one; its batches are the rows that it gets at once.

    ConfigError if there is no teacher in the folder, or if it does not fit the run.
    """
    if plan.config.distillation.teacher_path is None:
        return None
    return _plan_of_teacher(plan, trained=_find_teacher(plan, digests=False))


def build_teacher(plan: RunPlan, *, mesh: Mesh, device: torch.device) -> TeacherOfRows | None:
    """Returns the teacher with its weights, None on ranks without the last pipeline stage; a collective over all ranks.

    ConfigError as find_teacher_plan().
    """
    if plan.config.distillation.teacher_path is None:
        return predict_as_stored
    trained = _find_teacher(plan, digests=plan.config.checkpoint.verify == "full")
    models = parallelize_model_parts(_plan_of_teacher(plan, trained=trained), mesh=mesh)
    for model in models:
        model.to_empty(device="cpu" if plan.config.training.enable_cpu_offload else device)
        model.init_buffers(device)
    tensors: dict[str, Tensor] = {name: weight.detach() for name, weight in named_parameters(models).items()}
    trained.fill(tensors | named_buffers(models))
    return ModelTeacher(models[0].eval()) if models else None


def _find_teacher(plan: RunPlan, *, digests: bool) -> Trained:
    path = plan.config.distillation.teacher_path
    assert path is not None
    option = f"distillation.teacher_path = {shown(path)}"
    try:
        trained = find_trained(Path(path), digests=digests)
    except ConfigError as error:
        raise ConfigError([f"{option}: {message}" for message in error.messages]) from None
    if errors := [*_find_differences(plan, trained), *find_errors_of_teacher(plan.config, plan.degrees, trained.args)]:
        raise ConfigError([f"{option}: {error}" for error in errors])
    return trained


def _find_differences(plan: RunPlan, trained: Trained) -> Iterator[str]:
    """Yields why the teacher does not predict the tokens of the run."""
    sizes = trained.args.vocab_size, plan.model_args.vocab_size
    if sizes[0] != sizes[1]:
        rule = f"its vocabulary has {sizes[0]:,} tokens, and model.args.vocab_size is {sizes[1]:,}"
        yield f"{rule}; choose a teacher with the vocabulary of the model, or set model.args.vocab_size to its size."
    yield from trained.find_tokenizer_errors(plan.tokenizer)


def _plan_of_teacher(plan: RunPlan, *, trained: Trained) -> RunPlan:
    """Returns the plan of a frozen model whose only stage is on the ranks with the last pipeline stage of a plan."""
    args, training, parallelism = trained.args, plan.config.training, plan.config.parallelism
    if "mtp_depth" in {field.name for field in fields(args)}:
        args = replace(args, mtp_depth=0)
    if plan.degrees.pp > 1:
        training = replace(training, local_batch_size=parallelism.pipeline_parallel_microbatch_size)
    config = replace(
        plan.config,
        training=training,
        ema=EMA(),
        model=replace(plan.config.model, converters=[]),
        parallelism=replace(parallelism, pipeline_parallel_degree=1),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        debug=replace(plan.config.debug, moe_force_load_balance=False),
    )
    stages = Stages(modules=(tuple(model_modules(args.n_layers)),), ranks=(plan.loss_rank,))
    frozen_layers = len(stages.modules[0]) - 1  # all modules, see frozen_modules
    return replace(
        plan, config=config, spec=trained.spec, model_args=args, stages=stages, frozen_layers=frozen_layers,
        degrees=replace(plan.degrees, pp=1),
    )  # fmt: skip
