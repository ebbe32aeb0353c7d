"""Checkpoints of torchtitan: its names of parameters are those here, rows that Llama 3 rotates are in another order.

torchtitan (DCP)                                   here
layers.0.attention.wq.weight                       model/layers.0.attention.wq.weight
optimizer.state.layers.0.attention.wq.weight.step  optimizer/layers.0.attention.wq.weight/step
train_state.step, train_state.ntokens_seen         progress; the latter counts the tokens of one data-parallel rank
optimizer.param_groups, lr_scheduler, dataloader   not read: settings of the optimizer are compared with the run's
"""

from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.dcp import DcpCheckpoint
from torchtitan_clone.checkpoint.format import MODEL, OPTIMIZER
from torchtitan_clone.checkpoint.progress import MAX_DIGITS, NOTHING_DONE, Progress
from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.started import as_started
from torchtitan_clone.documents import Value
from torchtitan_clone.hub.foreign import ForeignCheckpoint, check_match, resolve_args, state_on_meta, unlike_settings
from torchtitan_clone.models import find_model

ROTATED = {"llama3": ("layers.*.attention.wq.weight", "layers.*.attention.wk.weight"), "qwen3": ()}
"""Families that can be read, and patterns of their weights whose rows torchtitan rotates in pairs of neighbors."""
_STATE, _GROUPS, _RANKS = "optimizer.state.", "optimizer.param_groups.", "dataloader.world_size"
_OUTPUT = "output.weight"
_UNREAD = (_GROUPS, "lr_scheduler.", "dataloader.", "train_state.", _OUTPUT)
"""What no tensor here is made of: of models with tied embeddings also the output."""


def open_torchtitan(folder: Path, *, config: Config, model_only: bool = False) -> ForeignCheckpoint:
    """Opens a checkpoint that torchtitan has saved, for a run with this configuration.

    With `model_only`, or if it holds no more, these are the weights of step 0. ConfigError if the checkpoint and the
    run differ in tensors, DocumentError if a file is damaged or holds more than plain data.
    """
    if folder.is_file():
        nano = as_started("a ckpt.pt of nanoGPT is converted by scripts/convert_from_nanogpt.py")
        raise ConfigError(f"{folder} is a file; give a step-N folder that torchtitan has saved; {nano}")
    spec = find_model(config.model)
    if spec.name not in ROTATED:
        known = ", ".join(ROTATED)
        what = f'model.name = "{spec.name}": checkpoints of torchtitan are read for {known}'
        remedy = as_started("export the weights with its last_save_in_hf, and use scripts/convert_from_hf.py")
        raise ConfigError(f"{what}; {remedy}")
    args = resolve_args(spec, config)
    saved = DcpCheckpoint(folder)
    model_only = model_only or not any(name.startswith(_STATE) for name in saved.tensors)
    meta = state_on_meta(spec, args, config=config, model_only=model_only)
    wanted = {_foreign_name(name): tensor.shape for name, tensor in meta.items()}
    unread = (*_UNREAD, _STATE) if model_only else _UNREAD
    found = {
        name: tensor.shape for name, tensor in saved.tensors.items() if name in wanted or not name.startswith(unread)
    }
    check_match(wanted, found, source=folder, model_only=model_only)
    has_copy = args.tied_embeddings and _OUTPUT in saved.tensors
    if has_copy and not torch.equal(saved.read(_OUTPUT), saved.read("tok_embeddings.weight")):
        what = f"{folder}: {_OUTPUT} differs from the embedding, and model.args.tied_embeddings is true"
        raise ConfigError(f"{what}; set it to false")

    def read(name: str) -> Tensor:
        tensor = saved.read(_foreign_name(name))
        parameter = name.split("/")[1]
        if tensor.ndim and any(fnmatchcase(parameter, pattern) for pattern in ROTATED[spec.name]):
            tensor = _in_halves(tensor, head_dim=args.head_dim)
        return tensor.to(meta[name].dtype)

    return ForeignCheckpoint(
        meta=meta,
        read=read,
        progress=NOTHING_DONE if model_only else _read_progress(saved),
        warnings=() if model_only else tuple(unlike_settings(_settings(saved), optimizer=config.optimizer)),
    )


def _foreign_name(name: str) -> str:
    """Returns torchtitan's name of a tensor in a checkpoint here."""
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    return _STATE + name.removeprefix(OPTIMIZER).replace("/", ".")


def _in_halves(rows: Tensor, *, head_dim: int) -> Tensor:
    """Returns the rows of heads in an order in which row i is rotated with row i + head_dim / 2, not with i + 1."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _read_progress(saved: DcpCheckpoint) -> Progress:
    def count(name: str, *, high: int) -> int:
        (number, *others) = saved.numbers(name)
        return Value(others or number, where=f"{saved.folder}: {name}").integer(high=high)

    ranks = count(_RANKS, high=2**20) if _RANKS in saved.values else 1
    return Progress(
        step=count("train_state.step", high=10**MAX_DIGITS - 1),
        tokens_seen=ranks * count("train_state.ntokens_seen", high=2**42),
        skipped_steps=0,
        data={},
    )


def _settings(saved: DcpCheckpoint) -> dict[str, tuple[float, ...]]:
    """Returns settings of the optimizer by torch's names."""
    names = {"lr": "initial_lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
    stored = {ours: f"{_GROUPS}tok_embeddings.weight.{theirs}" for ours, theirs in names.items()}
    return {ours: saved.numbers(name) for ours, name in stored.items() if name in saved.values}
