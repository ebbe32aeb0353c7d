"""Opens the data that the options name: one dataset, or the sources of a mixture.

What only some runs need is imported where they do: hub datasets, mixtures, and what tokenizes files.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from torchtitan_clone import doors
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.resolved import hub_id
from torchtitan_clone.config.schema_training import Data, DataSource, Training
from torchtitan_clone.config.stages import SOURCE_OPTIONS, WHOLE_RUN, reads_chats
from torchtitan_clone.config.urls import data_url, find_url_errors
from torchtitan_clone.data.dataset import Dataset, TokenDataset
from torchtitan_clone.data.token_store import PART_BYTES, TokenStore
from torchtitan_clone.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

    from torchtitan_clone.data.mixture import Mixture
    from torchtitan_clone.data.sources import Source
    from torchtitan_clone.data.streaming import HubDataset

logger = logging.getLogger("torchtitan_clone")

T = TypeVar("T")
Report = Callable[[int], None]
LOG_SECONDS = 10.0


class DocumentTools(Protocol):
    """What a package offers that compares documents: `torchtitan_clone/tools/door.py`."""

    def drop_duplicates(self, stores: Mapping[str, TokenStore]) -> dict[str, TokenStore]:
        """Returns the stores without documents that occur before in the same or an earlier one; ConfigError."""
        ...


def open_dataset(*, training: Training, data: Data, tokenizer: Tokenizer, mixture: "Mixture | None" = None) -> Dataset:
    """Opens the dataset that the options name, and tokenizes local files first if that has not been done.

    Call it before process groups start, see prepare_store. ConfigError if the data cannot be read.
    """

    def open_stream(options: Training) -> "HubDataset | None":
        if not (dataset := hub_id(options)):
            return None
        from torchtitan_clone.data.streaming import open_hub

        return open_hub(dataset, training=options, data=data, tokenizer=tokenizer)

    streamed = _of_each_source(open_stream, training=training, data=data)
    stores = prepare_sources(training=training, data=data, tokenizer=tokenizer)
    opened = {name: stream or TokenDataset(store=stores[name]) for name, stream in streamed.items()}
    if mixture is None:
        return opened[WHOLE_RUN]
    from torchtitan_clone.data.mixture_dataset import MixtureDataset

    limits = {source.name: source.max_epochs for source in data.sources if source.max_epochs is not None}
    return MixtureDataset(mixture=mixture, sources=opened, max_epochs=limits)


def ending_as_trained(tokenizer: Tokenizer, *, training: Training, data: Data) -> Tokenizer:
    """Returns the tokenizer of a run's generated texts: they end where turns do, if the run trains on chats."""
    if not reads_chats(data, training=training):
        return tokenizer
    from torchtitan_clone.data.chat import with_end_of_turn

    return with_end_of_turn(tokenizer)


def describe_source(training: Training) -> str:
    """Returns a one-line description of the data that the options name; ConfigError if local files are missing."""
    from torchtitan_clone.data.marks import ChatOptions
    from torchtitan_clone.data.sources import find_source

    if url := _url_of(training):
        from torchtitan_clone.data.remote import describe_remote

        return describe_remote(url)
    is_chat = training.format == "chat"
    chats = f"chats, of which {ChatOptions.of(training).describe()} are targets" if is_chat else ""
    if name := hub_id(training):
        return "; ".join(filter(None, [f"{name}, streamed from the Hugging Face hub", chats]))
    source = find_source(training)
    described = f"{source.name}, {len(source.files):,} files in {source.root}"
    return "; ".join(filter(None, [described, chats, source.left_out]))


def describe_data(*, training: Training, data: Data) -> str:
    """Returns a one-line description of the data of all sources; ConfigError if local files are missing."""
    descriptions = _of_each_source(describe_source, training=training, data=data)
    return "; ".join(f"{name}: {each}" if data.sources else each for name, each in descriptions.items())


def find_sources(*, training: Training, data: Data) -> "dict[str, Source]":
    """Returns the files of each source that is prepared here, by its name; ConfigError if some are missing.

    Files in an object store are fetched first.
    """
    sources = _of_each_source(partial(_find_source, data=data), training=training, data=data)
    return {name: source for name, source in sources.items() if source is not None}


def _url_of(training: Training) -> str | None:
    """Returns the URL of an object store that holds the data; None if none does. ConfigError if it cannot be one."""
    if errors := list(find_url_errors("training.dataset_path", training.dataset_path or "")):
        raise ConfigError(errors)
    return data_url(training.dataset_path)


def _find_source(options: Training, *, data: Data) -> "Source | None":
    from torchtitan_clone.data.sources import find_source

    if hub_id(options):
        return None
    if not (url := _url_of(options)):
        return find_source(options)
    from torchtitan_clone.data.remote import fetch_files

    path = fetch_files(url, data=data)
    return path and replace(find_source(replace(options, dataset_path=str(path))), name=url)


