"""Reads files that other programs wrote themselves: right, or an error that names the format.

    python tests/campaigns/foreign_files.py --folder=/tmp/foreign

Makes an environment with pinned versions of the programs in the folder, on top of the packages of this Python, and
takes two scripts from repositories at pinned commits; both need a network. Prints the table of docs/data.md and exits
with 1 if a format is read otherwise than it says. Not part of the test suite: the environment takes minutes to make.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data import build_tokenizer, open_dataset
from torchtitan_clone.data.dataset import TokenDataset
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER

PROGRAMS = {
    "megatron-core": "0.16.1",
    "mosaicml-streaming": "0.13.0",
    "datatrove": "0.10.1",
    "litdata": "0.2.76",
    "webdataset": "1.0.2",
}
NEEDED = [
    "azure-core", "azure-identity", "azure-storage-blob", "boto3", "botocore", "braceexpand", "brotli", "catalogue",
    "cramjam", "google-cloud-storage", "humanize", "jmespath", "lightning-utilities", "loguru", "oci", "orjson",
    "paramiko", "python-snappy", "s3transfer", "torchvision==0.28.0", "xxhash", "zstd",
]  # fmt: skip
"""What they import, without torch, which this Python has."""
CLONES = {
    "llm.c": ("f1e2ace651495b74ae22d45d1723443fd00ecd3a", "dev/data/data_common.py"),
    "nanochat": ("92d63d4e8bb4df75c3b71618f31ddde2378b2bcd", "dev/repackage_data_reference.py"),
}
TOKENIZER = build_tokenizer(None)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A format, the program that writes it, and what reading it must give: "texts", "ids" or part of an error."""

    name: str
    program: str
    expected: str
    convert: Callable[[Path], Path] | None = None
    """Does what the error says; the texts are then read."""


def rename_ds(folder: Path) -> Path:
    """Moves the ids of datatrove to .bin files, in a folder of their own."""
    found = folder.with_name(f"{folder.name}-bin")
    found.mkdir()
    for path in folder.glob("*.ds"):
        path.rename(found / f"{path.stem}.bin")
    return found


def unpack(folder: Path) -> Path:
    """Unpacks all archives into one folder."""
    found = folder.with_name(f"{folder.name}-unpacked")
    for path in sorted(folder.iterdir()):
        with tarfile.open(path) as archive:
            archive.extractall(found, filter="data")
    return found


CASES = [
    Case(name="megatron, uint16", program="megatron-core", expected="ids"),
    Case(name="megatron, int32, two sequences a document", program="megatron-core", expected="ids"),
    Case(name="MDS of text", program="mosaicml-streaming", expected="MosaicML Streaming (MDS)"),
    Case(name="MDS of tokens", program="mosaicml-streaming", expected="MosaicML Streaming (MDS)"),
    Case(name="MDS, zstd", program="mosaicml-streaming", expected="MosaicML Streaming (MDS)"),
    Case(name="datatrove, DocumentTokenizer", program="datatrove", expected="datatrove's token ids", convert=rename_ds),
    Case(name="datatrove, JsonlWriter", program="datatrove", expected="texts"),
    Case(name="datatrove, ParquetWriter", program="datatrove", expected="texts"),
    Case(name="LitData of text", program="litdata", expected="LitData"),
    Case(name="LitData of tokens", program="litdata", expected="LitData"),
    Case(name="LitData, zstd", program="litdata", expected="LitData"),
    Case(name="WebDataset, .tar", program="webdataset", expected="a tar archive", convert=unpack),
    Case(name="WebDataset, .tar.gz", program="webdataset", expected="a tar archive", convert=unpack),
    Case(name="datasets, save_to_disk of text", program="datasets", expected="to_parquet"),
    Case(name="datasets, save_to_disk of ids", program="datasets", expected="ids"),
    Case(name="datasets, save_to_disk of blocks", program="datasets", expected="blocks"),
    Case(name="datasets, to_parquet", program="datasets", expected="texts"),
    Case(name="datasets, to_parquet of ids", program="datasets", expected="ids"),
    Case(name="datasets, to_json", program="datasets", expected="texts"),
    Case(name="datasets, to_csv", program="datasets", expected="is a table"),
    Case(name="nanochat, parquet", program="nanochat", expected="1024 texts"),
    Case(name="llm.c, gpt-2", program="llm.c", expected="ids"),
    Case(name="llm.c, llama-3", program="llm.c", expected="ids"),
    Case(name="llm.c, evaluation", program="llm.c", expected="evaluation data of llm.c"),
]


