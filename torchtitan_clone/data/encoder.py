"""Tokenization in parallel processes.

Processes, not the tokenizer's own threads: those get slower with more cores for the patterns of Llama-like tokenizers.
This file is also what such a process runs. It imports nothing of the package, so that a process is up in 0.2 s, and it
ends when its standard input does, so that it never outlives whoever started it.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torchtitan_clone.data.tokenizer import Tokenizer

T = TypeVar("T")
Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens of some documents end to end, eos included, and how many tokens each document has."""


def encode_batches(
    batches: Iterable[tuple[Sequence[str], T]], *, tokenizer: "Tokenizer", dtype: str, num_processes: int
) -> Generator[tuple[T, np.ndarray, np.ndarray], None, None]:
    """Tokenize batches of documents, in order and a few batches ahead; processes start as they are needed.

    Yields what came with a batch, its tokens end to end with eos after each document, and each document's length.
    """
    setup = (tokenizer.backend.to_str(), tokenizer.eos_id, dtype)
    processes: list[_EncoderProcess] = []
    of_thread = threading.local()

    def start() -> None:
        of_thread.process = _EncoderProcess(setup)
        processes.append(of_thread.process)

    def encode(texts: Sequence[str]) -> Encoded:
        return of_thread.process.encode(texts)

    pending: deque[tuple[T, Future[Encoded]]] = deque()
    threads = ThreadPoolExecutor(num_processes, initializer=start)
    try:
        for texts, label in batches:
            pending.append((label, threads.submit(encode, texts)))
            if len(pending) > 2 * num_processes:
                label, encoded = pending.popleft()
                yield label, *encoded.result()
        for label, encoded in pending:
            yield label, *encoded.result()
    finally:
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()


class _EncoderProcess:
    """This file in a process of its own: pickled texts in, pickled tokens out."""

    def __init__(self, setup: tuple[str, int, str]) -> None:
        # -P: this file's folder holds modules whose names are not meant to be importable.
        # A session of its own: Ctrl-C is for the trainer alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        self._send(setup)

    def encode(self, texts: Sequence[str]) -> Encoded:
        assert self._process.stdout is not None
        try:
            self._send(texts)
            return pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise RuntimeError(f"a tokenizer process died with exit code {self._process.wait()}") from error

    def close(self) -> None:
        self._process.communicate()  # closes its input, which ends it

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()


def _encode(backend: Any, texts: Sequence[str], *, eos_id: int, dtype: str) -> Encoded:
    tokens: list[int] = []
    lengths = []
    for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
        ids = encoding.ids
        tokens += ids
        tokens.append(eos_id)
        lengths.append(len(ids) + 1)
    return np.array(tokens, dtype=dtype), np.array(lengths, dtype=np.int64)


def _serve() -> None:
    import tokenizers

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    content, eos_id, dtype = pickle.load(requests)
    backend = tokenizers.Tokenizer.from_str(content)
    backend.encode_special_tokens = True  # not part of what to_str() keeps
    while True:
        try:
            texts = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_encode(backend, texts, eos_id=eos_id, dtype=dtype), answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
