"""Initial weights in the format of the Hugging Face hub: the model of a folder, and its comparison with a run's."""

import logging
import re
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.downloads import find_downloaded
from torchtitan_clone.config.render import toml_like
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.config.schema_training import Model
from torchtitan_clone.data.tokenizer import TOKENIZER_FILE, Tokenizer, build_tokenizer
from torchtitan_clone.documents import DocumentError, read_member, shorten
from torchtitan_clone.hub.folder import CONFIG_FILE, WeightFolder, open_weight_folder
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.keys import Arguments
from torchtitan_clone.hub.quantized import find_scaling_error
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.ops.tensor_slices import TensorSlices, sources_of

logger = logging.getLogger("torchtitan_clone")

_MAY_DIFFER_SILENTLY = {"max_seq_len"}
_OF_VOCABULARY = ("tok_embeddings.weight", "output.weight")
_MAY_BE_LESS = {"mtp_depth"}
"""Arguments that may be smaller than those of a folder, whose other tensors are left out then."""
_MAY_DIFFER = {"rope_theta", "rope_scaling"}
"""Arguments that are changed on purpose to train with longer sequences."""


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """A folder of weights whose tensors match the model's."""

    folder: WeightFolder
    slices: TensorSlices
    warnings: tuple[str, ...]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the weights into parameters and buffers, global tensors or shards, by our names."""
        self.folder.fill({name: tensor.detach() for name, tensor in tensors.items()}, slices=self.slices)

    def load_into(self, tensors: Mapping[str, Tensor], *, log_warnings: bool) -> None:
        """Does the same as fill(), and logs its duration and the warnings."""
        start = time.perf_counter()
        self.fill(tensors)
        for warning in self.warnings if log_warnings else ():
            logger.warning("%s", warning)
        logger.info("weights of %s, read in %.1f s", self.folder.path, time.perf_counter() - start)


def initial_weights_path(checkpoint: Checkpoint, model: Model) -> Path:
    """Returns the folder that `checkpoint.initial_load_in_hf` reads; ConfigError where neither option names one."""
    path = checkpoint.initial_load_path or model.hf_assets_path
    if path is None:
        raise ConfigError(
            "checkpoint.initial_load_in_hf = true: set checkpoint.initial_load_path, or model.hf_assets_path, to the "
            "folder that holds the .safetensors files"
        )
    return find_downloaded(path, repository="model")


def has_other_tokenizer(folder: Path, *, tokenizer: Tokenizer) -> bool:
    """Returns whether the folder has a tokenizer, and not this one."""
    try:
        content = read_member(folder, name=TOKENIZER_FILE)
    except (DocumentError, OSError):
        return False  # opening the weights says what is wrong with the folder
    return content is not None and not tokenizer.is_made_of(content)


def check_tokenizer(folder: Path, *, model: Model, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the folder has another tokenizer than the bundled one, and no option selects one."""
    if model.hf_assets_path is None and has_other_tokenizer(folder, tokenizer=tokenizer):
        raise ConfigError(
            f"checkpoint.initial_load_path = {toml_like(str(folder))}: its {TOKENIZER_FILE} is not the bundled one, "
            "with which the run would train these weights; set model.hf_assets_path to this folder, or to that of the "
            "tokenizer to train with"
        )


def family_of_folder(folder: WeightFolder) -> ModelSpec:
    """Returns the family of the folder's config.json; ConfigError if there is none."""
    try:
        return family_of_config(folder.config)
    except ConfigError as error:
        raise ConfigError(f"{folder.path}: {error}") from None


def family_of_config(config: Mapping[str, object]) -> ModelSpec:
    """Returns the family of a config.json; ConfigError if there is none."""
    for spec in MODELS.values():
        if format_of(spec).is_format_of(config):
            return spec
    kind = shorten(repr(config.get("model_type")))
    rule = f"model_type = {kind}: no family has this type; known families: {', '.join(MODELS)}"
    raise ConfigError(f"{CONFIG_FILE}: {rule}")


