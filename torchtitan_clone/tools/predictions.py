"""Writes what a teacher predicts for the tokens of a run, for distillation.store.

Legend: B batch, T tokens, D model, V vocabulary, C tokens of a chunk, K stored tokens, N rows of a rank.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.comm.json_collectives import broadcast_json
from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.checks import find_range_errors
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
from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.ops.attention import OnHost
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group, set_timeout
from torchtitan_clone.run.prepared import resolved_model
from torchtitan_clone.run.trained import Trained, find_trained
from torchtitan_clone.run.weights_folder import digest_of_weights
from torchtitan_clone.tools.trained_model import read_model

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

    Several ranks divide the rows. What is complete is left as it is. ConfigError if something does not fit.
    """
    if config.distillation.store is None:
        raise ConfigError("distillation.store: set it to the folder to write to, as in the options of the run")
    config = resolved_model(config)
    if errors := [*find_range_errors(config, at=""), *find_data_errors(config.data, training=config.training)]:
        raise ConfigError(errors)
    trained = find_trained(choices.teacher)
    tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    if errors := [*_find_errors(config, choices, trained=trained, tokenizer=tokenizer)]:
        raise ConfigError(errors)
    stores = prepare_sources(training=config.training, data=config.data, tokenizer=tokenizer)
    if not stores:
        raise ConfigError("every source is streamed, and has no tokens to store predictions beside")
    launch = Launch.from_environment()
    device = pick_device(launch)
    with process_group(config.comm, launch=launch, device=device):
        model = read_model(trained, dtype=choices.compute_dtype, device=device)
        set_timeout(_TIMEOUT_SECONDS)
        digest = broadcast_json(digest_of_weights(trained.path) if launch.rank == 0 else None).text()
        return [
            _store(store, config=config, choices=choices, model=model, device=device, digest=digest)
            for store in stores.values()
        ]


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


def _store(
    store: TokenStore, *, config: Config, choices: Choices, model: Decoder, device: torch.device, digest: str
) -> str:
    folder = folder_of(Path(config.distillation.store or ""), store)
    rows = rows_for(
        store, vocab_size=model.args.vocab_size, seq_len=config.training.seq_len,
        document_masking=config.training.document_masking, temperature=config.distillation.temperature,
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
    for positions, ids, values in _predict(store, config=config, choices=choices, model=model, device=device):
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
    store: TokenStore, *, config: Config, choices: Choices, model: Decoder, device: torch.device
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields positions [N], ids and log-probabilities [N, K] of the tokens in this rank's share of the rows."""
    training = config.training
    stored = open_rows(store, "train", seq_len=training.seq_len)
    bounds = [len(stored) * (dist.get_rank() + end) // dist.get_world_size() for end in (0, 1)]
    logged = time.monotonic()
    for first in range(bounds[0], bounds[1], choices.rows):
        indices = np.arange(first, min(first + choices.rows, bounds[1]))
        batch = pack(stored.read(indices), eos_id=store.meta.eos_id, document_masking=training.document_masking).to(
            device
        )
        found = TopK(choices.k, temperature=config.distillation.temperature)
        with torch.no_grad():
            model(
                batch.tokens_BT, positions_BT=batch.positions_BT, targets_BT=batch.targets_BT, loss_fn=found,
                documents_BT=None if batch.documents_BT is None else OnHost(batch.documents_BT),
            )  # fmt: skip
        yield stored.positions(indices).flatten(), torch.cat(found.ids).numpy(), torch.cat(found.values).numpy()
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            logger.info("%s: %.0f %%", store.meta.source, 100 * (first - bounds[0]) / (bounds[1] - bounds[0]))


class TopK:
    """A loss function that keeps the K largest log-probabilities of every token, from logits of a chunk at a time."""

    def __init__(self, k: int, *, temperature: float) -> None:
        self._k = k
        self._temperature = temperature
        self.ids: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, hidden_BTD: Tensor, weight_VD: Tensor, _targets_BT: Tensor) -> Tensor:
        for hidden_CD in hidden_BTD.flatten(0, 1).split(_CHUNK_TOKENS):
            logits_CV = (hidden_CD @ weight_VD.T).float() / self._temperature
            values, ids = logits_CV.topk(self._k)
            self.values.append((values - logits_CV.logsumexp(dim=-1, keepdim=True)).clamp_max(0).cpu())
            self.ids.append(ids.cpu())
        return torch.zeros((), device=hidden_BTD.device)
