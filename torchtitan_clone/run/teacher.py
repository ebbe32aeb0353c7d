"""The frozen teacher of a run, on the mesh of its model."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import ActivationCheckpoint
from torchtitan_clone.data import Batch
from torchtitan_clone.models.decoder import Decoder, ModelArgs
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.ops.attention import OnHost
from torchtitan_clone.ops.distillation import ModelPredictions, Predictions, StoredPredictions
from torchtitan_clone.parallel.apply import named_buffers, named_parameters
from torchtitan_clone.parallel.forward_backward import Rows, TeacherOfRows
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.stages import resolved_stages
from torchtitan_clone.run.model_parts import parallelize_model_parts
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.rules import find_errors_of_teacher
from torchtitan_clone.run.trained import Trained, find_trained


class ModelTeacher:
    """Predicts by a model that is complete on this rank. Called inside the output projection of the student.

    There the final hidden states of both and, gathered by their forwards, both output projections are at hand.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def __call__(self, rows: Rows, loss_of: Callable[[Predictions], Tensor]) -> Tensor:
        losses: list[Tensor] = []

        def take(hidden_BTD: Tensor, weight_VD: Tensor, _targets_BT: Tensor) -> Tensor:
            with torch.enable_grad():
                losses.append(loss_of(ModelPredictions(hidden_BTD=hidden_BTD, weight_VD=weight_VD)))
            return losses[0].detach()

        documents_BT = None if rows.documents_BT is None else OnHost(rows.documents_BT)
        with torch.no_grad():
            self._model(
                rows.tokens_BT, positions_BT=rows.positions_BT, documents_BT=documents_BT,
                targets_BT=rows.targets_BT, loss_fn=take,
            )  # fmt: skip
        return losses[0]


def predict_as_stored(rows: Rows, loss_of: Callable[[Predictions], Tensor]) -> Tensor:
    """Predicts by what a batch has of a store."""
    batch = cast("Batch", rows)
    assert batch.teacher_ids_BKT is not None
    assert batch.teacher_values_BKT is not None
    return loss_of(StoredPredictions(ids_BKT=batch.teacher_ids_BKT, values_BKT=batch.teacher_values_BKT))


def check_teacher(plan: RunPlan) -> None:
    """Raises ConfigError if there is no teacher in the folder, or if it does not fit the run."""
    if plan.config.distillation.teacher_path is not None:
        _find_teacher(plan, digests=False)


def build_teacher(plan: RunPlan, *, mesh: Mesh, device: torch.device) -> TeacherOfRows:
    """Returns the teacher with its weights; a collective over all ranks. ConfigError as check_teacher()."""
    if plan.config.distillation.teacher_path is None:
        return predict_as_stored
    trained = _find_teacher(plan, digests=plan.config.checkpoint.verify == "full")
    names = {field.name for field in fields(trained.args)}
    args = replace(trained.args, mtp_depth=0) if "mtp_depth" in names else trained.args
    (model,) = parallelize_model_parts(_plan_of_teacher(plan, spec=trained.spec, args=args), mesh=mesh)
    model.to_empty(device="cpu" if plan.config.training.enable_cpu_offload else device)
    model.init_buffers(device)
    tensors: dict[str, Tensor] = {name: weight.detach() for name, weight in named_parameters([model]).items()}
    trained.fill(tensors | named_buffers([model]))
    return ModelTeacher(model.eval())


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


def _plan_of_teacher(plan: RunPlan, *, spec: ModelSpec, args: ModelArgs) -> RunPlan:
    """Returns the plan of a frozen model on the mesh of a plan without a pipeline."""
    config = replace(
        plan.config,
        model=replace(plan.config.model, converters=[]),
        parallelism=replace(plan.config.parallelism, module_fqns_per_model_part=None),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        debug=replace(plan.config.debug, moe_force_load_balance=False),
    )
    stages = resolved_stages(config.parallelism, layer_costs=None, n_layers=args.n_layers, frozen_layers=0)
    frozen_layers = len(stages.modules[0]) - 1  # all modules, see frozen_modules
    return replace(plan, config=config, spec=spec, model_args=args, stages=stages, frozen_layers=frozen_layers)
