"""Token ids of other programs are read in place, as the documents that they are, and checked before."""

import itertools
import json
import pickle
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.data.corpora import TOKENIZER, open_corpus, prepare_store, write
from tests.data.loaders import next_batches, rows_of, train_loader
from tests.data.test_tokenizer import word_level
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.formats import TokenFiles, has_token_rows, select_token_files
from torchtitan_clone.data.slices import TokenArray
from torchtitan_clone.data.sources import find_source, source_fingerprint
from torchtitan_clone.ops import IGNORE_INDEX

EOS = TOKENIZER.eos_id


def random_documents(count: int, *, seed: int = 0, eos: bool = True) -> list[list[int]]:
    """Returns documents of 1 to 40 ids, with or without the end-of-text token."""
    generator = np.random.default_rng(seed)
    found = [generator.integers(1, 2048, generator.integers(1, 41)).tolist() for _ in range(count)]
    return [[*ids, EOS] for ids in found] if eos else found


def megatron(documents: list[list[int]], *, dtype: str = "uint16", sequences_of_document: int = 1) -> dict[str, bytes]:
    """Returns the content of .bin and .idx, as megatron/core/datasets/indexed_dataset.py writes them."""
    codes = {"int32": 4, "int64": 5, "uint16": 8}
    sequences = [list(each) for document in documents for each in np.array_split(document, sequences_of_document)]
    lengths = np.array([len(each) for each in sequences], dtype=np.int32)
    pointers = np.dtype(dtype).itemsize * np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64)
    indices = np.arange(0, len(sequences) + 1, sequences_of_document, dtype=np.int64)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, codes[dtype], len(sequences), len(indices))
    return {
        ".bin": np.array(list(itertools.chain(*sequences)), dtype=dtype).tobytes(),
        ".idx": header + lengths.tobytes() + pointers.tobytes() + indices.tobytes(),
    }


def stream(documents: list[list[int]], *, dtype: str = "uint16") -> bytes:
    return np.array(list(itertools.chain(*documents)), dtype=dtype).tobytes()


def llm_c(
    documents, *, magic: int = 20240520, version: int = 1, dtype: str = "uint16", count: int | None = None
) -> bytes:
    content = stream(documents, dtype=dtype)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(content) // np.dtype(dtype).itemsize if count is None else count
    return header.tobytes() + content


