"""Writes files with the programs whose formats tests/campaigns/foreign_files.py reads; runs in its environment.

    python tests/campaigns/foreign_writers.py FORMAT FOLDER DOCUMENTS.json TOKENIZER_FOLDER CLONES

DOCUMENTS.json has "texts", their token "ids" with the end-of-text token after each, and the id "eos" of that token.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

WRITERS: dict[str, Callable[["Work"], None]] = {}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is written, and where."""

    folder: Path
    texts: list[str]
    ids: list[list[int]]
    tokenizer: Path
    clones: Path

    @property
    def blocks(self) -> list[list[int]]:
        """Returns rows of one length, which are no documents."""
        stream = [token for document in self.ids for token in document if token != self.ids[0][-1]]
        return [stream[start : start + 64] for start in range(0, len(stream) - 63, 64)]


def writes(name: str) -> Callable[[Callable[[Work], None]], Callable[[Work], None]]:
    """Registers the writer of a format."""

    def register(writer: Callable[[Work], None]) -> Callable[[Work], None]:
        WRITERS[name] = writer
        return writer

    return register


def _megatron(work: Work, *, dtype: Any, cut: bool) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(work.folder / "text_document.bin"), dtype=dtype)
    for ids in work.ids:
        half = len(ids) // 2 if cut else len(ids)
        for sequence in (ids[:half], ids[half:]):
            if sequence:
                builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(work.folder / "text_document.idx"))


writes("megatron, uint16")(lambda work: _megatron(work, dtype=np.uint16, cut=False))
writes("megatron, int32, two sequences a document")(lambda work: _megatron(work, dtype=np.int32, cut=True))


def _mosaic(work: Work, *, compression: str | None, tokens: bool) -> None:
    _define_torchvision()
    from streaming import MDSWriter

    columns = {"tokens": "ndarray:uint16"} if tokens else {"text": "str"}
    with MDSWriter(out=str(work.folder), columns=columns, compression=compression, size_limit=1 << 14) as writer:
        for text, ids in zip(work.texts, work.ids, strict=True):
            writer.write({"tokens": np.array(ids, dtype=np.uint16)} if tokens else {"text": text})