def _open_remote(options: Training, *, data: Data, tokenizer: Tokenizer) -> TokenStore | None:
    if not (url := _url_of(options)):
        return None
    from torchtitan_clone.data.remote import open_remote_store

    return open_remote_store(url, training=options, data=data, tokenizer=tokenizer)


def prepare_sources(
    *, training: Training, data: Data, tokenizer: Tokenizer, part_bytes: int = PART_BYTES
) -> dict[str, TokenStore]:
    """Returns the store of each source that is not streamed, and makes those that are missing; ConfigError as there."""
    from torchtitan_clone.data.preparation import prepare_store

    tools = cast("DocumentTools | None", doors.find("tools") if data.drop_duplicates else None)
    if data.drop_duplicates and tools is None:  # before text is tokenized
        raise ConfigError(f"data.drop_duplicates = true: {doors.why_closed('tools')}, or set the option to false.")
    prepare = partial(prepare_store, tokenizer=tokenizer, data=data, part_bytes=part_bytes)
    remote = _of_each_source(partial(_open_remote, data=data, tokenizer=tokenizer), training=training, data=data)
    prepared = _prepare_each(prepare, training=training, data=data)
    stores = {name: store for name in remote if (store := remote[name] or prepared.get(name))}
    return stores if tools is None else tools.drop_duplicates(stores)


def prepare_share(
    *, training: Training, data: Data, tokenizer: Tokenizer, part_bytes: int, task: int, tasks: int
) -> bool:
    """Makes the parts of all local sources that are those of one of several tasks; returns whether now all exist."""
    from torchtitan_clone.data.preparation import prepare_parts

    share = {"part_bytes": part_bytes, "task": task, "tasks": tasks}
    prepare = partial(prepare_parts, tokenizer=tokenizer, data=data, **share)
    return all(_prepare_each(prepare, training=training, data=data).values())


def _prepare_each(prepare: Callable[..., T], *, training: Training, data: Data) -> dict[str, T]:
    """Prepares the local sources one after another, by the same parallel processes, with one progress bar."""
    from torchtitan_clone.data.preparation import tokenizer_processes

    sources = find_sources(training=training, data=data)
    sizes = {name: sum(file.stat().st_size for file in source.files) for name, source in sources.items()}
    prepared: dict[str, T] = {}
    with show_progress(total=sum(sizes.values())) as report, tokenizer_processes(data) as processes:
        for name, source in sources.items():
            before = sum(sizes[each] for each in prepared)
            with _naming(name, data=data):
                prepared[name] = prepare(
                    source, processes=processes, report=lambda size, before=before: report(before + size)
                )
    return prepared


def _of_each_source(act: Callable[[Training], T], *, training: Training, data: Data) -> dict[str, T]:
    """Returns what a function makes of the options of each source; ConfigError with the problems of all."""
    results: dict[str, T] = {}
    problems: list[str] = []
    options = {source.name: partial(_options_of, source, training) for source in data.sources}
    for name, options_of_source in (options or {WHOLE_RUN: lambda: training}).items():
        try:
            with _naming(name, data=data):
                results[name] = act(options_of_source())
        except ConfigError as error:
            problems += error.messages
    if problems:
        raise ConfigError(problems)
    return results


def _options_of(source: DataSource, training: Training) -> Training:
    """Returns the options of a source as those of a run that has no other."""
    dataset = training.dataset if source.dataset is None else source.dataset
    own = {name: getattr(source, name) for name in SOURCE_OPTIONS}
    options = replace(training, dataset=dataset, dataset_path=source.path, **own)
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
    for option in ("dataset_path", "dataset", *SOURCE_OPTIONS):
        message = message.replace(f"training.{option}", option.removeprefix("dataset_"))
    return message


@contextmanager
def show_progress(*, total: int) -> Iterator[Report]:
    """Yields a function that shows the bytes read so far: a progress bar on a terminal, else log messages."""
    last_log = time.monotonic()
    bar: tqdm | None = None

    def report(bytes_read: int) -> None:
        nonlocal last_log, bar
        from tqdm import tqdm

        if bar is None:
            tqdm.set_lock(threading.RLock())  # a process that is killed would leave the semaphore of its own behind
            bar = shown.enter_context(tqdm(total=total, unit="B", unit_scale=True, desc="preparing data", disable=None))
        bar.update(bytes_read - bar.n)
        if bar.disable and time.monotonic() - last_log > LOG_SECONDS:
            last_log = time.monotonic()
            logger.info("preparing data: %.0f %% of %.1f MB", 100 * bytes_read / total, total / 1e6)

    with ExitStack() as shown:
        yield report
