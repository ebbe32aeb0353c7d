"""Packed rows have every target of every document once, cut nothing that fits, and are those of a plain best fit."""

import itertools
import logging

import numpy as np
import pytest

from tests.data.corpora import TOKENIZER, open_corpus, write_corpus
from tests.data.loaders import SEQ_LEN, next_batches, train_loader, validation_loader
from tests.data.test_formats import open_ids, random_documents, write_arrow, write_megatron
from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.checks import find_config_errors
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data import open_dataset
from torchtitan_clone.data.best_fit import best_fit, divide
from torchtitan_clone.ops import IGNORE_INDEX


def reference(lengths: list[int], *, capacity: int) -> list[list[int]]:
    """Returns the lengths in each row: the longest chunk first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if fitting:
            min(fitting, key=lambda row: capacity - sum(row)).append(length)
        else:
            rows.append([length])
    return rows


@pytest.mark.parametrize("capacity", [1, 2, 7, 33, 100])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_are_placed_as_by_a_plain_best_fit(capacity, seed):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, capacity + 1, generator.integers(0, 300))
    if seed == 3:
        lengths = np.minimum(capacity, generator.geometric(0.2, 300))
    rows = best_fit(lengths, capacity=capacity)
    found = np.bincount(rows, weights=lengths)  # which of several rows with equal room is taken does not matter
    assert sorted(found) == sorted(map(sum, reference(lengths.tolist(), capacity=capacity)))


def test_chunks_are_documents_or_full_rows():
    offsets = np.cumsum([0, 1, 2, 5, 6, 9, 10, 40])
    starts, lengths = divide(offsets, seq_len=4)
    assert lengths.tolist() == [1, 2, 5, 5, 2, 5, 5, 5, 5, 2] + [5] * 9 + [4]
    for start, length, following in zip(starts, lengths, [*starts[1:], 0], strict=False):
        assert length <= 5
        assert following == 0 or following in (start + 4, start + length)


def targets_of(documents) -> list[tuple[int, int]]:
    """Returns (token, next token) of all documents."""
    return sorted(pair for document in documents for pair in itertools.pairwise(document))


def trained_targets(batches, *, count: int) -> list[tuple[int, int]]:
    """Returns (token, target) of the first `count` rows."""
    pairs = []
    for batch in batches:
        for tokens, targets in zip(batch.tokens_BT.tolist(), batch.targets_BT.tolist(), strict=True):
            if count > 0:
                pairs += [pair for pair in zip(tokens, targets, strict=True) if pair[1] != IGNORE_INDEX]
            count -= 1
    return sorted(pairs)


@pytest.mark.parametrize("kind", ["text", "megatron", "arrow without ends"])
def test_every_target_is_trained_once_in_an_epoch(tmp_path, kind, caplog):
    caplog.set_level(logging.INFO, logger="torchtitan_clone")
    if kind == "text":
        dataset = open_corpus(write_corpus(tmp_path / "x", count=60), cache=tmp_path / "cache", packing="best_fit")
    else:
        writer = write_megatron if kind == "megatron" else write_arrow
        folder = writer(tmp_path / "x", random_documents(60, eos=kind == "megatron"))
        dataset = open_ids(folder, cache=tmp_path / "cache", packing="best_fit")
    store = dataset.store
    documents = [store.tokens("train")[a:b].tolist() for a, b in itertools.pairwise(store.offsets("train"))]
    loader = train_loader(dataset)
    num_rows = len(np.fromfile(store.folder / f"best_fit-{SEQ_LEN}" / "train.rows", dtype=np.int64)) - 1
    batches = next_batches(loader, -(-num_rows // 8))
    assert trained_targets(batches, count=num_rows) == targets_of(documents)
    # Positions start anew in every chunk, and a document that fits is in one row.
    assert all((batch.positions_BT[:, 0] == 0).all() for batch in batches)
    cut = sum(len(document) > SEQ_LEN + 1 for document in documents)
    assert f"{100 * cut / len(documents):.2f} % of the documents are cut" in caplog.text
    padding = 1 - sum(len(each) + max(0, -(-(len(each) - 1) // SEQ_LEN) - 1) for each in documents) / (17 * num_rows)
    assert f"{100 * padding:.3f} % of the rows are padding" in caplog.text
    held_out = [store.tokens("validation")[a:b].tolist() for a, b in itertools.pairwise(store.offsets("validation"))]
    assert trained_targets(list(validation_loader(dataset)), count=10**6) == targets_of(held_out)


def test_rows_are_packed_once_and_are_other_data(tmp_path):
    corpus = write_corpus(tmp_path / "x", count=60)
    whole = open_corpus(corpus, cache=tmp_path / "cache", packing="best_fit")
    state = train_loader(whole).state_dict()
    folder = whole.store.folder / f"best_fit-{SEQ_LEN}"
    before = folder.stat().st_ino
    train_loader(open_corpus(corpus, cache=tmp_path / "cache", packing="best_fit"))
    assert folder.stat().st_ino == before
    with pytest.raises(ConfigError, match="the fingerprint of the data"):
        train_loader(open_corpus(corpus, cache=tmp_path / "cache")).load_state_dict(state, allow_change=False)


def change_number(place, value):
    def change(numbers):
        numbers = numbers.copy()
        numbers[place] = value
        return numbers

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", lambda rows: rows[:0]),
        ("rows", lambda rows: rows.view(np.uint8)[:-1]),
        ("rows", change_number(3, 10**6)),
        ("rows", lambda rows: np.delete(rows, 2)),
        ("starts", lambda starts: starts.view(np.uint8)[1:]),
        ("starts", change_number(2, 10**9)),
        ("starts", change_number(2, -1)),
        ("lengths", change_number(2, 0)),
        ("lengths", change_number(2, SEQ_LEN + 2)),
    ],
)
def test_damaged_rows_are_one_error(tmp_path, name, change):
    dataset = open_corpus(write_corpus(tmp_path / "x", count=60), cache=tmp_path / "cache", packing="best_fit")
    train_loader(dataset)
    path = dataset.store.folder / f"best_fit-{SEQ_LEN}" / f"train.{name}"
    path.write_bytes(change(np.fromfile(path, dtype=np.int64)).tobytes())
    with pytest.raises(ConfigError, match=r"is corrupt .*delete that folder"):
        train_loader(dataset)


def test_streamed_documents_are_not_packed():
    training = Training(dataset="org/name")
    with pytest.raises(ConfigError, match=r"data\.packing = .* streamed, .* set it to"):
        open_dataset(training=training, data=Data(packing="best_fit"), tokenizer=TOKENIZER)


def test_padding_needs_masks_of_documents():
    wrong = Config(data=Data(packing="best_fit"), training=Training(document_masking=False))
    (error,) = find_config_errors(wrong, device_type="cpu")
    assert error.startswith('data.packing = "best_fit": ')
