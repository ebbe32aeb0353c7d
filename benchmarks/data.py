"""Measures reading and preparing data: rates of a core, start and memory on a large store.

    python benchmarks/data.py
    python benchmarks/data.py prepare --mb=500
    python benchmarks/data.py store --rounds=7

`loader` reads batches of one and of five sources with masks of documents. `start` reads from a store of 10 billion
tokens, a sparse file, and from a small one. `prepare` tokenizes text of this machine, as does `tokenizers` alone;
`sources` prepares 60 KB each of 34 sources, and one source of the same size. `store` reads an epoch of a token store on
the disk, and of the same one in an object store, with all blocks in the cache and with none; a server and a proxy that
forwards --proxy-mb a second run on this machine.
What is compared takes turns; rates are by processor time, those of `store` by wall time.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])  # for its processes
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core is compared with a core

import numpy as np

from benchmarks.turns import processor_name
from torchtitan_clone.config.schema_training import Data, DataSource, Training
from torchtitan_clone.config.stages import Timeline, resolved_timeline
from torchtitan_clone.data import Loader, LoaderOptions, build_tokenizer
from torchtitan_clone.data.dataset import TokenDataset
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.mixture_dataset import MixtureDataset
from torchtitan_clone.data.opening import prepare_sources
from torchtitan_clone.data.token_store import (
    SplitWriter,
    StoreKey,
    StoreMeta,
    TokenStore,
    key_of,
    open_store,
    write_meta,
)
from torchtitan_clone.storage.blocks import BLOCK_BYTES
from torchtitan_clone.storage.objects import open_store as open_objects

PROCESSES = multiprocessing.get_context("forkserver")
NAMES = {"source_fingerprint": "", "tokenizer_fingerprint": ""}
KEY = StoreKey(**NAMES, format=1, vocab_size=2048, eos_id=0, held_out_fraction=0.0)
SUFFIXES = (".py", ".h", ".pyi", ".md", ".rst", ".txt")


def processor_seconds(step: Callable[[], int]) -> tuple[int, float]:
    """Returns the result of a function and the processor time that it took, with its processes that have ended."""
    before = sum(os.times()[:4])
    return step(), sum(os.times()[:4]) - before


def write_store(folder: Path, *, tokens: int, is_sparse: bool = False, key: StoreKey = KEY) -> None:
    """Writes a store of random documents, or one that takes no room on the disk: all tokens end a text."""
    folder.mkdir(parents=True)
    with closing(SplitWriter(folder, "train")) as train, closing(SplitWriter(folder, "validation")):
        ids = np.random.default_rng(0).integers(1, key.vocab_size, 0 if is_sparse else tokens).astype(np.uint16)
        ids[999::1000] = key.eos_id
        train.append(ids, np.full(tokens // 1000, 1000))
    os.truncate(folder / "train.tokens", 2 * tokens)
    counts = {"tokens": {"train": tokens, "validation": 0}, "documents": {"train": tokens // 1000, "validation": 0}}
    write_meta(StoreMeta(**asdict(key), source=folder.name, **counts, bad_rows=0, first_bad_rows=[]), folder=folder)


def open_loader(folders: list[Path]) -> Loader:
    """Opens a mixture of stores with equal shares, in batches of 32 rows of 2,048 tokens."""
    data = Data(sources=[DataSource(name=folder.name, path=str(folder)) for folder in folders])
    timeline = cast("Timeline", resolved_timeline(data, training=Training(seq_len=2048), global_batch_size=32))
    sources = {folder.name: TokenDataset(store=open_store(folder, key=KEY)) for folder in folders}
    dataset = MixtureDataset(mixture=Mixture(timeline, seed=0), sources=sources, max_epochs={})
    options = LoaderOptions(seq_len=2048, document_masking=True)
    return Loader(dataset, options=options, seed=0, global_batch_size=32)


def measure_loader(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields the rates of mixtures, which are read in turn."""
    for each in (folders := [folder / f"source {index}" for index in range(5)]):
        write_store(each, tokens=choices.tokens)
    loaders = {count: open_loader(folders[:count]) for count in (1, 5)}
    rates: dict[int, list[float]] = {count: [] for count in loaders}
    for _, count in product(range(choices.rounds), loaders):
        sizes = (batch.tokens_BT.numel() for batch in islice(loaders[count], 50))
        tokens, seconds = processor_seconds(partial(sum, sizes))
        rates[count].append(tokens / seconds / 1e6)
    for count, found in rates.items():
        yield f"{count} sources: {statistics.median(found):.1f} M tokens/s of a core"


