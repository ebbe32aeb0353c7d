"""Measures reading and preparing data: rates of a core, start and memory on a large store, and kills.

    python benchmarks/data.py
    python benchmarks/data.py prepare kills --mb=500

`loader` reads batches of mixtures of one and of five sources with masks of documents. `start` reads from a store of 10
billion tokens, a sparse file, and from a small one. `prepare` tokenizes text of this machine, and lets the library
`tokenizers` alone encode the same text. `kills` ends preparations without duplicates by SIGKILL after random times, and
compares all stores with those that were made without a kill. What is compared takes turns; rates are by processor time.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import chain, islice, pairwise, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])  # for its processes

import numpy as np

from torchtitan_clone.config.schema import Data, DataSource, Training
from torchtitan_clone.config.stages import resolved_timeline
from torchtitan_clone.data import Loader, LoaderOptions, MixtureDataset, build_tokenizer
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.opening import prepare_sources
from torchtitan_clone.data.preparation import BATCH_CHARACTERS
from torchtitan_clone.data.token_dataset import TokenDataset
from torchtitan_clone.data.token_store import SplitWriter, StoreKey, StoreMeta, open_store, write_meta

PROCESSES = multiprocessing.get_context("forkserver")
KEY = StoreKey(
    format=1, source_fingerprint="", tokenizer_fingerprint="", vocab_size=2048, eos_id=0, held_out_fraction=0.0
)
DOCUMENT = 1000
"""Tokens of a document of the stores that are written here."""
SUFFIXES = (".py", ".h", ".pyi", ".md", ".rst", ".txt")


def processor_seconds(step: Callable[[], int]) -> tuple[int, float]:
    """Returns the result of a function and the processor time that it took, with its processes that have ended."""
    before = os.times()
    result = step()
    return result, sum(os.times()[:4]) - sum(before[:4])


def write_store(folder: Path, *, tokens: int, is_sparse: bool = False) -> None:
    """Writes a store of random documents, or one that takes no room on the disk: all tokens end a text."""
    folder.mkdir(parents=True)
    lengths = np.full(tokens // DOCUMENT, DOCUMENT)
    with closing(SplitWriter(folder, "train")) as train, closing(SplitWriter(folder, "validation")):
        ids = np.random.default_rng(0).integers(1, KEY.vocab_size, 0 if is_sparse else tokens).astype(np.uint16)
        ids[DOCUMENT - 1 :: DOCUMENT] = KEY.eos_id
        train.append(ids, lengths)
    os.truncate(folder / "train.tokens", 2 * tokens)
    counts = {"tokens": {"train": tokens, "validation": 0}, "documents": {"train": tokens // DOCUMENT, "validation": 0}}
    write_meta(StoreMeta(**asdict(KEY), source=folder.name, **counts, bad_rows=0, first_bad_rows=[]), folder=folder)


def open_loader(folders: list[Path]) -> Loader:
    """Opens a mixture of stores with equal shares, in batches of 32 rows of 2,048 tokens."""
    data = Data(sources=[DataSource(name=folder.name, path=str(folder)) for folder in folders])
    timeline = resolved_timeline(data, training=Training(seq_len=2048), global_batch_size=32)
    assert timeline is not None
    sources = {folder.name: TokenDataset(store=open_store(folder, key=KEY)) for folder in folders}
    dataset = MixtureDataset(mixture=Mixture(timeline, seed=0), sources=sources, max_epochs={})
    options = LoaderOptions(seq_len=2048, document_masking=True)
    return Loader(dataset, options=options, seed=0, global_batch_size=32)


def measure_loader(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields the rates of mixtures, which are read in turn."""
    folders = [folder / f"source {index}" for index in range(5)]
    for each in folders:
        write_store(each, tokens=choices.tokens)
    loaders = {count: open_loader(folders[:count]) for count in (1, 5)}
    rates: dict[int, list[float]] = {count: [] for count in loaders}
    for _, count in product(range(choices.rounds), loaders):
        batches = islice(loaders[count], 50)
        tokens, seconds = processor_seconds(lambda batches=batches: sum(each.tokens_BT.numel() for each in batches))
        rates[count].append(tokens / seconds / 1e6)
    for count, found in rates.items():
        yield f"{count} sources: {statistics.median(found):.1f} M tokens/s of a core"


