"""Builds forward_backward of a plan, with its loss."""

from collections.abc import Sequence

import torch

from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.ops.cross_entropy import DIVERGENCE, build_loss
from torchtitan_clone.ops.source_sums import SourceSums
from torchtitan_clone.parallel.forward_backward import (
    ForwardBackward,
    LossFn,
    build_forward_backward,
)
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.teacher import TeacherOfRows
from torchtitan_clone.run.plan import RunPlan, loss_chunk_tokens


def build_plan_forward_backward(
    model_parts: Sequence[Decoder],
    *,
    plan: RunPlan,
    mesh: Mesh,
    device: torch.device,
    source_sums: SourceSums | None = None,
    loss_fn: LossFn | None = None,
    teacher: TeacherOfRows | None = None,
) -> ForwardBackward:
    """Builds forward_backward: plain, or through a pipeline; with a loss of its own, or cross-entropy.

    With a `teacher`, which the ranks with the last pipeline stage have, gradients are those of distillation.
    """
    config = plan.config
    # Eager passes over a CPU's logits reuse their memory and take rows that stay in the cache; compiled ones do not.
    compiled = config.compile.enable and "loss" in config.compile.components and device.type != "cpu"
    term = None
    options = {
        "chunk_tokens": loss_chunk_tokens(plan),
        "compile_backend": config.compile.backend if compiled else None,
        "sums": source_sums,
    }
    if loss_fn is None and config.distillation.is_enabled:
        from torchtitan_clone.ops.distillation import build_distilled_loss
        from torchtitan_clone.parallel.logged_term import LoggedTerm

        term, distillation = LoggedTerm(DIVERGENCE, device=device), config.distillation
        weights = {"alpha": distillation.alpha, "temperature": distillation.temperature}
        loss_fn = build_distilled_loss(**weights, divergence=term, **options)
    elif loss_fn is None and config.training.z_loss:
        from torchtitan_clone.parallel.z_loss import ZLoss

        term = ZLoss(config.training.z_loss, device=device)
        loss_fn = build_loss(**options, z_loss=term)
    loss_fn = loss_fn or build_loss(**options)
    if plan.degrees.pp == 1:
        run = build_forward_backward(model_parts[0], loss_fn=loss_fn, device=device, teacher=teacher)
    else:
        from torchtitan_clone.parallel.pipeline import build_pipelined_forward_backward

        run = build_pipelined_forward_backward(
            model_parts,
            stages=plan.stages,
            frozen_stages=plan.frozen_stages,
            parallelism=config.parallelism,
            mesh=mesh,
            loss_fn=loss_fn,
            dim=plan.model_args.dim,
            dtype=getattr(torch, config.training.mixed_precision_param),
            device=device,
            teacher=teacher,
        )
    return run if term is None else term.logged(run)
