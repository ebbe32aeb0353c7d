"""Opens the data that the options name: one dataset, or the sources of a mixture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import shown
from torchtitan_clone.config.schema import Data, DataSource, Training
from torchtitan_clone.config.stages import WHOLE_RUN
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.mixture_dataset import MixtureDataset
from torchtitan_clone.data.preparation import prepare_store
from torchtitan_clone.data.row_reader import Dataset
from torchtitan_clone.data.sources import describe_source, find_source, hub_id
from torchtitan_clone.data.streaming import HubDataset, open_hub
from torchtitan_clone.data.token_dataset import TokenDataset
from torchtitan_clone.data.tokenizer import Tokenizer


def open_dataset(*, training: Training, data: Data, tokenizer: Tokenizer, mixture: Mixture | None = None) -> Dataset:
    """Opens the dataset that the options name, and tokenizes local files first if that has not been done.

    Call it before process groups start, see prepare_store. ConfigError if the data cannot be read.
    """
    if mixture is None:
        return _open_source(training, data=data, tokenizer=tokenizer)
    sources: dict[str, TokenDataset | HubDataset] = {}
    for source in data.sources:
        with _naming(source):
            sources[source.name] = _open_source(_options_of(source, training), data=data, tokenizer=tokenizer)
    sources = sources or {WHOLE_RUN: _open_source(training, data=data, tokenizer=tokenizer)}
    limits = {source.name: source.max_epochs for source in data.sources if source.max_epochs is not None}
    return MixtureDataset(mixture=mixture, sources=sources, max_epochs=limits)


def describe_data(*, training: Training, data: Data) -> str:
    """Returns a one-line description of the data that the options name; ConfigError if local files are missing."""
    if not data.sources:
        return describe_source(training)
    found: list[str] = []
    problems: list[str] = []
    for source in data.sources:
        try:
            with _naming(source):
                found.append(f"{source.name}: {describe_source(_options_of(source, training))}")
        except ConfigError as error:
            problems += error.messages
    if problems:
        raise ConfigError(problems)
    return "; ".join(found)


def _open_source(training: Training, *, data: Data, tokenizer: Tokenizer) -> TokenDataset | HubDataset:
    if dataset := hub_id(training):
        return open_hub(dataset, training=training, data=data, tokenizer=tokenizer)
    return TokenDataset(store=prepare_store(find_source(training), tokenizer=tokenizer, data=data))


def _options_of(source: DataSource, training: Training) -> Training:
    """Returns the options of a source as those of a run that has no other."""
    options = replace(
        training,
        dataset=source.dataset or training.dataset,
        dataset_path=source.path,
        text_key=source.text_key,
    )
    if source.max_epochs is not None and hub_id(options):
        limit = f"max_epochs = {source.max_epochs:g}"
        raise ConfigError(f"{limit}: the size of a dataset that is streamed is not known; remove it, or set path.")
    return options


@contextmanager
def _naming(source: DataSource) -> Iterator[None]:
    """Names the source and its own options in a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_of_source(source, message) for message in error.messages]) from error


def _of_source(source: DataSource, message: str) -> str:
    for option, name in (("dataset_path", "path"), ("dataset", "dataset"), ("text_key", "text_key")):
        message = message.replace(f"training.{option}", name)
    return f"data.sources, name {shown(source.name)}: {message}"
