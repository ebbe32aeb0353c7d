"""Opens the data that the options name: one dataset, or the sources of a mixture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema_training import Data, DataSource, Training
from torchtitan_clone.config.stages import WHOLE_RUN
from torchtitan_clone.data.duplicates import drop_duplicates
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.mixture_dataset import MixtureDataset
from torchtitan_clone.data.preparation import PART_BYTES, prepare_parts, prepare_store, show_progress
from torchtitan_clone.data.row_reader import Dataset
from torchtitan_clone.data.sources import Source, describe_source, find_source, hub_id
from torchtitan_clone.data.streaming import HubDataset, open_hub
from torchtitan_clone.data.token_dataset import TokenDataset
from torchtitan_clone.data.token_store import TokenStore
from torchtitan_clone.data.tokenizer import Tokenizer

T = TypeVar("T")


def open_dataset(*, training: Training, data: Data, tokenizer: Tokenizer, mixture: Mixture | None = None) -> Dataset:
    """Opens the dataset that the options name, and tokenizes local files first if that has not been done.

    Call it before process groups start, see prepare_store. ConfigError if the data cannot be read.
    """

    def open_stream(options: Training) -> HubDataset | None:
        dataset = hub_id(options)
        return open_hub(dataset, training=options, data=data, tokenizer=tokenizer) if dataset else None

    streamed = _of_each_source(open_stream, training=training, data=data)
    stores = prepare_sources(training=training, data=data, tokenizer=tokenizer)
    opened = {name: stream or TokenDataset(store=stores[name]) for name, stream in streamed.items()}
    if mixture is None:
        return opened[WHOLE_RUN]
    limits = {source.name: source.max_epochs for source in data.sources if source.max_epochs is not None}
    return MixtureDataset(mixture=mixture, sources=opened, max_epochs=limits)


def describe_data(*, training: Training, data: Data) -> str:
    """Returns a one-line description of the data that the options name; ConfigError if local files are missing."""
    found = _of_each_source(describe_source, training=training, data=data)
    return "; ".join(f"{name}: {each}" if data.sources else each for name, each in found.items())


def find_sources(*, training: Training, data: Data) -> dict[str, Source]:
    """Returns the files of each local source by its name; ConfigError if some are missing."""
    found = _of_each_source(
        lambda options: None if hub_id(options) else find_source(options), training=training, data=data
    )
    return {name: source for name, source in found.items() if source is not None}


def prepare_sources(
    *, training: Training, data: Data, tokenizer: Tokenizer, part_bytes: int = PART_BYTES
) -> dict[str, TokenStore]:
    """Returns the store of each local source by its name, and makes those that do not exist; ConfigError as there."""
    prepare = partial(prepare_store, tokenizer=tokenizer, data=data, part_bytes=part_bytes)
    stores = _prepare_each(prepare, training=training, data=data)
    return drop_duplicates(stores) if data.drop_duplicates else stores


def prepare_share(
    *, training: Training, data: Data, tokenizer: Tokenizer, part_bytes: int, task: int, tasks: int
) -> bool:
    """Makes the parts of all local sources that are those of one of several tasks; returns whether now all exist."""
    share = {"part_bytes": part_bytes, "task": task, "tasks": tasks}
    prepare = partial(prepare_parts, tokenizer=tokenizer, data=data, **share)
    return all(_prepare_each(prepare, training=training, data=data).values())


def _prepare_each(prepare: Callable[..., T], *, training: Training, data: Data) -> dict[str, T]:
    """Prepares the local sources one after another, each in parallel processes, with one progress bar."""
    sources = find_sources(training=training, data=data)
    sizes = {name: sum(file.stat().st_size for file in source.files) for name, source in sources.items()}
    found: dict[str, T] = {}
    with show_progress(total=sum(sizes.values())) as report:
        for name, source in sources.items():
            before = sum(sizes[each] for each in found)
            with _naming(name, data=data):
                found[name] = prepare(source, report=lambda size, before=before: report(before + size))
    return found


def _of_each_source(act: Callable[[Training], T], *, training: Training, data: Data) -> dict[str, T]:
    """Returns what a function makes of the options of each source; ConfigError with the problems of all."""
    found: dict[str, T] = {}
    problems: list[str] = []
    options = {source.name: partial(_options_of, source, training) for source in data.sources}
    for name, options_of_source in (options or {WHOLE_RUN: lambda: training}).items():
        try:
            with _naming(name, data=data):
                found[name] = act(options_of_source())
        except ConfigError as error:
            problems += error.messages
    if problems:
        raise ConfigError(problems)
    return found


def _options_of(source: DataSource, training: Training) -> Training:
    """Returns the options of a source as those of a run that has no other."""
    dataset = training.dataset if source.dataset is None else source.dataset
    options = replace(training, dataset=dataset, dataset_path=source.path, text_key=source.text_key)
    if source.max_epochs is not None and hub_id(options):
        limit = f"max_epochs = {source.max_epochs:g}"
        raise ConfigError(f"{limit}: the size of a dataset that is streamed is not known; remove it, or set path.")
    return options


@contextmanager
def _naming(name: str, *, data: Data) -> Iterator[None]:
    """Names the source of a mixture, and its own options, in a ConfigError."""
    try:
        yield
    except ConfigError as error:
        if not data.sources:
            raise
        place = f"data.sources, name {shown(name)}"
        raise ConfigError([f"{place}: {with_own_options(message)}" for message in error.messages]) from error


def with_own_options(message: str) -> str:
    """Returns a message that names the options of an entry with a path instead of those of [training]."""
    for option, own in (("dataset_path", "path"), ("dataset", "dataset"), ("text_key", "text_key")):
        message = message.replace(f"training.{option}", own)
    return message
