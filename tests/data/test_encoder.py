"""Tokenizer processes return every document in order, and end with the process that started them."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import TOKENIZER, texts
from tests.data.processes import children, is_alive, wait_for
from torchtitan_clone.data.encoder import TokenizerProcessError, TokenizerProcesses
from torchtitan_clone.data.encoder import encode_batches as encode_by


def batches(count: int) -> list[tuple[list[str], int]]:
    """Returns labeled batches of texts."""
    return [(texts(20, seed=number), number) for number in range(count)]


def encode_batches(batches, *, num_processes, **options):
    with TokenizerProcesses(num_processes) as processes:
        yield from encode_by(batches, processes=processes, **options)


def encoders() -> list[int]:
    """Returns the tokenizer processes of this process."""
    return [pid for pid in children(os.getpid()) if "encoder.py" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.parametrize(("num_processes", "dtype"), [(1, "uint16"), (3, "uint32")])
def test_batches_come_back_in_order_with_their_labels(num_processes, dtype):
    encoded = encode_batches(batches(12), tokenizer=TOKENIZER, dtype=dtype, num_processes=num_processes)
    number = -1
    for number, (label, tokens, lengths, spelled) in enumerate(encoded):
        expected = [[*ids, TOKENIZER.eos_id] for ids in TOKENIZER.encode_batch(texts(20, seed=number))]
        assert label == number
        assert tokens.dtype == dtype
        assert tokens.tolist() == [token for document in expected for token in document]
        assert lengths.dtype == np.int64
        assert lengths.tolist() == [len(document) for document in expected]
        assert spelled.tolist() == [0] * 20
    assert number == 11
    assert not encoders()


def test_a_beginning_token_precedes_each_text():
    tokenizer = replace(TOKENIZER, bos_id=7)
    ((_, tokens, lengths, _),) = encode_batches([(["a", ""], 0)], tokenizer=tokenizer, dtype="uint16", num_processes=1)
    (ids,) = TOKENIZER.encode_batch(["a"])
    assert tokens.tolist() == [7, *ids, TOKENIZER.eos_id, 7, TOKENIZER.eos_id]
    assert lengths.tolist() == [len(ids) + 2, 2]


def test_processes_tokenize_for_one_source_after_another():
    """Also for another tokenizer in between; those of before go on."""
    with TokenizerProcesses(1) as processes:
        pids = []
        for tokenizer in (TOKENIZER, replace(TOKENIZER, bos_id=7), replace(TOKENIZER, bos_id=7), TOKENIZER):
            ((_, tokens, _, _),) = encode_by([(["a b"], 0)], tokenizer=tokenizer, dtype="uint16", processes=processes)
            start = [] if tokenizer.bos_id is None else [7]
            assert tokens.tolist() == [*start, *TOKENIZER.encode_batch(["a b"])[0], TOKENIZER.eos_id]
            pids += encoders()
    assert len(set(pids)) == 1
    assert not encoders()


def test_closing_early_ends_the_processes():
    encoded = encode_batches(batches(30), tokenizer=TOKENIZER, dtype="uint16", num_processes=2)
    next(encoded)
    assert encoders()
    assert not any("numpy" in Path(f"/proc/{pid}/maps").read_text() for pid in encoders())  # takes 0.1 s to import
    encoded.close()
    assert not encoders()


@pytest.mark.parametrize(
    ("program", "message"),
    [("nowhere", "a tokenizer process cannot be started .*No such file"), ("false", "failed with exit code 1")],
)
def test_a_process_that_does_not_start_is_an_error(monkeypatch, program, message):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(TokenizerProcessError, match=message):
        list(encode_batches(batches(20), tokenizer=TOKENIZER, dtype="uint16", num_processes=2))


def test_a_killed_tokenizer_process_is_an_error():
    encoded = encode_batches(batches(200), tokenizer=TOKENIZER, dtype="uint16", num_processes=1)
    next(encoded)
    (process,) = encoders()
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: not is_alive(process))
    with pytest.raises(RuntimeError, match="a tokenizer process failed with exit code -9"):
        list(encoded)