def numpy_file(path, array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def write_megatron(folder, documents, **options):
    return write(folder, {f"text_document{suffix}": each for suffix, each in megatron(documents, **options).items()})


def write_olmo(folder, documents):
    half = len(documents) // 2
    parts = {"part-0/00000.npy": stream(documents[:half]), "part-1/00000.npy": stream(documents[half:])}
    return write(folder, {**parts, "part-0/00000.csv.gz": b"metadata"})


def write_numpy(folder, documents):
    numpy_file(folder / "a.npy", np.frombuffer(stream(documents, dtype="uint32"), dtype=np.uint32))
    return folder


def write_shards(folder, documents):
    """A document may continue in the next file."""
    ids = list(itertools.chain(*documents))
    cut = len(ids) // 2 + 1
    return write(folder, {"fineweb_train_1.bin": llm_c([ids[:cut]]), "fineweb_train_2.bin": llm_c([ids[cut:]])})


def write_arrow(folder, documents):
    rows = {"input_ids": documents, "n": list(range(len(documents)))}
    datasets.Dataset.from_dict(rows).save_to_disk(folder, num_shards=2)
    return write(folder, {"cache-1.arrow": b"a result that is kept"})


def write_arrow_file(folder, documents):
    """Arrow's file format, which ends with a list of its batches."""
    table = pyarrow.table({"input_ids": pyarrow.array(documents, type=pyarrow.large_list(pyarrow.int16()))})
    folder.mkdir()
    with pyarrow.ipc.new_file(str(folder / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=7)
    return folder


def write_parquet(folder, documents, *, name="a.parquet"):
    table = pyarrow.table({"input_ids": pyarrow.array(documents, type=pyarrow.list_(pyarrow.int32()))})
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, folder / name, row_group_size=7)
    return folder


WRITERS = {
    "megatron": write_megatron,
    "megatron of sequences": lambda folder, documents: write_megatron(folder, documents, sequences_of_document=3),
    "megatron of int32": lambda folder, documents: write_megatron(folder, documents, dtype="int32"),
    "nanoGPT": lambda folder, documents: write(folder, {"train.bin": stream(documents), "prepare.py": "1"}),
    "llm.c": write_shards,
    "olmo": write_olmo,
    "numpy": write_numpy,
    "arrow": write_arrow,
    "arrow file": write_arrow_file,
}
IN_DOCUMENTS = ["megatron", "megatron of sequences", "megatron of int32", "arrow", "arrow file"]


def open_ids(folder, *, cache, **options):
    return open_corpus(folder, cache=cache, text_key="input_ids", **options)


def documents_of(store, split) -> list[list[int]]:
    tokens, offsets = store.tokens(split), store.offsets(split)
    return [tokens[start:end].tolist() for start, end in itertools.pairwise(offsets)]


@pytest.mark.parametrize("name", WRITERS)
def test_documents_are_read_in_place(tmp_path, name):
    documents = random_documents(90)
    dataset = open_ids(WRITERS[name](tmp_path / "ids", documents), cache=tmp_path / "cache")
    assert documents_of(dataset.store, "train") == documents[:81]
    assert documents_of(dataset.store, "validation") == documents[81:]
    assert not list((tmp_path / "cache").rglob("*.tokens"))
    # The same rows as those of a store that has the tokens itself.
    ids = list(itertools.chain(*documents[:81]))
    rows = {tuple(ids[start : start + 16]) for start in range(0, len(ids) - 16, 16)}
    batches = next_batches(train_loader(pickle.loads(pickle.dumps(dataset))), 2)
    assert {tuple(row) for row in rows_of(batches).tolist()} <= rows
    assert all((batch.targets_BT[batch.tokens_BT == EOS] == IGNORE_INDEX).all() for batch in batches)


@pytest.mark.parametrize("name", [*IN_DOCUMENTS, "parquet"])
def test_documents_end_where_the_index_says(tmp_path, name):
    """Without an end-of-text token in the files, and in some of them."""
    documents = random_documents(60, eos=False)
    documents[7].append(EOS)
    expected = [ids if ids[-1] == EOS else [*ids, EOS] for ids in documents]
    folder = {**WRITERS, "parquet": write_parquet}[name](tmp_path / "ids", documents)
    store = open_ids(folder, cache=tmp_path / "cache").store
    found = documents_of(store, "train") + documents_of(store, "validation")
    assert sorted(found) == sorted(expected) if name == "parquet" else found == expected
    tokens = store.tokens("train")
    complete = tokens[:].tolist()
    for start, stop in itertools.combinations(range(0, len(complete) + 1, 37), 2):
        assert tokens[start:stop].tolist() == complete[start:stop]


@pytest.mark.parametrize("kind", ["datasets", "stream", "file", "parquet"])
def test_lists_of_a_fixed_size_are_documents(tmp_path, caplog, kind):
    """Without an end-of-text token they are probably blocks of a text, which one warning says."""
    blocks = np.random.default_rng(0).integers(1, 2048, (30, 16))
    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(blocks.flatten(), type=pyarrow.int32()), 16)
    table, folder = pyarrow.table({"input_ids": column}), tmp_path / "ids"
    folder.mkdir()
    if kind == "datasets":
        features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"), length=16)})
        datasets.Dataset.from_dict({"input_ids": blocks.tolist()}, features=features).save_to_disk(folder)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "a.parquet")
    else:
        writer = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with writer(str(folder / "a.arrow"), table.schema) as file:
            file.write_table(table.slice(0, 11))
            file.write_table(table.slice(11), max_chunksize=5)
    store = open_ids(folder, cache=tmp_path / "cache").store
    found = documents_of(store, "train") + documents_of(store, "validation")
    assert sorted(found) == sorted([*block, EOS] for block in blocks.tolist())
    (said,) = [message for message in caplog.messages if "end-of-text" in message]
    assert said.startswith(f"{folder}: all 30 documents have 16 tokens, and none ends with the end-of-text token")