def read_first_batches(folder: Path) -> tuple[float, float]:
    """Returns the seconds from opening a store to its tenth batch, and the peak memory of this process in MiB."""
    start = time.perf_counter()
    assert len([*islice(open_loader([folder]), 10)]) == 10
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_start(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields how long a process takes to its tenth batch, and its peak memory, with each store in turn."""
    found: dict[int, list[tuple[float, float]]] = {choices.tokens: [], choices.large_tokens: []}
    for tokens in found:
        write_store(folder / str(tokens), tokens=tokens, is_sparse=True)
    for _, tokens in product(range(choices.rounds), found):
        with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
            found[tokens].append(pool.submit(read_first_batches, folder / str(tokens)).result())
    for tokens, results in found.items():
        seconds, mib = map(statistics.median, zip(*results, strict=True))
        yield f"{tokens:>14,} tokens: tenth batch after {seconds:.3f} s, peak memory {mib:,.0f} MiB"


def serve_objects(pipe: Connection, megabytes: float) -> None:
    """Serves an object store until the other end of the pipe is closed; sends the environment of users, and a URL."""
    from tests.support.object_server import ObjectServer
    from torchtitan_clone.checkpoint.remote import Pace

    with ObjectServer() as server:
        server.proxy.pace = Pace(megabytes * 1e6 / 2**20)
        pipe.send((server.env, server.make_bucket()))
        with suppress(EOFError):
            pipe.recv()


def seconds_of_epoch(store: TokenStore) -> np.ndarray:
    """Returns wall and processor time, in seconds, from opening a loader of a store until all rows were read once."""
    start = time.perf_counter(), time.process_time()
    options, dataset = LoaderOptions(seq_len=2048, document_masking=True), TokenDataset(store=store)
    loader = Loader(dataset, options=options, seed=0, global_batch_size=32)
    for _ in islice(loader, dataset.num_rows("train", seq_len=2048) // 32):
        pass
    return np.array([time.perf_counter(), time.process_time()]) - start


def seconds_of_requests(url: str, *, size: int) -> float:
    """Returns the seconds of requests for the tokens of a store, without a loader: no cold one can be faster."""
    ranges = [(start, min(size, start + BLOCK_BYTES)) for start in range(0, size, BLOCK_BYTES)]
    start = time.perf_counter()
    objects = open_objects(url, timeout_seconds=60)
    assert sum(map(len, objects.get_ranges("train.tokens", ranges))) == size
    return time.perf_counter() - start


def measure_store(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields the rates of a local store and of one in an object store, warm and cold, which are read in turn."""
    from torchtitan_clone.data.remote import open_remote_store, put_token_store

    tokenizer, data = build_tokenizer(None), partial(Data, held_out_fraction=0.0)
    key = key_of("random ids", tokenizer=tokenizer, held_out_fraction=0.0)
    write_store(folder / f"{0:016}", tokens=choices.tokens, key=key)
    local = open_store(folder / f"{0:016}", key=key)
    here, there = PROCESSES.Pipe()
    server = PROCESSES.Process(target=serve_objects, args=(there, choices.proxy_mb))
    server.start()
    there.close()
    environment, url = here.recv()
    os.environ.update(environment)
    put_token_store(local, url)

    def open_through(cache: Path) -> TokenStore:
        options = {"training": Training(), "data": data(cache_folder=str(cache)), "tokenizer": tokenizer}
        return cast("TokenStore", open_remote_store(url, **options))

    seconds_of_epoch(open_through(folder / "warm"))
    seconds: dict[str, list[np.ndarray]] = {"local": [], "warm": [], "cold": []}
    alone: list[float] = []
    for number in range(choices.rounds):
        stores = {"local": local, "warm": open_through(folder / "warm"), "cold": open_through(folder / f"{number}")}
        for name in sorted(stores, reverse=number % 2 == 1):
            seconds[name].append(seconds_of_epoch(stores[name]))
        shutil.rmtree(folder / f"{number}")
        alone.append(seconds_of_requests(url, size=2 * choices.tokens))
    here.close()
    server.join()
    yield f"the store alone: {2 * choices.tokens / statistics.median(alone) / 1e6:.0f} MB/s"
    yield f"local: {choices.tokens / np.median(seconds['local'], axis=0)[0] / 1e6:.1f} M tokens/s"
    for name in ("warm", "cold"):
        ratios = np.array(seconds["local"]) / np.array(seconds[name])
        (low, _), (middle, by_processor), (high, _) = np.quantile(ratios, [0.25, 0.5, 0.75], axis=0)
        yield f"{name}: {middle:.3f} ({low:.3f} to {high:.3f}) of the local rate, {by_processor:.3f} by processor time"


def write_text(folder: Path, choices: argparse.Namespace, *, folders: int) -> list[Path]:
    """Writes text of this machine, each file a document, to folders of eight .jsonl files of equal size."""
    found = [path for root in choices.text for path in sorted(Path(root).rglob("*")) if path.suffix in SUFFIXES]
    random.Random(0).shuffle(found)
    texts = (path.read_text(errors="ignore") for path in found if path.is_file())
    for number, part in product(range(folders), range(8)):
        (each := folder / str(number)).mkdir(parents=True, exist_ok=True)
        with (each / f"{part}.jsonl").open("w") as output:
            while output.tell() < choices.mb * 1e6 / folders / 8 and (text := next(texts, None)) is not None:
                output.write(json.dumps({"text": text}) + "\n")
    return sorted(folder.iterdir())


def prepare(paths: list[Path], cache: Path, part_bytes: int) -> int:
    """Makes the stores of folders without duplicates, with one tokenizer process; returns their tokens."""
    sources = [DataSource(name=path.name, path=str(path)) for path in paths]
    data = Data(sources=sources, cache_folder=str(cache), drop_duplicates=True, prepare_processes=1)
    stores = prepare_sources(training=Training(), data=data, tokenizer=build_tokenizer(None), part_bytes=part_bytes)
    return sum(sum(store.meta.tokens.values()) for store in stores.values())


def measure_prepare(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields the rates of preparing files, and of the library, which encodes the texts from memory, in turn."""
    backend = build_tokenizer(None).backend
    ratios: list[float] = []
    for number, path in enumerate(write_text(folder / "text", choices, folders=choices.rounds)):
        texts = [json.loads(line)["text"] for file in sorted(path.iterdir()) for line in file.read_text().splitlines()]
        steps = {
            "prepared": partial(prepare, [path], folder / path.stem, 1 << 26),
            "alone": lambda texts=texts: sum(len(backend.encode_batch_fast([text])[0]) for text in texts),
        }
        measured = {name: processor_seconds(steps[name]) for name in sorted(steps, reverse=number % 2 == 1)}
        tokens, seconds = measured["alone"]
        ratios.append(seconds / measured["prepared"][1])
        yield f"{tokens:,} tokens: {tokens / seconds / 1e6:.3f} M/s by tokenizers, prepared at {ratios[-1]:.3f} of it"
    yield f"median {statistics.median(ratios):.3f}"


def measure_sources(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields the seconds until stores exist of many small sources and of one source, in turn."""
    size = argparse.Namespace(text=choices.text, mb=34 * 0.06)
    paths = {count: write_text(folder / str(count), size, folders=count) for count in (1, 34)}
    seconds: dict[int, list[float]] = {count: [] for count in paths}
    for number, count in product(range(choices.rounds), paths):
        start = time.perf_counter()
        prepare(paths[count], folder / f"cache {number} of {count}", 1 << 26)
        seconds[count].append(time.perf_counter() - start)
    one, many = (statistics.median(found) for found in seconds.values())
    yield f"34 sources: {many:.2f} s, {many / one:.2f} times as long as one source"


def main(argv: list[str]) -> None:
    """Measures in a temporary folder, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {
        "loader": measure_loader, "start": measure_start, "prepare": measure_prepare, "sources": measure_sources,
        "store": measure_store,
    }  # fmt: skip
    parser.add_argument("what", nargs="*", choices=[*by_name, []], default=[])
    for name, default in {"tokens": 50_000_000, "large-tokens": 10_000_000_000, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--text", nargs="+", default=[sys.prefix, "/usr"], help="folders with text")
    parser.add_argument("--proxy-mb", type=float, default=200, help="MB/s of the object store")
    parser.add_argument("--mb", type=float, default=20, help="size of the text")
    choices = parser.parse_args(argv)
    print(processor_name())
    PROCESSES.set_forkserver_preload(["torchtitan_clone.data"])
    for name in choices.what or by_name:
        with tempfile.TemporaryDirectory() as folder:
            for line in by_name[name](Path(folder), choices):
                print(f"{name:>8}: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