def _define_torchvision() -> None:
    """Declares the operators of a torchvision that was built for CUDA beside a torch that was not; none is called."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        kinds = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool")
        backward = [f"_{kind}_backward" for kind in (*kinds, "deform_conv2d")]
        for name in ("nms", "qnms", "deform_conv2d", *kinds, *backward):
            torch.library.define(f"torchvision::{name}", "(Tensor a) -> Tensor")
        for name in [each for each in sys.modules if each.startswith("torchvision")]:
            del sys.modules[name]


writes("MDS of text")(lambda work: _mosaic(work, compression=None, tokens=False))
writes("MDS of tokens")(lambda work: _mosaic(work, compression=None, tokens=True))
writes("MDS, zstd")(lambda work: _mosaic(work, compression="zstd", tokens=False))


def _datatrove(work: Work, step: Any) -> None:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor

    documents = [Document(text=text, id=str(number)) for number, text in enumerate(work.texts)]
    LocalPipelineExecutor([documents, step], logging_dir=str(work.folder.with_name(f"{work.folder.name}-logs"))).run()


@writes("datatrove, DocumentTokenizer")
def write_ds(work: Work) -> None:
    from datatrove.pipeline.tokens import DocumentTokenizer

    name, eos = str(work.tokenizer / "tokenizer.json"), "<|end_of_text|>"
    _datatrove(work, DocumentTokenizer(str(work.folder), name, eos_token=eos, shuffle_documents=False))


@writes("datatrove, JsonlWriter")
def write_trove_jsonl(work: Work) -> None:
    from datatrove.pipeline.writers import JsonlWriter

    _datatrove(work, JsonlWriter(str(work.folder)))


@writes("datatrove, ParquetWriter")
def write_trove_parquet(work: Work) -> None:
    from datatrove.pipeline.writers import ParquetWriter

    _datatrove(work, ParquetWriter(str(work.folder)))


def _litdata(work: Work, *, compression: str | None, tokens: bool) -> None:
    import torch
    from litdata.streaming import TokensLoader
    from litdata.streaming.cache import Cache

    loader = TokensLoader(block_size=16) if tokens else None
    options: dict[str, Any] = {"compression": compression, "item_loader": loader}
    cache = Cache(str(work.folder), chunk_bytes=1 << 14, **options)
    for number, (text, ids) in enumerate(zip(work.texts, work.ids, strict=True)):
        cache[number] = torch.tensor(ids) if tokens else {"text": text}
    cache.done()
    cache.merge(1)


writes("LitData of text")(lambda work: _litdata(work, compression=None, tokens=False))
writes("LitData of tokens")(lambda work: _litdata(work, compression=None, tokens=True))
writes("LitData, zstd")(lambda work: _litdata(work, compression="zstd", tokens=False))


def _webdataset(work: Work, *, suffix: str) -> None:
    import webdataset

    with webdataset.ShardWriter(str(work.folder / f"shard-%06d{suffix}"), maxcount=40) as sink:
        for number, text in enumerate(work.texts):
            sink.write({"__key__": f"{number:06d}", "txt": text})


writes("WebDataset, .tar")(lambda work: _webdataset(work, suffix=".tar"))
writes("WebDataset, .tar.gz")(lambda work: _webdataset(work, suffix=".tar.gz"))


def _datasets(work: Work, *, column: str, rows: list[Any], features: Any = None) -> Any:
    import datasets

    return datasets.Dataset.from_dict({column: rows}, features=features)


@writes("datasets, save_to_disk of text")
def write_saved_text(work: Work) -> None:
    _datasets(work, column="text", rows=work.texts).save_to_disk(work.folder)


@writes("datasets, save_to_disk of ids")
def write_saved_ids(work: Work) -> None:
    import datasets

    saved = _datasets(work, column="text", rows=work.ids)
    datasets.DatasetDict({"train": saved}).save_to_disk(work.folder)


@writes("datasets, save_to_disk of blocks")
def write_saved_blocks(work: Work) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Sequence(datasets.Value("int32"), length=64)})
    _datasets(work, column="text", rows=work.blocks, features=features).save_to_disk(work.folder)


writes("datasets, to_parquet")(
    lambda work: _datasets(work, column="text", rows=work.texts).to_parquet(work.folder / "a.parquet")
)
writes("datasets, to_parquet of ids")(
    lambda work: _datasets(work, column="text", rows=work.ids).to_parquet(work.folder / "a.parquet")
)
writes("datasets, to_json")(
    lambda work: _datasets(work, column="text", rows=work.texts).to_json(work.folder / "a.json")
)
writes("datasets, to_csv")(lambda work: _datasets(work, column="text", rows=work.texts).to_csv(work.folder / "a.csv"))


@writes("nanochat, parquet")
def write_nanochat(work: Work) -> None:
    """Runs its own script, with a local dataset, one shard and no upload."""
    import datasets

    source = (work.clones / "nanochat" / "repackage_data_reference.py").read_text()
    changes = {
        'dataset_tag = "climbmix"': 'dataset_tag = "fineweb_edu"',
        "upload_to_hf = True": "upload_to_hf = False",
        "chars_per_shard = 250_000_000": "chars_per_shard = 1",
        'f"/home/ubuntu/.cache/nanochat/base_data_{output_dirname}"': repr(str(work.folder)),
        "ds = ds.shuffle(seed=42)": "",
    }
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    texts = [f"{text} {number}" for number in range(-(-1024 // len(work.texts))) for text in work.texts][:1024]
    datasets.load_dataset = lambda **_: datasets.Dataset.from_dict({"text": texts})
    exec(compile(source, "repackage_data_reference.py", "exec"), {})


def _llm_c(work: Work) -> ModuleType:
    spec = importlib.util.spec_from_file_location("data_common", work.clones / "llm.c" / "data_common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_llm_c(work: Work, *, model: str) -> None:
    stream = [token for document in work.ids for token in document]
    half = len(stream) // 2
    for number, part in enumerate((stream[:half], stream[half:])):
        _llm_c(work).write_datafile(str(work.folder / f"text_train_{number:06d}.bin"), part, model)


writes("llm.c, gpt-2")(lambda work: _write_llm_c(work, model="gpt-2"))
writes("llm.c, llama-3")(lambda work: _write_llm_c(work, model="llama-3"))


@writes("llm.c, evaluation")
def write_llm_c_evaluation(work: Work) -> None:
    example = {"label": 0, "ctx_tokens": work.ids[0], "ending_tokens": work.ids[1:5]}
    _llm_c(work).write_evalfile(str(work.folder / "hellaswag_val.bin"), [example])


def main() -> int:
    """Writes the files of one format; returns the exit code."""
    name, folder, documents, tokenizer, clones = sys.argv[1:]
    content = json.loads(Path(documents).read_text())
    Path(folder).mkdir(parents=True)
    work = Work(
        folder=Path(folder),
        texts=content["texts"],
        ids=content["ids"],
        tokenizer=Path(tokenizer),
        clones=Path(clones),
    )
    WRITERS[name](work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