@pytest.mark.parametrize("name", ["megatron", "parquet", "nanoGPT", "olmo"])
def test_documents_that_are_no_blocks_are_not_warned_of(tmp_path, caplog, name):
    """Of one length with the end-of-text token in one, of different lengths, and streams."""
    equal = [ids.tolist() for ids in np.random.default_rng(0).integers(1, 2048, (30, 16))]
    for number, documents in enumerate(([*equal[:-1], [*equal[-1][:-1], EOS]], [*equal[:-1], equal[-1] * 2])):
        folder = {**WRITERS, "parquet": write_parquet}[name](tmp_path / f"ids{number}", documents)
        open_ids(folder, cache=tmp_path / "cache")
    assert "none ends with the end-of-text" not in caplog.text


@pytest.mark.parametrize("name", ["nanoGPT", "megatron", "numpy", "arrow file"])
@pytest.mark.parametrize("ids", [list(range(1, 201)), [*range(1, 200), EOS]])
def test_the_end_of_the_only_document_is_held_out(tmp_path, name, ids):
    store = open_ids(WRITERS[name](tmp_path / "ids", [ids]), cache=tmp_path / "cache", held_out_fraction=0.05).store
    assert documents_of(store, "train") == [[*ids[:190], EOS]]
    assert documents_of(store, "validation") == [ids[190:] if ids[-1] == EOS else [*ids[190:], EOS]]
    store = open_ids(tmp_path / "ids", cache=tmp_path / "cache", held_out_fraction=0.0).store
    assert store.meta.documents == {"train": 1, "validation": 0}


