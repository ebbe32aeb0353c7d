"""Batches are compared with a loop over tokens."""

import itertools

import numpy as np
import pytest
import torch

from torchtitan_clone.data.packing import pack
from torchtitan_clone.ops import IGNORE_INDEX

EOS = 0


def random_rows(num_rows: int, seq_len: int, *, seed: int) -> np.ndarray:
    """Returns rows in which one token in five ends a document, so that short and empty documents occur."""
    generator = np.random.default_rng(seed)
    rows = generator.integers(1, 2048, (num_rows, seq_len + 1), dtype=np.uint16)
    rows[generator.random(rows.shape) < 0.2] = EOS
    return rows


def reference(row: list[int], *, document_masking: bool) -> list[tuple[int, int, int, int]]:
    """Returns (token, target, position, document) of each token of a row."""
    found = []
    position = 0
    document = 0
    for token, following in itertools.pairwise(row):
        ends = document_masking and token == EOS
        found.append((token, IGNORE_INDEX if ends else following, position, document))
        position, document = (0, document + 1) if ends else (position + 1, document)
    return found


@pytest.mark.parametrize("document_masking", [True, False])
@pytest.mark.parametrize(("num_rows", "seq_len"), [(1, 1), (1, 2), (3, 7), (16, 64)])
def test_a_batch_equals_the_reference(num_rows, seq_len, document_masking):
    for seed in range(20):
        rows = random_rows(num_rows, seq_len, seed=seed)
        batch = pack(rows, eos_id=EOS, document_masking=document_masking)
        documents_BT = torch.zeros_like(batch.tokens_BT) if batch.documents_BT is None else batch.documents_BT
        for index, row in enumerate(rows.tolist()):
            columns = (batch.tokens_BT, batch.targets_BT, batch.positions_BT, documents_BT)
            found = list(zip(*(column[index].tolist() for column in columns), strict=True))
            assert found == reference(row, document_masking=document_masking)
        assert (batch.documents_BT is None) == (not document_masking)
        assert batch.num_targets == (batch.targets_BT != IGNORE_INDEX).sum()


def test_tensors_have_the_dtypes_that_embedding_and_loss_need():
    batch = pack(random_rows(2, 8, seed=0), eos_id=EOS, document_masking=True)
    assert {batch.tokens_BT.dtype, batch.targets_BT.dtype, batch.positions_BT.dtype} == {torch.int64}
    assert batch.documents_BT is not None
    assert batch.documents_BT.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (batch.tokens_BT, batch.targets_BT, batch.positions_BT))


@pytest.mark.parametrize("document_masking", [True, False])
def test_padding_rows_have_no_targets(document_masking):
    rows = random_rows(4, 16, seed=1)
    unpadded = pack(rows, eos_id=EOS, document_masking=document_masking)
    batch = pack(rows, eos_id=EOS, document_masking=document_masking, padding=3)
    assert (batch.targets_BT[1:] == IGNORE_INDEX).all()
    assert torch.equal(batch.targets_BT[0], unpadded.targets_BT[0])
    assert batch.num_targets == (unpadded.targets_BT[0] != IGNORE_INDEX).sum()


@pytest.mark.parametrize("document_masking", [True, False])
@pytest.mark.parametrize(("seq_len", "depth"), [(1, 2), (2, 1), (64, 1), (64, 3)])
def test_later_targets_are_tokens_of_the_same_row_and_document(seq_len, depth, document_masking):
    rows = random_rows(8, seq_len, seed=3)
    batch = pack(rows, eos_id=EOS, document_masking=document_masking, padding=1, mtp_depth=depth)
    assert batch.num_targets == pack(rows, eos_id=EOS, document_masking=document_masking, padding=1).num_targets
    for row, found_KT in zip(rows[:-1].tolist(), batch.mtp_targets_BKT, strict=False):
        for k, position in itertools.product(range(1, depth + 1), range(seq_len)):
            following = row[position : position + k + 2]  # the token, and all up to the target
            is_counted = len(following) == k + 2 and not (document_masking and EOS in following[:-1])
            expected = following[-1] if is_counted else IGNORE_INDEX
            assert found_KT[k - 1, position] == expected, (row, k, position)
    assert (batch.mtp_targets_BKT[-1] == IGNORE_INDEX).all()
    index_T = torch.tensor([seq_len - 1, 0])
    assert torch.equal(batch.select_tokens(index_T).mtp_targets_BKT, batch.mtp_targets_BKT[:, :, index_T])
    assert torch.equal(batch.microbatches(3)[1].mtp_targets_BKT, batch.mtp_targets_BKT[3:6])


