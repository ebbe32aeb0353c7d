"""Tokenizes documents in parallel processes.

Processes, because the tokenizer's own threads become slower with more cores for the patterns of Llama-like tokenizers.
Each runs this file, which imports neither the package nor numpy, to start in 0.1 s, and exits at the end of its input.
"""

import os
import pickle
import sys
import threading
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from torchtitan_clone.data.tokenizer import Tokenizer

T = TypeVar("T")
Encoded = tuple["array[int]", "array[int]"]
"""Concatenated tokens of some documents, bos and eos included, and the length of each document in tokens."""


class TokenizerProcessError(RuntimeError):
    """A tokenizer process ended, or the tokenizer cannot encode a text."""


def encode_batches(
    batches: Iterable[tuple[Sequence[str], T]], *, tokenizer: "Tokenizer", dtype: str, num_processes: int
) -> "Generator[tuple[T, np.ndarray, np.ndarray], None, None]":
    """Tokenizes batches (texts, label) in order and a few batches ahead; processes start as they are needed.

    Yields the label of each batch, its concatenated tokens with eos after each document, and each document's length.
    TokenizerProcessError if the tokenizer fails.
    """
    import numpy as np

    def to_numpy(encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = encoded
        return np.asarray(ids).astype(dtype), np.asarray(lengths)

    setup = (tokenizer.backend.to_str(), tokenizer.bos_id, tokenizer.eos_id)
    processes: list[Popen[bytes]] = []
    of_thread = threading.local()

    def encode(texts: Sequence[str]) -> Encoded:
        if hasattr(of_thread, "process"):
            return _encode(texts, process=of_thread.process)
        of_thread.process = _start_process()
        processes.append(of_thread.process)
        return _encode(setup, texts, process=of_thread.process)

    pending: deque[tuple[T, Future[Encoded]]] = deque()
    threads = ThreadPoolExecutor(num_processes)
    try:
        for texts, label in batches:
            pending.append((label, threads.submit(encode, texts)))
            if len(pending) > 2 * num_processes:
                label, encoded = pending.popleft()
                yield label, *to_numpy(encoded.result())
        for label, encoded in pending:
            yield label, *to_numpy(encoded.result())
    finally:
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()  # closes its input, so that it exits


def _start_process() -> Popen[bytes]:
    """Runs this file in a process: its set-up and pickled texts in, pickled tokens out."""
    command = [sys.executable, "-P", __file__]  # -P: this folder's modules must not shadow others
    # Memory that a batch frees is kept for the next one, up to 256 MiB: returning it costs 2 % of the time.
    memory = {"MALLOC_TRIM_THRESHOLD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
    environment = {**memory, **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    # A new session: Ctrl-C must reach only the trainer.
    try:
        return Popen(command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True)
    except OSError as error:
        raise TokenizerProcessError(f"a tokenizer process cannot be started ({error})") from error


def _encode(*messages: object, process: Popen[bytes]) -> Encoded:
    """Sends texts, after the set-up of a process that is new; returns their tokens."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for message in messages:
            pickle.dump(message, process.stdin)
        process.stdin.flush()
        answer: Encoded | str = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        raise TokenizerProcessError(f"a tokenizer process failed with exit code {process.wait()}") from error
    if isinstance(answer, str):
        raise TokenizerProcessError(f"the tokenizer failed: {answer}")
    return answer


def _serve() -> None:
    """Answers until the input ends, also where the other process is killed while it writes or reads."""
    import tokenizers

    content, bos_id, eos_id = pickle.load(sys.stdin.buffer)
    start = [] if bos_id is None else [bos_id]
    backend = tokenizers.Tokenizer.from_str(content)
    backend.encode_special_tokens = True  # to_str() does not save it
    while True:
        try:
            texts = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):
            return
        try:
            ids, lengths = array("I"), array("q")  # "H" takes twice as long
            for text in texts:
                # One at a time: what the library allocates for a text stays in the processor's cache.
                (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
                ids.fromlist(start)
                ids.fromlist(encoding.ids)
                ids.append(eos_id)
                lengths.append(len(start) + len(encoding) + 1)
            answer = ids, lengths
        except BaseException as error:  # noqa: BLE001, the library's panics are no Exception
            answer = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # without another attempt to write what is buffered


if __name__ == "__main__":
    _serve()