def test_a_saved_dataset_of_text_names_the_remedy(tmp_path):
    datasets.Dataset.from_dict({"text": ["a text", "another"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"text is not read from Arrow files: save it with datasets\.load_from"):
        open_corpus(tmp_path / "saved", cache=tmp_path / "cache")
    datasets.load_from_disk(tmp_path / "saved").to_parquet(tmp_path / "read" / "data.parquet")
    store = open_corpus(tmp_path / "read", cache=tmp_path / "cache", held_out_fraction=0.0).store
    assert store.meta.documents["train"] == 2


def test_a_readme_beside_token_ids_is_metadata(tmp_path):
    documents = random_documents(20)
    folder = write(write_megatron(tmp_path / "ids", documents), {"README.md": "# Data"})
    store = open_ids(folder, cache=tmp_path / "cache", held_out_fraction=0.0).store
    assert documents_of(store, "train") == documents


def test_a_stream_without_an_end_and_ids_of_four_bytes(tmp_path):
    tokenizer = build_tokenizer(word_level(tmp_path, {"a": 0, "b": 70_000}, config={"eos_token": "<end>"}))
    documents = [[0, 70_000, tokenizer.eos_id], [70_000, 0]]
    for name, content in {
        "a.npy": stream(documents, dtype="uint32"),
        "b.bin": llm_c(documents, magic=20240801, version=7, dtype="uint32"),
    }.items():
        path = write(tmp_path / name, {name: content}) / name
        store = open_corpus(path, cache=tmp_path / "cache", tokenizer=tokenizer, held_out_fraction=0.0).store
        assert documents_of(store, "train") == [documents[0], [*documents[1], tokenizer.eos_id]]


@pytest.mark.parametrize(
    "names",
    [
        ("train.bin", "val.bin"),
        ("train0.bin", "val0.bin"),
        ("x_train_1.bin", "x_val_0.bin"),
        ("train/a.npy", "test/a.npy"),
    ],
)
def test_files_named_so_are_held_out(tmp_path, names):
    train, validation = random_documents(20), random_documents(5, seed=1)
    folder = write(tmp_path / "ids", dict(zip(names, (stream(train), stream(validation)), strict=True)))
    paths = [folder, folder / names[0]] if names[0] in ("train.bin", "train0.bin") else [folder]
    for path in paths:
        store = open_ids(path, cache=tmp_path / "cache").store
        assert documents_of(store, "train") == train
        assert documents_of(store, "validation") == validation


def test_a_file_beside_a_named_one_is_not_trained_on(tmp_path):
    """Its name has the same place for "train", and does not say that it is for validation."""
    folder = write(tmp_path / "ids", {f"my{name}.bin": stream(random_documents(20)) for name in ("train", "val")})
    store = open_ids(folder / "mytrain.bin", cache=tmp_path / "cache", held_out_fraction=0.0).store
    assert store.meta.documents == {"train": 20, "validation": 0}


@pytest.mark.parametrize("names", [("train", "validation"), ("validation", "train"), ("a", "b")])
@pytest.mark.parametrize("part_bytes", [1, 1 << 28])
def test_parquet_of_text_beside_token_ids_is_one_error(tmp_path, names, part_bytes):
    """The first file says what all have, also those of other parts."""
    ids = pyarrow.table({"text": random_documents(20)})
    for name, table in zip(names, (ids, pyarrow.table({"text": ["a b", "c"]})), strict=True):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    source = find_source(Training(dataset_path=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"{max(names)}\.parquet"):
        prepare_store(source, tokenizer=TOKENIZER, data=Data(cache_folder=str(tmp_path / "c")), part_bytes=part_bytes)


def test_parquet_files_named_so_are_held_out(tmp_path):
    """And the store has another key than one whose documents were all divided by their hash."""
    documents = {"data/train-0.parquet": random_documents(30), "data/train-1.parquet": random_documents(30, seed=1)}
    documents |= {"data/validation-0.parquet": random_documents(20, seed=2)}
    for name, rows in documents.items():
        write_parquet(tmp_path / "ids", rows, name=name)
    dataset = open_ids(tmp_path / "ids", cache=tmp_path / "cache")
    *train, validation = documents.values()
    assert documents_of(dataset.store, "train") == list(itertools.chain(*train))
    assert documents_of(dataset.store, "validation") == validation
    listing = tmp_path / "listing.json"
    source = find_source(Training(dataset_path=str(tmp_path / "ids"), text_key="input_ids"))
    assert dataset.identity.data != source_fingerprint(source, listing=listing)
    # As for files that are read in place: if all are named so, none is held out as a whole.
    shutil.rmtree(tmp_path / "ids/data")
    write_parquet(tmp_path / "ids", validation, name="data/test-0.parquet")
    dataset = open_ids(tmp_path / "ids", cache=tmp_path / "cache")
    assert dataset.store.meta.documents["train"] >= 10
    source = find_source(Training(dataset_path=str(tmp_path / "ids"), text_key="input_ids"))
    assert dataset.identity.data == source_fingerprint(source, listing=listing)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_an_end_of_text_token_may_exceed_the_type_of_the_ids(tmp_path, packing):
    tokenizer = build_tokenizer(word_level(tmp_path, {"a": 0, "b": 70_000}, config={"eos_token": "<end>"}))
    tokenizer = replace(tokenizer, eos_id=70_001, vocab_size=70_002)
    documents = random_documents(60, eos=False)
    folder = write_megatron(tmp_path / "ids", documents)
    dataset = open_ids(folder, cache=tmp_path / "cache", tokenizer=tokenizer, packing=packing)
    assert documents_of(dataset.store, "train") == [[*ids, 70_001] for ids in documents[:54]]
    assert any((batch.tokens_BT == 70_001).any() for batch in next_batches(train_loader(dataset), 2))


def test_other_content_of_the_files_is_other_data(tmp_path):
    first, second = random_documents(40), random_documents(40, seed=1)
    folder = write_megatron(tmp_path / "ids", first)
    before = open_ids(folder, cache=tmp_path / "cache")
    write_megatron(tmp_path / "ids", second)
    after = open_ids(folder / "text_document.idx", cache=tmp_path / "cache")
    assert before.identity != after.identity
    assert documents_of(after.store, "train") + documents_of(after.store, "validation") == second


def damaged_index(change):
    parts = megatron(random_documents(20))
    return {"a.bin": parts[".bin"], "a.idx": change(bytearray(parts[".idx"]))}


def put(content: bytearray, offset: int, kind: str, value: int) -> bytes:
    struct.pack_into(kind, content, offset, value)
    return bytes(content)


LARGE = [[1, 2048, EOS], [5, EOS]]
REFUSED = {
    "an id outside the vocabulary": ({"a.bin": stream(LARGE)}, r"a\.bin: token id 2048, .* ids 0 to 2047; set model"),
    "a negative id": ({f"a{k}": v for k, v in megatron([[1, -2, 3]] * 9, dtype="int32").items()}, "token id -2"),
    "an odd size": ({"a.bin": stream(random_documents(9)) + b"\0"}, "bytes, not 0 and .* ids of type uint16"),
    "ids of four bytes": ({"a.npy": stream(random_documents(9), dtype="uint32")}, "every second id is 0"),
    "a header of more ids": ({"a.bin": llm_c(random_documents(9))[:-2]}, "bytes, not 1,024 and .* ids of type uint16"),
    "an evaluation of llm.c": ({"a.bin": llm_c(LARGE, magic=20240522)}, "evaluation data of llm.c in version 1"),
    "another version of llm.c": ({"a.bin": llm_c(LARGE, version=9)}, "training data of llm.c in version 9; known"),
    "a negative count": ({"a.bin": llm_c([], count=-12)[:1000], "b.bin": llm_c(LARGE)}, "not 1,024 and -12"),
    "an index of less": ({"a.bin": b"12", "a.idx": megatron(random_documents(9))[".idx"]}, "2 bytes, and a.idx states"),
    "a short index": ({"a.bin": b"", "a.idx": b"MMIDIDX"}, "a.idx has 7 bytes, fewer than its header"),
    "another magic number": (damaged_index(lambda idx: put(idx, 0, "<B", 7)), "a.idx is not an index of Megatron"),
    "a version": (damaged_index(lambda idx: put(idx, 9, "<Q", 2)), "is not an index of Megatron .version 1"),
    "numbers with fractions": (damaged_index(lambda idx: put(idx, 17, "<B", 6)), "a.idx states the type 6; known"),
    "more sequences": (damaged_index(lambda idx: put(idx, 18, "<Q", 2**40)), "a.idx has .* and states"),
    "a truncated index": (damaged_index(lambda idx: bytes(idx[:-8])), "a.idx has .* and states"),
    "a negative length": (damaged_index(lambda idx: put(idx, 34, "<i", -5)), "do not follow one another"),
    "a pointer": (damaged_index(lambda idx: put(idx, 34 + 80 + 8, "<q", 2**50)), "do not follow one another"),
    "documents that decrease": (damaged_index(lambda idx: put(idx, 34 + 240 + 8, "<q", 25)), "do not reach from"),
    "a text of NumPy": ({"a.npy": b"\x93NUMPY\1\0\x10\0not a header    "}, "NumPy's header 'not a header' is not"),
    "an empty arrow file": ({"a.arrow": b""}, "not a complete Arrow stream"),
    "something else": ({"a.arrow": bytes(range(256))}, "not a complete Arrow stream"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_files_are_one_error(tmp_path, name):
    files, complaint = REFUSED[name]
    write(tmp_path / "ids", files)
    with pytest.raises(ConfigError, match=complaint) as error:
        open_ids(tmp_path / "ids", cache=tmp_path / "cache")
    assert len(error.value.messages) == 1
    assert not list((tmp_path / "cache").rglob("partial"))


@pytest.mark.parametrize(
    "array", [np.ones(9), np.ones((3, 3), dtype=int), np.array([object()])], ids=["float", "2-D", "object"]
)
def test_other_arrays_are_refused(tmp_path, array):
    numpy_file(tmp_path / "ids" / "a.npy", array)
    with pytest.raises(ConfigError, match=r"a\.npy: NumPy's header .* is not that of integers in one dimension"):
        open_ids(tmp_path / "ids", cache=tmp_path / "cache")


def test_tables_without_ids_in_the_column_are_refused(tmp_path):
    arrow = write_arrow(tmp_path / "arrow", random_documents(9))
    with pytest.raises(ConfigError, match=r'training\.text_key = "text" names no column .* set it to one of input_ids'):
        open_corpus(arrow, cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="documents or ids are missing"):
        open_ids(write_parquet(tmp_path / "null", [[1], None, [2]]), cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="token id 4000"):
        open_ids(write_parquet(tmp_path / "large", [[1, 4000]] * 3), cache=tmp_path / "cache")
    (path,) = arrow.glob("*0-of*.arrow")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="not a complete Arrow stream"):
        open_ids(arrow, cache=tmp_path / "cache")


def test_a_folder_of_text_with_a_binary_file_stays_text(tmp_path):
    texts = {"a.txt": "text of a document" * 200, "b.txt": "another" * 200}
    folder = write(tmp_path / "ids", {**texts, "c.bin": b"\0\1" * 20})
    assert open_corpus(folder, cache=tmp_path / "cache").store.meta.documents == {"train": 1, "validation": 1}


def test_a_folder_of_ids_with_text_is_an_error(tmp_path):
    folder = write(tmp_path / "ids", {"a.txt": "text of a document", "c.bin": b"\0\1" * 200})
    with pytest.raises(
        ConfigError, match=r"c\.bin is token ids or an array, and 96% .* move it to a folder of its own"
    ):
        open_corpus(folder, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    "change", [[9, 0, "uint16", 5], [0, 0, "float", 5], [0, 1 << 40, "uint16", 5], [0, 0, "uint16", -1]]
)
def test_a_hostile_list_of_segments_is_one_error(tmp_path, change):
    folder = write_megatron(tmp_path / "ids", random_documents(30))
    store = open_ids(folder, cache=tmp_path / "cache").store
    (store.folder / "segments.json").write_text(json.dumps({"train": [change], "validation": []}))
    with pytest.raises(ConfigError, match=r"is corrupt .*delete that folder"):
        open_ids(folder, cache=tmp_path / "cache")


@pytest.mark.parametrize("name", ["megatron of sequences", "llm.c", "numpy", "arrow"])
def test_changed_bytes_are_one_error_or_other_ids(tmp_path, name):
    folder = WRITERS[name](tmp_path / "ids", random_documents(20))
    files = select_token_files(sorted(folder.rglob("*.*")), root=folder)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        path = files[generator.integers(len(files))]
        before = path.read_bytes()
        content = bytearray(before)
        place = int(generator.integers(min(len(content), generator.choice([64, 2000]))))
        content[place : place + 8] = generator.choice([b"\xff" * 8, bytes(8), b"\0\0\0\x80" * 2, b"}", b""])
        path.write_bytes(bytes(content))
        ids = TokenFiles(files=files, root=folder, column="input_ids", vocab_size=2048, eos_id=EOS)
        try:
            for split in ids.index(held_out_fraction=0.1).values():
                tokens = TokenArray(split.segments, files=files, added=split.added, eos_id=EOS)
                assert len(tokens[:]) == split.offsets[-1]
                assert (np.diff(split.offsets) > 0).all()
        except ConfigError:
            refused += 1
        path.write_bytes(before)
    assert refused > 10


def test_pyarrow_is_only_imported_for_parquet_files(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert not has_token_rows([Path("a.jsonl")], column="text")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_of_a_pair_is_an_error(tmp_path, suffix):
    folder = write_megatron(tmp_path / "ids", random_documents(9))
    (path,) = folder.glob("*.bin")
    for each in (".bin", ".idx"):
        (folder / f"other{each}").write_bytes(path.with_suffix(each).read_bytes())
    (folder / f"other{suffix}").unlink()
    with pytest.raises(ConfigError, match=rf"other{suffix} is missing beside it; copy it too"):
        open_ids(folder, cache=tmp_path / "cache")
