"""Writes what a teacher predicts for the tokens of a run, for distillation.store.

Legend: B batch, T tokens, D model, V vocabulary, C tokens of a chunk, K stored tokens, N rows of a rank.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan_clone.comm.collectives import all_gather
from torchtitan_clone.comm.json_collectives import broadcast_json
from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.checks import find_range_errors
from torchtitan_clone.config.resolved import find_mesh_errors
from torchtitan_clone.config.schema import Compile, FaultTolerance
from torchtitan_clone.config.schema_training import Data
from torchtitan_clone.config.stages import find_data_errors
from torchtitan_clone.data import Tokenizer, build_tokenizer
from torchtitan_clone.data.dataset import open_rows
from torchtitan_clone.data.opening import prepare_sources
from torchtitan_clone.data.packing import pack
from torchtitan_clone.data.predictions import (
    FORMAT,
    PredictionMeta,
    PredictionWriter,
    begin_predictions,
    finish_predictions,
    folder_of,
    open_predictions,
    rows_for,
)
from torchtitan_clone.data.token_store import TokenStore
from torchtitan_clone.files import format_bytes
from torchtitan_clone.ops.distillation import ModelPredictions
from torchtitan_clone.ops.vocabulary import local_shards
from torchtitan_clone.parallel.mesh import batch_rank, tensor_rank
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group, set_timeout
from torchtitan_clone.parallel.teacher import TeacherOfRows, teacher_tensors
from torchtitan_clone.run.engine import build_plan_mesh
from torchtitan_clone.run.loaders import tokens_of_rank
from torchtitan_clone.run.plan import RunPlan, build_plan
from torchtitan_clone.run.prepared import resolved_model
from torchtitan_clone.run.teacher import build_teacher, find_teacher_plan
from torchtitan_clone.run.trained import Trained, find_trained
from torchtitan_clone.run.weights_folder import digest_of_weights

logger = logging.getLogger("torchtitan_clone")

_CHUNK_TOKENS = 1024
_LOG_SECONDS = 30.0
_TIMEOUT_SECONDS = 24 * 3600  # for ranks that have less to read


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is stored, and how it is computed."""

    teacher: Path
    k: int
    dtype: str
    compute_dtype: torch.dtype
    rows: int
    """Rows that are computed together."""


def store_predictions(config: Config, choices: Choices) -> list[str]:
    """Writes the predictions for each local source of a run; returns one line about each.

    Ranks are on the mesh of the run's options, without a pipeline. What is complete is left as it is. ConfigError if
    something does not fit.
    """
    if (path := config.distillation.store) is None:
        raise ConfigError("distillation.store: set it to the folder to write to, as in the options of the run")
    config = resolved_model(config)
    if errors := [*find_range_errors(config, at=""), *find_data_errors(config.data, training=config.training)]:
        raise ConfigError(errors)
    trained = find_trained(choices.teacher)
    tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    if errors := [*_find_errors(config, choices, trained=trained, tokenizer=tokenizer)]:
        raise ConfigError(errors)
    launch = Launch.from_environment()
    device = pick_device(launch)
    given = {"trained": trained, "tokenizer": tokenizer, "launch": launch}
    plan = _plan_of_writer(config, choices, **given, device_type=device.type)
    find_teacher_plan(plan)
    stores = prepare_sources(training=config.training, data=config.data, tokenizer=tokenizer)
    if not stores:
        raise ConfigError("every source is streamed, and has no tokens to store predictions beside")
    with process_group(config.comm, launch=launch, device=device):
        teacher = build_teacher(plan, mesh=build_plan_mesh(plan, device_type=device.type), device=device)
        assert teacher is not None
        set_timeout(_TIMEOUT_SECONDS)
        digest = broadcast_json(digest_of_weights(trained.path) if launch.rank == 0 else None).text()
        predict = partial(_predict, plan=plan, choices=choices, teacher=teacher, device=device)
        options = {"plan": plan, "choices": choices, "digest": digest, "predict": predict}
        return [_store(store, folder=folder_of(Path(path), store), **options) for store in stores.values()]


def _plan_of_writer(
    config: Config, choices: Choices, *, trained: Trained, tokenizer: Tokenizer, launch: Launch, device_type: str
) -> RunPlan:
    """Returns the plan of a run of the teacher itself, beside which there is no other model; ConfigError as a run's."""
    dtype = str(choices.compute_dtype).removeprefix("torch.")
    parallelism = replace(config.parallelism, pipeline_parallel_degree=1, data_parallel_shard_degree=-1)
    if errors := [*find_mesh_errors(parallelism, launch.world_size)]:
        raise ConfigError(errors)
    training = replace(
        config.training, dtype=dtype, mixed_precision_param=dtype, local_batch_size=choices.rows, global_batch_size=-1,
        freeze_schedule=[],
    )  # fmt: skip
    config = replace(
        config, training=training, parallelism=parallelism, data=Data(), compile=Compile(),
        fault_tolerance=FaultTolerance(),
        distillation=replace(config.distillation, teacher_path=str(choices.teacher), store=None),
    )  # fmt: skip
    return build_plan(
        config, world_size=launch.world_size, spec=trained.spec, model_args=trained.args, tokenizer=tokenizer,
        device_type=device_type,
    )  # fmt: skip