@pytest.mark.parametrize("document_masking", [True, False])
@pytest.mark.parametrize(("seq_len", "depth"), [(1, 1), (9, 0), (64, 2)])
def test_context_is_what_is_at_or_before_a_target_in_its_document(seq_len, depth, document_masking):
    rows = random_rows(8, seq_len, seed=4)
    rows[3, seq_len // 2 :] = EOS  # as best-fit packing fills a row
    choices = {"eos_id": EOS, "document_masking": document_masking, "padding": 2, "mtp_depth": depth}
    batch = pack(rows, **choices, marks_context=True)
    assert pack(rows, **choices).is_context_BKT is None
    later = [] if batch.mtp_targets_BKT is None else batch.mtp_targets_BKT.unbind(1)
    for k, targets_BT in enumerate([batch.targets_BT, *later]):
        for row, (targets, found) in enumerate(zip(targets_BT.tolist(), batch.is_context_BKT[:, k], strict=True)):
            documents = [0] * seq_len if batch.documents_BT is None else batch.documents_BT[row].tolist()
            targets_of = [document for document, target in zip(documents, targets, strict=True) if target >= 0]
            last = {document: max(t for t in range(seq_len) if targets[t] >= 0 and documents[t] == document)
                    for document in targets_of}  # fmt: skip
            assert found.tolist() == [t <= last.get(documents[t], -1) for t in range(seq_len)], (k, row)
    assert not batch.is_context_BKT[6:].any()
    if document_masking:
        assert not batch.is_context_BKT[3, :, seq_len // 2 :].any()
        assert torch.equal(batch.is_context_BKT[:, 0], batch.targets_BT != IGNORE_INDEX)
    index_T = torch.tensor([seq_len - 1, 0])
    selected = batch.select_tokens(index_T).select_context(slice(1, 2)).is_context_BKT
    assert torch.equal(selected, batch.is_context_BKT[..., :1])
    assert torch.equal(batch.microbatches(3)[1].is_context_BKT, batch.is_context_BKT[3:6])


def test_microbatches_concatenate_to_the_batch():
    batch = pack(random_rows(7, 16, seed=2), eos_id=EOS, document_masking=True)
    microbatches = batch.microbatches(3)
    assert [len(microbatch.tokens_BT) for microbatch in microbatches] == [3, 3, 1]
    assert torch.equal(torch.cat([microbatch.targets_BT for microbatch in microbatches]), batch.targets_BT)
    assert torch.equal(torch.cat([microbatch.positions_BT for microbatch in microbatches]), batch.positions_BT)
    assert all(microbatch.num_targets == (microbatch.targets_BT != IGNORE_INDEX).sum() for microbatch in microbatches)
    assert sum(microbatch.num_targets for microbatch in microbatches) == batch.num_targets


def test_a_batch_moves_to_a_device():
    for document_masking in (False, True):
        batch = pack(random_rows(2, 8, seed=3), eos_id=EOS, document_masking=document_masking)
        moved = batch.to(torch.device("meta"))
        assert moved.tokens_BT.is_meta
        assert moved.documents_BT is batch.documents_BT  # on the CPU
        assert moved.num_targets == batch.num_targets


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_microbatches_reach_the_gpu_unchanged():
    batch = pack(random_rows(4, 64, seed=4), eos_id=EOS, document_masking=True).pin_memory()
    for microbatch in batch.microbatches(2):
        assert microbatch.tokens_BT.is_pinned()
        assert torch.equal(microbatch.to(torch.device("cuda")).targets_BT.cpu(), microbatch.targets_BT)
