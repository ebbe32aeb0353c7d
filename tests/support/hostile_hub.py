"""Damage to what a new run reads: weights, config and tokenizer of a Hugging Face folder, text, and a token store."""

import gzip
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import zstandard

from tests.support.hostile_folders import (
    HARMLESS,
    HOSTILE_VALUES,
    SECRET,
    Kind,
    damage_file,
    damage_json,
    damage_length,
    read_header,
    write_header,
)
from tests.support.runs import losses, make_corpus, options, train

HUB_DOCUMENTS = ("config.json", "model.safetensors.index.json", "tokenizer_config.json", "tokenizer.json")
TEXTS = ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.txt")


class HubTarget:
    """A run that starts from the weights and the tokenizer of a folder; its text is next to it.

    It must log the losses of the clean folder, unless what is damaged is the text or its own values.
    """

    def __init__(self, folder: Path) -> None:
        self.clean = folder / "clean"
        self.kinds: Mapping[str, Kind] = KINDS
        self.readable: tuple[Path, ...] = ()
        write_texts(make_corpus(folder / "corpus", files=5), self.clean / "text")
        argv = options(self.clean / "text", folder, training__steps=2, checkpoint__last_save_in_hf=True)
        code, output = train(argv, log_folder=folder / "logs")
        assert code == 0, output
        (folder / "run" / "hf" / "step-2").rename(self.clean / "hub")
        split_weights(self.clean / "hub")
        code, output = train(self.argv(self.clean), log_folder=folder / "logs")  # makes the token store
        assert code == 0, output
        self._expected = losses(self.clean / "runs")
        shutil.rmtree(self.clean / "runs")

    def argv(self, folder: Path) -> list[str]:
        return options(
            folder / "text",
            folder / "runs",
            data__cache_folder=folder / "cache",
            training__steps=2,
            model__hf_assets_path=folder / "hub",
            checkpoint__initial_load_in_hf=True,
        )

    def judge(self, folder: Path, output: str) -> str:
        found = losses(folder / "runs")
        if "prepared" in output:  # the text differs, which is what the run was asked to train on
            return HARMLESS if sorted(found) == sorted(self._expected) else "ended without training"
        return HARMLESS if found == self._expected else "other losses than from the clean folder"


def write_texts(corpus: Path, folder: Path) -> None:
    """Writes the files of a corpus in all formats."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True)
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "d.parquet")
    (folder / "e.txt").write_text(texts[0])


def split_weights(hub: Path) -> None:
    """Replaces the only file of weights by two files and their index."""
    from safetensors.torch import load_file, save_file

    tensors = sorted(load_file(hub / "model.safetensors").items())
    (hub / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in (0, 1):
        share = dict(tensors[number::2])
        save_file(share, hub / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(share, f"model-{number}.safetensors")
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def damage_hub_file(folder: Path, source: random.Random) -> str:
    """Replaces a document of the hub folder by something else."""
    return damage_file(folder / "hub" / source.choice(HUB_DOCUMENTS), source)


def damage_hub_value(folder: Path, source: random.Random) -> str:
    """Changes a value of a document of the hub folder."""
    return damage_json(folder / "hub" / source.choice(HUB_DOCUMENTS[:3]), source)


def damage_tokenizer(folder: Path, source: random.Random) -> str:
    """Changes a value of the tokenizer outside its vocabulary; the store that it made is gone."""
    shutil.rmtree(folder / "cache")
    path = folder / "hub" / "tokenizer.json"
    document = json.loads(path.read_bytes())
    vocab, merges = (json.dumps(document["model"].pop(key)) for key in ("vocab", "merges"))
    path.write_text(json.dumps(document))
    done = damage_json(path, source)
    path.write_text(path.read_text().replace('"model": {', f'"model": {{"vocab": {vocab}, "merges": {merges}, ', 1))
    return done


def damage_header(folder: Path, source: random.Random) -> str:
    """Changes a value of the header of a file of weights, or its length."""
    path = folder / "hub" / f"model-{source.randrange(2)}.safetensors"
    if source.random() < 0.2:
        return f"{path.name}: {damage_length(path, source)}"
    header, data = read_header(path)
    scratch = folder / "hub" / "scratch"
    scratch.write_text(json.dumps(header))
    done = damage_json(scratch, source)
    write_header(path, scratch.read_bytes(), data)
    scratch.unlink()
    return f"{path.name}: {done}"


def exchange_weights(folder: Path, source: random.Random) -> str:
    """Exchanges, doubles, removes or links files of weights."""
    first, second = (folder / "hub" / f"model-{number}.safetensors" for number in (0, 1))
    content = first.read_bytes()
    index = folder / "hub" / "model.safetensors.index.json"
    action = source.choice(("exchanged", "doubled", "missing", "linked", "outside"))
    if action == "doubled":
        shutil.copy(first, first.with_name("again.safetensors"))
        index.unlink()
    elif action == "outside":
        first.rename(folder.parent / SECRET)
        index.write_text(index.read_text().replace(first.name, f"../../{SECRET}"))
    else:
        first.unlink()
    if action == "exchanged":
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif action == "linked":
        first.symlink_to(second.name)
    return f"a file is {action}"


def damage_text_file(folder: Path, source: random.Random) -> str:
    """Replaces a file of text by something else."""
    path = folder / "text" / source.choice(TEXTS)
    done = damage_file(path, source)
    target = Path(os.path.realpath(path))  # Path.resolve refuses links that go round
    if path.is_symlink() and target.name == SECRET:  # a link to a file is fine here
        shutil.move(target, folder / "elsewhere")
        path.unlink()
        path.symlink_to("../elsewhere")
    return done


def damage_row(folder: Path, source: random.Random) -> str:
    """Adds a row that is not one to a file of rows, compressed or not, or much of nothing."""
    rows = [f'{{"text": {value}}}' for value in HOSTILE_VALUES] + list(HOSTILE_VALUES)
    row = source.choice([*rows, '{"text": "' + " " * 10**8, "\n" * (1 << 24), '{"text": ""}\n' * (1 << 21)]).encode()
    kind = source.choice(("", ".gz", ".zst"))
    compress = {"": bytes, ".gz": lambda data: gzip.compress(data, 1), ".zst": zstandard.ZstdCompressor().compress}
    (folder / "text" / f"z.jsonl{kind}").write_bytes(compress[kind](row))
    return f"z.jsonl{kind} has {row[:40]!r} and {len(row):,} bytes"


def damage_store(folder: Path, source: random.Random) -> str:
    """Damages a file of the token store; tokens keep their values."""
    meta = next(folder.glob("cache/stores/*/meta.json"))
    files = [meta, *meta.parent.glob("*.offsets")]
    return damage_json(meta, source) if source.random() < 0.5 else damage_file(source.choice(files), source)


KINDS: dict[str, Kind] = {
    "hub file": damage_hub_file,
    "hub value": damage_hub_value,
    "tokenizer value": damage_tokenizer,
    "header of weights": damage_header,
    "files of weights": exchange_weights,
    "text file": damage_text_file,
    "row of text": damage_row,
    "token store": damage_store,
}