def _find_errors(config: Config, choices: Choices, *, trained: Trained, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields why the teacher cannot predict the tokens of the run."""
    yield from (f"--teacher={choices.teacher}: {error}" for error in trained.find_tokenizer_errors(tokenizer))
    if tokenizer.vocab_size > (size := trained.args.vocab_size):
        rule = f"its vocabulary has {size:,} tokens, and the tokenizer {tokenizer.vocab_size:,}"
        yield f"--teacher={choices.teacher}: {rule}; choose a teacher with the vocabulary of the model."
    limits = {"--k": (choices.k, size), "training.seq_len": (config.training.seq_len, trained.args.max_seq_len)}
    for name, (value, limit) in limits.items():
        if not 1 <= value <= limit:
            yield f"{name} = {value}: must be from 1 to {limit} for this teacher."


Predict = Callable[[TokenStore], Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]]


def _store(store: TokenStore, *, folder: Path, plan: RunPlan, choices: Choices, digest: str, predict: Predict) -> str:
    training = plan.config.training
    rows = rows_for(
        store, vocab_size=plan.model_args.vocab_size, seq_len=training.seq_len,
        document_masking=training.document_masking, temperature=plan.config.distillation.temperature,
    )  # fmt: skip
    meta = PredictionMeta(**vars(rows), format=FORMAT, teacher=digest, k=choices.k, dtype=choices.dtype)
    if folder.is_dir():
        if open_predictions(folder, rows=rows).meta != meta:
            raise ConfigError(f"{folder} has predictions of another teacher, --k or --dtype; delete it first")
        return _describe(meta, store=store, folder=folder)
    if dist.get_rank() == 0:
        begin_predictions(folder, meta=meta)
    dist.barrier()
    writer = PredictionWriter(folder, meta=meta)
    for positions, ids, values in predict(store):
        writer.write(positions, ids=ids, values=values)
    writer.close()
    dist.barrier()
    if dist.get_rank() == 0:
        finish_predictions(folder, meta=meta)
    dist.barrier()
    return _describe(meta, store=store, folder=folder)


def _describe(meta: PredictionMeta, *, store: TokenStore, folder: Path) -> str:
    size = meta.tokens * meta.k * (np.dtype(meta.dtype).itemsize + np.dtype(store.dtype).itemsize)
    return f"{store.meta.source}: {meta.tokens:,} x {meta.k} predictions, {format_bytes(size)}, in {folder}"


def _predict(
    store: TokenStore, *, plan: RunPlan, choices: Choices, teacher: TeacherOfRows, device: torch.device
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields positions [N], ids and log-probabilities [N, K] of the tokens in this rank's share of the rows.

    A collective. Of the ranks of tensor parallelism, which compute the same, the first yields them.
    """
    training, rank, ranks = plan.config.training, dist.get_rank(), plan.degrees.data
    stored = open_rows(store, "train", seq_len=training.seq_len)
    place, tokens = batch_rank(plan.degrees, rank=rank), tokens_of_rank(plan, rank=rank)
    share = range(len(stored) * place // ranks, len(stored) * (place + 1) // ranks)
    logged = time.monotonic()
    for first in range(0, -(-len(stored) // ranks), choices.rows):
        own = share[first : first + choices.rows]
        indices = np.array(own or range(1))  # where others have one more, for which all gather weights
        batch = pack(stored.read(indices), eos_id=store.meta.eos_id, document_masking=training.document_masking)
        positions_BT = stored.positions(indices)
        if tokens is not None:
            batch, positions_BT = batch.select_tokens(tokens), positions_BT[:, tokens.numpy()]
        found = TopK(choices.k, temperature=plan.config.distillation.temperature)
        teacher(found, **teacher_tensors(batch.to(device)))
        if own and tensor_rank(plan.degrees, rank=rank) == 0:
            yield positions_BT.flatten(), torch.cat(found.ids).numpy(), torch.cat(found.values).numpy()
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            logger.info("%s: %.0f %%", store.meta.source, 100 * first / max(1, len(share)))


class TopK:
    """Keeps the K largest log-probabilities of every token, from logits of a chunk at a time."""

    def __init__(self, k: int, *, temperature: float) -> None:
        self._k = k
        self._temperature = temperature
        self.ids: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, predictions: ModelPredictions) -> Tensor:
        hidden_BTD, weight_VD, vocabulary = local_shards(predictions.hidden_BTD, predictions.weight_VD)
        for hidden_CD in hidden_BTD.flatten(0, 1).split(_CHUNK_TOKENS):
            logits_CV = (hidden_CD @ weight_VD.T).float() / self._temperature
            values, ids = logits_CV.topk(min(self._k, logits_CV.shape[1]))
            lse = logits_CV.logsumexp(dim=-1, keepdim=True)
            if vocabulary.group is not None:
                missing = (0, self._k - values.shape[1])
                parts = F.pad(values, missing, value=-torch.inf), F.pad(ids + vocabulary.start, missing), lse
                values, ids, lse = (torch.cat(all_gather(part, group=vocabulary.group), dim=1) for part in parts)
                values, places = values.topk(self._k)
                ids, lse = ids.gather(1, places), lse.logsumexp(dim=-1, keepdim=True)
            self.values.append((values - lse).clamp_max(0).cpu())
            self.ids.append(ids.cpu())
        return torch.zeros((), device=hidden_BTD.device)