def model_of_folder(folder: WeightFolder, *, spec: ModelSpec) -> Model:
    """Returns the `[model]` table that the folder's config.json asks for; ConfigError if the family has no such model.

    It has the flavor that differs in the fewest arguments, and these. Arguments that are unset the flavor must leave
    unset too.
    """
    wanted, _ = _arguments_of_folder(folder, spec=spec)
    args = {name: value for name, value in wanted.items() if value is not None}
    assets = str(folder.path) if (folder.path / TOKENIZER_FILE).is_file() else None
    found: list[Model] = []
    for flavor, own in spec.flavors.items():
        differing = {name: value for name, value in args.items() if format_of(spec).arguments(own)[name] != value}
        model = Model(name=spec.name, flavor=flavor, args=differing, hf_assets_path=assets)
        if format_of(spec).arguments(spec.resolve_args(model)) == wanted:
            found.append(model)
    if found:
        return min(found, key=lambda model: len(model.args))
    unset = ", ".join(name for name in wanted if name not in args)
    raise ConfigError(f"{folder.path / CONFIG_FILE}: no flavor of {spec.name} leaves {unset} unset, as it asks for")


def model_of_start(checkpoint: Checkpoint, model: Model) -> Model:
    """Returns the `[model]` table of a run that starts from a folder whose config.json decides; logs what was read.

    Arguments and the tokenizer of `model` precede those of the folder. ConfigError as the other functions here.
    """
    path = initial_weights_path(checkpoint, model)
    folder = open_weight_folder(path)
    found = model_of_folder(folder, spec=family_of_folder(folder))
    changed = toml_like(found.args) if found.args else "no other arguments"
    logger.info("%s: %s %s, with %s", path / CONFIG_FILE, found.name, found.flavor, changed)
    given = checkpoint.initial_load_path or model.hf_assets_path  # the name of a download says more than its folder
    own = given if found.hf_assets_path and has_other_tokenizer(path, tokenizer=build_tokenizer(None)) else None
    args, assets = _merged(found.args, model.args), model.hf_assets_path or own
    return replace(model, name=found.name, flavor=found.flavor, args=args, hf_assets_path=assets)


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Returns arguments of both; of a table with both, such as `moe`, the same of its entries."""
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(low := below[name], Mapping) and isinstance(high := above[name], Mapping):
            merged[name] = _merged(cast("Mapping[str, object]", low), cast("Mapping[str, object]", high))
    return merged


def _arguments_of_folder(folder: WeightFolder, *, spec: ModelSpec) -> tuple[Arguments, list[str]]:
    """Returns the arguments of the model that is in the folder, and warnings; ConfigError if the family has none."""
    hub = format_of(spec)
    return hub.without_absent_layers(hub.from_config(folder.config), names=folder.entries)


def open_initial_weights(
    path: Path, *, spec: ModelSpec, model_args: ModelArgs, state: Mapping[str, Tensor], chosen: Container[str] = (),
    resize: bool = False,
) -> InitialWeights:  # fmt: skip
    """Returns the folder after comparing it with the model; ConfigError with every difference.

    `state` has the dtype and shape of each parameter and persistent buffer, `chosen` names the arguments that the user
    has set, of which some may differ from those of the folder. With `resize` its vocabulary may differ too.
    """
    folder = open_weight_folder(path)
    hub = format_of(spec).of_folder(folder.entries)
    prefix = hub.prefix(folder.config)
    silent = (set() if model_args.learns_positions else _MAY_DIFFER_SILENTLY) | ({"vocab_size"} if resize else set())
    problems, warnings = _compare_arguments(folder, spec=spec, model_args=model_args, chosen=chosen, silent=silent)
    slices = hub.map_state(state, args=model_args, prefix=prefix)
    if not problems and model_args.tied_embeddings:
        problems = _compare_tied(folder, slices["tok_embeddings.weight"][0].source, f"{prefix}lm_head.weight")
    if resize:
        names = {part.source for name in _OF_VOCABULARY for part in slices.get(name, ())}
        folder, resized = folder.with_rows(names, count=model_args.vocab_size)
        warnings += resized
    if not problems:
        warnings += hub.describe_leftovers(folder.entries, args=model_args)
        problems = _compare_tensors(folder, spec=spec, args=model_args, state=state, slices=slices)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return InitialWeights(folder=folder, slices=slices, warnings=tuple(warnings))


def _compare_arguments(
    folder: WeightFolder, *, spec: ModelSpec, model_args: ModelArgs, chosen: Container[str], silent: Container[str]
) -> tuple[list[str], list[str]]:
    """Returns problems and warnings: how the model differs from the one that config.json describes."""
    try:
        wanted, warnings = _arguments_of_folder(folder, spec=spec)
    except ConfigError as error:
        return error.messages, []
    ours, theirs = _flat(format_of(spec).arguments(model_args)), _flat(wanted)
    problems: list[str] = []
    for name in (name for name in theirs if theirs[name] != ours[name] and name not in silent):
        if name in _MAY_BE_LESS and ours[name] < theirs[name]:
            continue
        now, then = ("unset" if value is None else toml_like(value) for value in (ours[name], theirs[name]))
        text = f"model.args.{name} is {now}, but {CONFIG_FILE} asks for {then}"
        then = '{rope_type = "default"}' if theirs[name] is None else then
        if name in _MAY_DIFFER and name in chosen:
            warnings.append(f"{text}; the run uses {now}, as model.args.{name} says")
        elif name in _MAY_DIFFER:
            now = '{rope_type = "default"}' if ours[name] is None else now
            problems.append(f"{text}; set model.args.{name} = {then}, or = {now} to change the positions of the model")
        else:
            more = ", or checkpoint.resize_vocabulary = true" if name == "vocab_size" else ""
            problems.append(f"{text}; set model.args.{name} = {then}{more}")
    return problems, warnings


def _compare_tied(folder: WeightFolder, *names: str) -> list[str]:
    """Returns a problem if a tied model has an output weight of its own; transformers would then untie it."""
    if names[1] not in folder.entries or folder.has_equal_values(*names):
        return []
    rule = f"tie_word_embeddings = true in {CONFIG_FILE}, but {names[1]} differs from {names[0]}"
    return [f"{rule}; set it to false there and in model.args.tied_embeddings to keep both, or remove {names[1]}"]


def _flat(arguments: Arguments) -> Arguments:
    """Returns the arguments with those of experts by their names, as moe.top_k."""
    others = {name: value for name, value in arguments.items() if name != "moe"}
    return others | {f"moe.{name}": value for name, value in arguments.get("moe", {}).items()}


def _compare_tensors(
    folder: WeightFolder, *, spec: ModelSpec, args: ModelArgs, state: Mapping[str, Tensor], slices: TensorSlices
) -> list[str]:
    """Returns how names, shapes and dtypes differ from those of the model."""
    wanted = sources_of(slices)
    stored = {folder.stored_as(name): part for name, ((_, part), *_) in wanted.items()}
    needed = {name for name, part in stored.items() if not (part.is_copy or part.is_optional)}
    missing = [name for name in stored if name in needed and name not in folder.entries]
    unknown = [name for name in folder.entries if name not in stored]
    scales = {scales.name: name for name in wanted if (scales := folder.scales_of(name)) is not None}
    leftover = partial(format_of(spec).is_leftover, args=args)
    extra = [name for name in unknown if name not in scales and not leftover(name)]
    problems = [f"lacks {_listed(_by_expert(missing))}"] if missing else []
    problems += [f"holds {_listed(extra)}, which {spec.name} does not have"] if extra else []
    for name, ((ours, part), *_) in wanted.items():
        if folder.stored_as(name) in folder.entries and (
            problem := _mismatch(folder, name, part.shape, state[ours].dtype)
        ):
            problems.append(problem)
    return problems


def _mismatch(folder: WeightFolder, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    entry = folder.entries[folder.stored_as(name)]
    scales = folder.scales_of(name)
    if scales is not None and name not in folder.entries:
        return find_scaling_error(entry, scales, shape=shape)
    if entry.shape != shape:
        return f"{entry.name} has shape {shorten(str(list(entry.shape)))}, and the model's has {list(shape)}"
    if scales is not None:
        return find_scaling_error(entry, scales, shape=shape)
    stored = entry.torch_dtype
    both_float = stored is not None and stored.is_floating_point and dtype.is_floating_point
    if stored != dtype and not (both_float and entry.item_bytes > 1):
        return f"{entry.name} has type {entry.dtype}; quantized weights cannot be trained on; convert them to bfloat16"
    return None


def _by_expert(names: list[str]) -> list[str]:
    """Returns the names, with those that differ only in the number of the expert as one: experts.{2, 5-7}.w."""
    numbers: dict[tuple[str, ...], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)
        numbers.setdefault((match[1], match[3]) if match else (name,), []).extend([int(match[2])] if match else [])
    return [_spans(sorted(experts)).join(name) if experts else name[0] for name, experts in numbers.items()]


def _spans(numbers: list[int]) -> str:
    """Returns ascending numbers as text: 3, or {2, 5-7}."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts) if len(numbers) == 1 else f"{{{', '.join(texts)}}}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(shorten(name) for name in names[:5])}{more}"