def make_environment(folder: Path) -> Path:
    """Returns the Python of an environment with the programs, which is made on first use."""
    python = folder / "venv" / "bin" / "python"
    if not (folder / "venv" / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        ours = folder / "venv" / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "ours.pth"
        ours.write_text(f"{sysconfig.get_path('purelib')}\n")
        pinned = [f"{name}=={number}" for name, number in PROGRAMS.items()]
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *pinned, *NEEDED], check=True)
        (folder / "venv" / "complete").touch()
    return python


def take_scripts(folder: Path) -> Path:
    """Returns a folder with one script of each repository."""
    for name, (commit, path) in CLONES.items():
        clone, target = folder / f"{name}.git", folder / "clones" / name / Path(path).name
        if target.exists():
            continue
        git = ["git", f"--git-dir={clone}"]
        subprocess.run(["git", "init", "-q", "--bare", clone], check=True)
        subprocess.run([*git, "fetch", "-q", "--depth=1", f"https://github.com/karpathy/{name}", commit], check=True)
        target.parent.mkdir(parents=True)
        shown = subprocess.run([*git, "show", f"{commit}:{path}"], check=True, capture_output=True)
        target.write_bytes(shown.stdout)
    return folder / "clones"


def make_documents() -> dict[str, list]:
    """Returns texts, and their ids."""
    texts = [
        f"Document {number}. " + f"The square of {number} is {number**2}.\n" * (number % 9) for number in range(120)
    ]
    return {"texts": texts, "ids": [[*ids, TOKENIZER.eos_id] for ids in TOKENIZER.encode_batch(texts)]}


def read(folder: Path, *, cache: Path) -> list[list[int]]:
    """Returns the ids of all documents at a path."""
    data = Data(cache_folder=str(cache), held_out_fraction=0.0, prepare_processes=1)
    dataset = open_dataset(training=Training(dataset_path=str(folder)), data=data, tokenizer=TOKENIZER)
    assert isinstance(dataset, TokenDataset)
    tokens, offsets = dataset.store.tokens("train"), dataset.store.offsets("train")
    return [tokens[start:end].tolist() for start, end in pairwise(offsets)]


def judge(case: Case, folder: Path, *, documents: dict[str, list], cache: Path) -> tuple[bool, str]:
    """Returns whether a format is read as expected, and what was seen."""
    wanted = sorted(documents["ids"])
    try:
        found = read(folder, cache=cache)
    except ConfigError as error:
        if case.expected not in str(error):
            return False, f"error: {error}"
        if case.convert is None:
            return True, f"an error: {case.expected}"
        converted = sorted(read(case.convert(folder), cache=cache)) == wanted
        return converted, f"an error: {case.expected}; read after its remedy"
    if case.expected == "blocks":
        return all(len(ids) == 65 for ids in found), f"{len(found)} documents of 64 ids, with a warning"
    if case.expected == "1024 texts":
        return len({tuple(ids) for ids in found}) == 1024, "1024 documents"
    lengths = np.unique([len(ids) for ids in found])
    return sorted(found) == wanted, f"{len(found)} documents of {lengths.min()} to {lengths.max()} ids"


def main() -> int:
    """Writes and reads every format; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="is made; environment and scripts are kept in it")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    python, clones = make_environment(options.folder), take_scripts(options.folder)
    documents = make_documents()
    work = options.folder / f"run-{len(list(options.folder.glob('run-*')))}"
    work.mkdir()
    (work / "documents.json").write_text(json.dumps(documents))
    versions = {**PROGRAMS, "datasets": version("datasets")} | {
        name: commit[:7] for name, (commit, _) in CLONES.items()
    }
    failed = 0
    print("| Program | Files | Read as |\n|---|---|---|")
    for number, case in enumerate(CASES):
        folder = work / f"{number:02d}"
        words = [Path(__file__).with_name("foreign_writers.py"), case.name, folder, work / "documents.json"]
        command = [python, *words, SHIPPED_FOLDER, clones]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        is_right, seen = False, f"the program failed: {done.stderr.strip().splitlines()[-1:]}"
        if done.returncode == 0:
            is_right, seen = judge(case, folder, documents=documents, cache=work / "cache")
        failed += not is_right
        print(f"| {case.program} {versions[case.program]} | {case.name} | {'' if is_right else 'WRONG: '}{seen} |")
    print(f"\n{len(CASES) - failed} of {len(CASES)} as expected")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
