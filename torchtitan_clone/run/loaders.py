"""The loaders that one rank of a phase reads its batches from."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan_clone.comm.json_collectives import all_gather_json
from torchtitan_clone.data import Dataset, Loader, LoaderOptions, ValidationLoader
from torchtitan_clone.data.dataset import StreamPosition
from torchtitan_clone.parallel.mesh import batch_rank, context_rank, local_tokens, tensor_rank
from torchtitan_clone.run.plan import RunPlan

if TYPE_CHECKING:
    from torchtitan_clone.data.predictions import ReadPredictions


def open_loaders(
    plan: RunPlan, *, dataset: Dataset, rank: int, position: Mapping[str, Any] | None = None
) -> tuple[Loader, ValidationLoader | None]:
    """Opens the training loader at a position of the data (None: the start) and, if enabled, the validation loader.

    ConfigError where the position belongs to other data and checkpoint.allow_data_change is false.
    """
    config = plan.config
    options = LoaderOptions(
        seq_len=config.training.seq_len,
        document_masking=config.training.document_masking,
        mtp_depth=plan.model_args.mtp_depth,
        rank=batch_rank(plan.degrees, rank=rank),
        num_ranks=plan.degrees.data,
        token_indices=tokens_of_rank(plan, rank=rank),
        routed_tokens=_routed_tokens(plan, rank=rank) if plan.model_args.num_experts else None,
    )
    read_predictions, teacher = _open_teacher(plan, dataset=dataset, options=options)
    loader = Loader(
        dataset,
        options=options,
        seed=config.debug.seed,
        global_batch_size=plan.global_batch_size,
        local_batch_size=config.training.local_batch_size,
        num_workers=config.data.num_workers,
        gather_positions=_gather_positions,
        read_predictions=read_predictions,
        teacher=teacher,
    )
    if position:
        loader.load_state_dict(position, allow_change=config.checkpoint.allow_data_change)
    if not config.validation.enable:
        return loader, None
    rows = config.validation.local_batch_size * plan.degrees.data
    return loader, ValidationLoader(dataset, options=replace(options, mtp_depth=0), global_batch_size=rows)


def _open_teacher(
    plan: RunPlan, *, dataset: Dataset, options: LoaderOptions
) -> tuple["ReadPredictions | None", str | None]:
    """Returns what reads the stored predictions of a teacher, and what tells it from others; None without them.

    ConfigError if it, or some of the predictions, are missing.
    """
    config = plan.config
    if (path := config.distillation.teacher_path) is not None:
        from torchtitan_clone.run.weights_folder import digest_of_teacher

        return None, digest_of_teacher(path)[:16]
    if (store := config.distillation.store) is None:
        return None, None
    from torchtitan_clone.data.predictions import prediction_reader

    return prediction_reader(
        Path(store), dataset, seq_len=options.seq_len, seed=config.debug.seed,
        document_masking=options.document_masking, temperature=config.distillation.temperature,
        vocab_size=plan.model_args.vocab_size,
        tokens=None if options.token_indices is None else options.token_indices.numpy(),
    )  # fmt: skip


def tokens_of_rank(plan: RunPlan, *, rank: int, seq_len: int | None = None) -> Tensor | None:
    """Returns the indices in each sequence of the tokens that this rank reads; None for all.

    `seq_len` is the length of the sequences; None: that of the plan.
    """
    degree, parallelism = plan.degrees.cp, plan.config.parallelism
    if degree == 1:
        return None
    pieces = local_tokens(
        seq_len or plan.config.training.seq_len,
        rank=context_rank(plan.degrees, rank=rank),
        degree=degree,
        method=parallelism.context_parallel_rotate_method,
    )
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])


def _routed_tokens(plan: RunPlan, *, rank: int) -> slice:
    """Returns which of the tokens that a rank reads its routers get: those that its tensor parallelism gives it."""
    size = plan.config.training.seq_len // plan.degrees.cp // plan.degrees.tp
    first = tensor_rank(plan.degrees, rank=rank) * size
    return slice(first, first + size)


def _gather_positions(positions: list[StreamPosition]) -> list[StreamPosition]:
    from torchtitan_clone.data.streaming import positions_from_json

    return [position for value in all_gather_json(positions) for position in positions_from_json(value)]
