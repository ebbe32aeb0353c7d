"""Checkpoints of nanoGPT: GPT-2 by the names of the Hugging Face hub, whose matrices are not transposed.

ckpt.pt                                            here
model: _orig_mod.transformer.h.0.ln_1.weight       model/layers.0.attention_norm.weight
optimizer: state: 7: exp_avg                       optimizer/layers.0.attention_norm.weight/exp_avg
iter_num                                           step; with sizes in config and model_args the number of tokens
model_args, param_groups, config                   compared with the run's where shapes do not show them
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.format import MODEL, OPTIMIZER
from torchtitan_clone.checkpoint.progress import MAX_DIGITS, NOTHING_DONE, Progress
from torchtitan_clone.checkpoint.torch_archive import StoredTensor, TorchArchive
from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.render import toml_like
from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.hub.foreign import ForeignCheckpoint, check_match, resolve_args, state_on_meta, unlike_settings
from torchtitan_clone.hub.mapping import same, slices_of
from torchtitan_clone.models import find_model
from torchtitan_clone.models.gpt2.hf import gpt2_rules
from torchtitan_clone.ops.tensor_slices import TensorSlice

_RULES = gpt2_rules(same, output_dim=0)
_EMBEDDING, _OUTPUT = "transformer.wte.weight", "lm_head.weight"
_ARGUMENTS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
_SAME = {"norm_eps": 1e-5, "gelu_approximation": "none"}
"""Arguments of ours that all models of nanoGPT have."""


def open_nanogpt(path: Path, *, config: Config, model_only: bool = False) -> ForeignCheckpoint:
    """Opens a ckpt.pt that nanoGPT has saved, for a run with this configuration.

    With `model_only` these are the weights of step 0. ConfigError if the checkpoint and the run differ in tensors,
    DocumentError if the file is damaged or holds more than plain data.
    """
    spec = find_model(config.model)
    if spec.name != "gpt2":
        raise ConfigError(f'model.name = "{spec.name}": nanoGPT trains models of the family "gpt2"; set it to that')
    args = resolve_args(spec, config)
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the ckpt.pt that nanoGPT has saved")
    saved = NanoGPTCheckpoint(path)
    saved.check_arguments(args)
    stored = saved.weights if model_only else saved.weights | saved.moments()
    if args.tied_embeddings:
        stored = saved.without_copy(stored)
    meta = state_on_meta(spec, args, config=config, model_only=model_only)
    parts = {name: _parts(name, meta=meta) for name in meta}
    wanted = {part.source: part.shape for of_tensor in parts.values() for part in of_tensor}
    found = {name: tensor.shape for name, tensor in stored.items()}
    check_match(wanted, found, source=path, model_only=model_only)

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(meta[name], device="cpu")
        for part in parts[name]:
            overlap = part.overlap(tensor.shape, offset=(0,) * tensor.ndim, size=tensor.shape)
            assert overlap is not None
            overlap.in_box(tensor).copy_(overlap.in_source(saved.archive.read(stored[part.source])))
        return tensor

    settings = {} if model_only else saved.settings()
    return ForeignCheckpoint(
        meta=meta,
        read=read,
        progress=NOTHING_DONE if model_only else saved.progress(),
        warnings=(*unlike_settings(settings, optimizer=config.optimizer), *saved.dropout()),
    )


def _parts(name: str, *, meta: Mapping[str, Tensor]) -> list[TensorSlice]:
    """Returns the slices of nanoGPT's tensors that make up a tensor of a checkpoint here."""
    kind, parameter, *key = name.split("/")
    parts = slices_of(_RULES, parameter, shape=meta[MODEL + parameter].shape)
    if f"{kind}/" == MODEL:
        return parts
    if not meta[name].ndim:  # the number of steps, which is the same in each part
        parts = [TensorSlice(source=parts[0].source, shape=())]
    return [replace(part, source=_moment(part.source, *key)) for part in parts]


def _moment(name: str, key: str) -> str:
    """Returns the name of a tensor of the optimizer's state."""
    return f"{OPTIMIZER}{name}/{key}"


