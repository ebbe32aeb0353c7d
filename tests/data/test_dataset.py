"""Rows of a token store: every epoch has all of them once, and a store that cannot be used is an error."""

import numpy as np
import pytest
import torch

from tests.data.corpora import TOKENIZER, open_corpus, texts, write, write_corpus
from tests.data.loaders import GLOBAL_BATCH, SEQ_LEN, next_batches, rows_of, train_loader, validation_loader
from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.dataset import rows_of_samples
from torchtitan_clone.ops import IGNORE_INDEX


def test_samples_are_one_epoch_after_another():
    rows = rows_of_samples(np.arange(7 * 5 + 2), num_rows=5, seed=3)
    epochs = [rows[start : start + 5].tolist() for start in range(0, 35, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3


def test_an_epoch_has_every_row_once_over_all_ranks(local_dataset):
    tokens = local_dataset.store.tokens("train")
    num_rows = (len(tokens) - 1) // SEQ_LEN
    expected = sorted(tokens[start * SEQ_LEN :][:SEQ_LEN].tolist() for start in range(num_rows))
    steps = 2 * num_rows // GLOBAL_BATCH + 1
    loaders = [train_loader(local_dataset, rank=rank, num_ranks=4) for rank in range(4)]
    rows = rows_of([next(loader) for _ in range(steps) for loader in loaders])
    first = rows[:num_rows].tolist()
    second = rows[num_rows : 2 * num_rows].tolist()
    assert sorted(first) == sorted(second) == expected
    assert first != second
    assert first != expected


def test_targets_are_the_next_tokens_of_the_store(local_dataset):
    stored = local_dataset.store.tokens("train").astype(np.int64)
    windows = {stored[start : start + SEQ_LEN + 1].tobytes() for start in range(0, len(stored) - SEQ_LEN, SEQ_LEN)}
    for batch in next_batches(train_loader(local_dataset, document_masking=False), 10):
        rows = torch.cat([batch.tokens_BT, batch.targets_BT[:, -1:]], dim=1)
        assert torch.equal(batch.tokens_BT[:, 1:], batch.targets_BT[:, :-1])
        assert batch.documents_BT is None
        assert {row.numpy().tobytes() for row in rows} <= windows


def test_a_batch_larger_than_the_source_repeats_it(tmp_path):
    dataset = open_corpus(write(tmp_path / "text", {"a.txt": "x = 1\n" * 20}), cache=tmp_path / "cache")
    rows = rows_of(next_batches(train_loader(dataset), 2)).tolist()
    distinct = len({tuple(row) for row in rows})
    assert distinct <= dataset.store.meta.tokens["train"] // SEQ_LEN < GLOBAL_BATCH


def test_seeds_give_different_orders(local_dataset):
    first, second = (rows_of(next_batches(train_loader(local_dataset, seed=seed), 2)) for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_a_source_shorter_than_a_row_is_an_error(tmp_path):
    dataset = open_corpus(write(tmp_path / "text", {"a.txt": "short"}), cache=tmp_path / "cache")
    expected = r"training\.seq_len = 16: a sequence takes .* 17 tokens, and the train split .* add text, or lower"
    with pytest.raises(ConfigError, match=expected):
        train_loader(dataset)


def test_an_empty_validation_split_is_an_error_with_remedies(small_corpus):
    dataset = open_corpus(small_corpus / "corpus", cache=small_corpus / "cache", held_out_fraction=0.0)
    with pytest.raises(ConfigError, match=r"validation split .* raise data\.held_out_fraction"):
        validation_loader(dataset)


def test_an_id_outside_the_vocabulary_is_an_error(tmp_path):
    dataset = open_corpus(write_corpus(tmp_path / "corpus", count=20), cache=tmp_path / "cache")
    path = dataset.store.folder / "train.tokens"
    content = np.fromfile(path, dtype=np.uint16)
    content[5] = 2048
    content.tofile(path)
    with pytest.raises(ConfigError, match=r"corrupt .*token id 2048, and the tokenizer has 2048 ids"):
        next_batches(train_loader(dataset), 100)


@pytest.mark.parametrize("document_masking", [True, False])
def test_validation_reads_every_held_out_row_once(local_dataset, document_masking):
    stored = local_dataset.store.tokens("validation")
    num_rows = (len(stored) - 1) // SEQ_LEN
    assert num_rows % GLOBAL_BATCH, "the last batch must need padding"
    loaders = [
        validation_loader(local_dataset, rank=rank, num_ranks=4, document_masking=document_masking) for rank in range(4)
    ]
    for _ in range(2):
        of_ranks = [list(loader) for loader in loaders]
        assert {len(batches) for batches in of_ranks} == {-(-num_rows // GLOBAL_BATCH)}
        rows = torch.cat([batch.tokens_BT for batches in zip(*of_ranks, strict=True) for batch in batches])
        targets = torch.cat([batch.targets_BT for batches in zip(*of_ranks, strict=True) for batch in batches])
        assert rows[:num_rows].flatten().tolist() == stored[: num_rows * SEQ_LEN].tolist()
        assert (targets[num_rows:] == IGNORE_INDEX).all()
        counted = sum(batch.num_targets for batches in of_ranks for batch in batches)
        ends = np.count_nonzero(stored[: num_rows * SEQ_LEN] == TOKENIZER.eos_id) if document_masking else 0
        assert counted == num_rows * SEQ_LEN - ends


def test_held_out_documents_are_never_trained_on(local_dataset):
    """Every text of the corpus starts with a unique name."""
    rows = texts(60)
    trained = TOKENIZER.decode(local_dataset.store.tokens("train").tolist())
    validated = TOKENIZER.decode(local_dataset.store.tokens("validation").tolist())
    assert all((row in trained) != (row in validated) for row in rows)