def read_first_batches(folder: Path) -> tuple[float, float]:
    """Returns the seconds from opening a store to its tenth batch, and the peak memory of this process in MiB."""
    start = time.perf_counter()
    for _ in islice(open_loader([folder]), 10):
        pass
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_start(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields how long a process takes to its tenth batch, and its peak memory, with each store in turn."""
    sizes = (choices.tokens, choices.large_tokens)
    found: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in sizes}
    for tokens in sizes:
        write_store(folder / str(tokens), tokens=tokens, is_sparse=True)
    for _, tokens in product(range(choices.rounds), sizes):
        with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
            found[tokens].append(pool.submit(read_first_batches, folder / str(tokens)).result())
    for tokens, results in found.items():
        seconds, mib = (statistics.median(column) for column in zip(*results, strict=True))
        yield f"{tokens:>14,} tokens: tenth batch after {seconds:.3f} s, peak memory {mib:,.0f} MiB"


def write_text(folder: Path, choices: argparse.Namespace, *, folders: int) -> list[Path]:
    """Writes text of this machine, each file a document, to folders of eight .jsonl files of equal size."""
    found = [path for root in choices.text for path in sorted(Path(root).rglob("*")) if path.suffix in SUFFIXES]
    random.Random(0).shuffle(found)
    texts = (path.read_text(errors="ignore") for path in found if path.is_file())
    written = [folder / str(number) for number in range(folders)]
    for each, part in product(written, range(8)):
        each.mkdir(parents=True, exist_ok=True)
        with (each / f"{part}.jsonl").open("w") as output:
            while output.tell() < choices.mb * 1e6 / folders / 8 and (text := next(texts, None)) is not None:
                output.write(json.dumps({"text": text}) + "\n")
    return written


def prepare(paths: list[Path], cache: Path, part_bytes: int) -> int:
    """Makes the stores of folders without duplicates, with one tokenizer process; returns their tokens."""
    sources = [DataSource(name=path.name, path=str(path)) for path in paths]
    data = Data(sources=sources, cache_folder=str(cache), drop_duplicates=True, prepare_processes=1)
    stores = prepare_sources(training=Training(), data=data, tokenizer=build_tokenizer(None), part_bytes=part_bytes)
    return sum(sum(store.meta.tokens.values()) for store in stores.values())


def measure_prepare(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields the rates of preparing files, and of the library, which encodes the text from memory, in turn."""
    backend = build_tokenizer(None).backend
    ratios: list[float] = []
    for number, path in enumerate(write_text(folder / "text", choices, folders=choices.rounds)):
        lines = chain.from_iterable(file.read_text().splitlines() for file in sorted(path.iterdir()))
        texts = [json.loads(line)["text"] for line in lines]
        ends = np.flatnonzero(np.diff(np.cumsum([*map(len, texts)]) // BATCH_CHARACTERS)) + 1
        batches = [texts[first:last] for first, last in pairwise([0, *ends, len(texts)])]
        steps = {
            "prepared": partial(prepare, [path], folder / path.stem, 1 << 26),
            "alone": lambda batches=batches: sum(len(x) for each in batches for x in backend.encode_batch_fast(each)),
        }
        measured = {name: processor_seconds(steps[name]) for name in sorted(steps, reverse=number % 2 == 1)}
        tokens, seconds = measured["alone"]
        ratios.append(seconds / measured["prepared"][1])
        rate = f"{tokens / seconds / 1e6:.3f} M tokens/s of a core by tokenizers alone"
        yield f"{sum(map(len, texts)) / 1e6:.1f} MB, {tokens:,} tokens: {rate}, prepared at {ratios[-1]:.3f} of it"
    yield f"median {statistics.median(ratios):.3f}"


def contents(cache: Path) -> dict[str, bytes]:
    """Returns the hashes of all files of the stores of a cache."""
    files = [path for path in (cache / "stores").rglob("*") if path.is_file()]
    return {str(path.relative_to(cache)): hashlib.sha256(path.read_bytes()).digest() for path in files}


def measure_kills(folder: Path, choices: argparse.Namespace) -> Iterator[str]:
    """Yields how many preparations were killed and continued until one completed, and whether the stores are equal."""
    generator = random.Random(0)
    texts = write_text(folder / "text", choices, folders=2)
    start = time.perf_counter()
    prepare(texts, folder / "whole", 1)
    seconds = time.perf_counter() - start
    expected = contents(folder / "whole")
    kills = completed = 0
    while kills < choices.kills or not completed:
        cache = folder / f"cache {completed}"
        process = PROCESSES.Process(target=prepare, args=(texts, cache, 1))
        process.start()
        process.join(generator.uniform(0, seconds) if kills < choices.kills else None)
        if process.exitcode is None:
            process.kill()
            kills += 1
        else:
            completed += 1
            assert contents(cache) == expected, "a preparation that was killed made other stores"
        process.join()
    yield f"{kills} kills, {completed} preparations completed, all with the same {len(expected)} files"


def main(argv: list[str]) -> None:
    """Measures in a temporary folder, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measurements = [measure_loader, measure_start, measure_prepare, measure_kills]
    by_name = {measure.__name__.removeprefix("measure_"): measure for measure in measurements}
    parser.add_argument("what", nargs="*", choices=[*by_name, []], default=[])
    parser.add_argument("--tokens", type=int, default=50_000_000, help="of a small store")
    parser.add_argument("--large-tokens", type=int, default=10_000_000_000)
    parser.add_argument("--text", nargs="+", default=[sys.prefix, "/usr"], help="folders with text")
    parser.add_argument("--mb", type=float, default=20, help="size of the text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    choices = parser.parse_args(argv)
    PROCESSES.set_forkserver_preload(["torchtitan_clone.data"])
    for name in choices.what or by_name:
        with tempfile.TemporaryDirectory() as folder:
            for line in by_name[name](Path(folder), choices):
                print(f"{name:>8}: {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