class NanoGPTCheckpoint:
    """The tensors and numbers of a ckpt.pt. DocumentError if it is damaged, or holds other or more than these."""

    def __init__(self, path: Path) -> None:
        self.archive = TorchArchive(path, size=path.stat().st_size, where=str(path))
        self._path = path
        match self.archive.value:
            case {
                "model": dict(model), "optimizer": {"state": dict(states), "param_groups": [dict(decayed), dict(rest)]},
                "model_args": dict(arguments), "iter_num": int(iterations), "config": dict(config),
            }:  # fmt: skip
                self._states = states
                self._groups = decayed, rest
                self._arguments = arguments
                self._iterations = iterations
                self._config = config
            case _:
                what = "lacks model, model_args, config, iter_num, or an optimizer with two groups"
                raise DocumentError(f"{path}: {what}; give a ckpt.pt that nanoGPT has saved")
        self.weights = {
            str(name).removeprefix("_orig_mod."): self._stored(value, name=f"model: {name}")
            for name, value in model.items()
            if not str(name).endswith(".attn.bias")  # the causal mask
        }

    def _stored(self, value: object, *, name: str) -> StoredTensor:
        if (stored := self.archive.as_tensor(value)) is None:
            raise DocumentError(f"{self._path}: {shorten(name)} is no tensor; give a ckpt.pt that nanoGPT has saved")
        return stored

    def check_arguments(self, args: Any) -> None:
        """Raises ConfigError where arguments that no shape shows differ from those of the model."""
        if unknown := [str(name) for name in self._arguments if name not in _ARGUMENTS]:
            what = f"{self._path}: model_args has {shorten(unknown[0])}, which models of nanoGPT do not have"
            raise ConfigError(f"{what}; convert one that its own code has saved")
        for name, theirs in {"n_heads": self._arguments.get("n_head"), **_SAME}.items():
            if (ours := getattr(args, name)) != theirs:
                what = (
                    f"model.args.{name} = {toml_like(ours)}, and the model of {self._path} has {shorten(repr(theirs))}"
                )
                raise ConfigError(f"{what}; set it to that")

    def without_copy(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Returns the tensors without the output weight, which is the embedding; ConfigError if it is another one."""
        both = [stored[name] for name in (_EMBEDDING, _OUTPUT) if name in stored]
        if len({each.storage for each in both}) > 1 and not torch.equal(*map(self.archive.read, both)):
            what = f"{self._path}: {_OUTPUT} differs from the embedding, and model.args.tied_embeddings is true"
            raise ConfigError(f"{what}; set it to false")
        return {name: tensor for name, tensor in stored.items() if name != _OUTPUT}

    def moments(self) -> dict[str, StoredTensor]:
        """Returns the state of AdamW, which numbers matrices and then vectors, both in the order of the model."""
        names = [name for name in self.weights if name != _OUTPUT]
        matrices, vectors = ([name for name in names if (len(self.weights[name].shape) > 1) == each] for each in (1, 0))
        numbered = dict(enumerate([*matrices, *vectors]))
        wanted = [[*range(len(matrices))], [*range(len(matrices), len(names))]]
        if [group.get("params") for group in self._groups] != wanted or self._states.keys() != numbered.keys():
            what = "the optimizer has other groups than all matrices and all vectors of the model, in its order"
            raise DocumentError(f"{self._path}: {what}; convert the weights alone with --model_only")
        states = {name: Value(self._states[number], where=str(self._path)) for number, name in numbered.items()}
        return {
            _moment(name, key): self._stored(value, name=f"optimizer: {name}: {key}")
            for name, state in states.items()
            for key, value in state.plain_entries().items()
        }

    def progress(self) -> Progress:
        """Returns the iterations as steps, and the tokens of that many batches."""
        where = f"{self._path}: iter_num"
        step = Value(self._iterations, where=where).integer(high=10**MAX_DIGITS - 1)
        tables = {
            "batch_size": self._config,
            "gradient_accumulation_steps": self._config,
            "block_size": self._arguments,
        }
        sizes = [Value(table.get(key), where=f"{self._path}: {key}").integer() for key, table in tables.items()]
        tokens = Value(step * prod(sizes), where=f"{where} in tokens").integer()
        return Progress(step=step, tokens_seen=tokens, skipped_steps=0, data={})

    def settings(self) -> dict[str, Sequence[float]]:
        """Returns settings of the optimizer by torch's names, with the highest learning rate."""
        decayed, highest = self._groups[0], self._config.get("learning_rate")
        settings = {"lr": [highest], "betas": decayed.get("betas")}
        settings |= {name: [decayed.get(name)] for name in ("eps", "weight_decay")}
        return {
            name: values
            for name, values in settings.items()
            if isinstance(values, list | tuple) and all(type(each) in (int, float) for each in values)
        }

    def dropout(self) -> list[str]:
        """Returns a warning if the model was trained with dropout."""
        share = self._arguments.get("dropout", 0.0)
        what = f"the run that saved the checkpoint had dropout {shorten(repr(share))}; there is none here"
        return [what] if share else []
