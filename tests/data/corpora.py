"""Small corpora on disk for the tests."""

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data import build_tokenizer, open_dataset, preparation

TOKENIZER = build_tokenizer(None)
"""The tokenizer that is part of the package."""


def texts(count: int, *, seed: int = 0, words: int = 60) -> list[str]:
    """Returns distinct texts of different lengths, some with non-ASCII characters."""
    generator = np.random.default_rng(seed)
    vocabulary = ["import", "self", "returns", "größe", "日本", "for", "value", "None", "(x)", "\n", "def", "class"]
    return [
        f"text {seed}.{number}: " + " ".join(generator.choice(vocabulary, generator.integers(1, words)))
        for number in range(count)
    ]


def jsonl(rows: list[str]) -> bytes:
    """Returns rows {"n": ..., "text": ...}."""
    return b"".join(json.dumps({"n": n, "text": text}).encode() + b"\n" for n, text in enumerate(rows))


def parquet(rows: list, *, kind: pyarrow.DataType | None = None) -> bytes:
    """Returns a file with the columns n and text, in row groups of three."""
    table = pyarrow.table({"n": list(range(len(rows))), "text": pyarrow.array(rows, type=kind or pyarrow.string())})
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, row_group_size=3)
    return buffer.getvalue()


def zst(content: bytes, *, frames: int = 1) -> bytes:
    """Returns the content compressed into this many frames."""
    size = -(-len(content) // frames)
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    return b"".join(zstandard.ZstdCompressor().compress(piece) for piece in pieces)


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    """Writes files below a folder, by name; returns the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_corpus(folder: Path, *, count: int = 300, seed: int = 0) -> Path:
    """Writes texts to files of every format; returns the folder."""
    rows = texts(count, seed=seed)
    third = count // 3
    return write(
        folder,
        {
            "a.jsonl": jsonl(rows[:third]),
            "b/part.jsonl.gz": gzip.compress(jsonl(rows[third : 2 * third])),
            "c.parquet": parquet(rows[2 * third : -2]),
            "d/one.txt": rows[-2],
            "d/two.md": rows[-1],
        },
    )


def open_corpus(path: Path, *, cache: Path, tokenizer=TOKENIZER, held_out_fraction: float = 0.1, **options):
    """Opens the dataset at a path; options are those of [data] or [training]."""
    training = {key: options.pop(key) for key in list(options) if key in Training.__dataclass_fields__}
    return open_dataset(
        training=Training(dataset_path=str(path), **training),
        data=Data(cache_folder=str(cache), held_out_fraction=held_out_fraction, **options),
        tokenizer=tokenizer,
    )


def read_hub_in(folder: Path, *, patch: pytest.MonkeyPatch) -> None:
    """Changes to a folder, whose ./org/name the library reads as the hub dataset of that name, without a network."""
    patch.chdir(folder)
    patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def files_below(folder: Path) -> list[str]:
    """Returns the names of all files and folders below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def prepare_store(source, **options):
    """Returns the store of a source, tokenized by processes of its own."""
    with preparation.tokenizer_processes(options["data"]) as processes:
        return preparation.prepare_store(source, processes=processes, **options)


def prepare_parts(source, **options):
    """Makes some of the parts of a source, tokenized by processes of their own; returns whether now all exist."""
    with preparation.tokenizer_processes(options["data"]) as processes:
        return preparation.prepare_parts(source, processes=processes, **options)
