"""Tokenizes documents in parallel processes.

Processes, because the tokenizer's own threads become slower with more cores for the patterns of Llama-like tokenizers.
Each runs this file, which imports neither the package nor numpy, to start in 0.1 s, and exits at the end of its input.
"""

import os
import pickle
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

    from torchtitan_clone.data.tokenizer import Tokenizer

T = TypeVar("T")
Chat = tuple[str, Sequence[tuple[int, int]], int]
"""A chat as text, which of its characters are targets, and how many special tokens its messages spell out."""
Encoded = tuple["array[int]", "array[int]", "array[int]", "array[int]"]
"""Concatenated tokens of some documents, of texts bos and eos included; of each document its length in tokens, and how
many special tokens it spells out; of each token of chats whether it is a target."""


Setup = tuple[str, bool, int | None, int]
"""A tokenizer in JSON, whether it parses special tokens, and the ids before (None: no token) and after each text."""


class TokenizerProcessError(RuntimeError):
    """A tokenizer process ended, or the tokenizer cannot encode a text."""


class TokenizerProcesses:
    """Processes that tokenize for one source after another, started as they are needed; a context."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count)
        self._processes: list[Popen[bytes]] = []
        self._of_thread = threading.local()

    def submit(self, setup: "Setup", texts: Sequence[str | Chat]) -> "Future[Encoded]":
        """Starts to tokenize texts by the tokenizer of this set-up; TokenizerProcessError if it fails."""
        return self._threads.submit(self._encode, setup, texts)

    def _encode(self, setup: "Setup", texts: Sequence[str | Chat]) -> Encoded:
        own = self._of_thread
        if not hasattr(own, "process"):
            own.process, own.setup = _start_process(), None
            self._processes.append(own.process)
        messages = [list(texts)] if own.setup == setup else [setup, list(texts)]
        encoded = _exchange(*messages, process=own.process)
        own.setup = setup
        return encoded

    def __enter__(self) -> "TokenizerProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()  # closes its input, so that it exits


def encode_batches(
    batches: Iterable[tuple[Sequence[str | Chat], T]], *, tokenizer: "Tokenizer", dtype: str,
    processes: TokenizerProcesses,
) -> "Generator[tuple[T, np.ndarray, np.ndarray, np.ndarray], None, None]":  # fmt: skip
    """Tokenizes batches (texts, label) in order and a few batches ahead.

    Yields the label of each batch, its concatenated tokens with eos after each text, or with the marks of chats, and of
    each document its length and the number of special tokens that it spells out. TokenizerProcessError if the tokenizer
    fails.
    """
    import numpy as np

    from torchtitan_clone.data.marks import CHAT, END, TARGET, with_marks

    def to_numpy(encoded: Encoded) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, lengths, spelled, targets = map(np.asarray, encoded)
        if not len(targets):
            return ids.astype(dtype), lengths, spelled
        marks = CHAT | TARGET * targets
        marks[np.cumsum(lengths) - 1] |= END
        return with_marks(ids, marks=marks), lengths, spelled

    setup = (tokenizer.backend.to_str(), tokenizer.parse_special_tokens, tokenizer.bos_id, tokenizer.eos_id)
    pending: deque[tuple[T, Future[Encoded]]] = deque()
    try:
        for texts, label in batches:
            pending.append((label, processes.submit(setup, texts)))
            if len(pending) > 2 * processes.count:
                label, encoded = pending.popleft()
                yield label, *to_numpy(encoded.result())
        for label, encoded in pending:
            yield label, *to_numpy(encoded.result())
    finally:
        for _, encoded in pending:
            encoded.cancel()


def _start_process() -> Popen[bytes]:
    """Runs this file in a process: set-ups and lists of texts in, the tokens of each list out, all of them pickled."""
    command = [sys.executable, "-P", __file__]  # -P: this folder's modules must not shadow others
    # Memory that a batch frees is kept for the next one, up to 256 MiB: returning it costs 2 % of the time.
    memory = {"MALLOC_TRIM_THRESHOLD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
    environment = {**memory, **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    # A new session: Ctrl-C must reach only the trainer.
    try:
        return Popen(command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True)
    except OSError as error:
        raise TokenizerProcessError(f"a tokenizer process cannot be started ({error})") from error


def _exchange(*messages: Setup | list[str | Chat], process: Popen[bytes]) -> Encoded:
    """Sends texts, after a set-up that is new to the process; returns their tokens."""
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


def spelling_counter(backend: "tokenizers.Tokenizer") -> Callable[[str], int]:
    """Returns a function that counts the special tokens of a tokenizer that a text spells out.

    A tokenizer that knows nothing else finds them, at 100 MB/s, in texts that have what all of them begin with.
    """
    import tokenizers

    special = [token for token in backend.get_added_tokens_decoder().values() if token.special]
    start = os.path.commonprefix([token.content for token in special])  # noqa: RUF071, of characters
    finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
    finder.add_special_tokens(special)

    def count(text: str) -> int:
        if start not in text:
            return 0
        (encoding,) = finder.encode_batch_fast([text], add_special_tokens=False)
        return sum(token_id > 0 for token_id in encoding.ids)

    return count


def find_targets(encoding: "tokenizers.Encoding", spans: Sequence[tuple[int, int]]) -> bytearray:
    """Returns of each token of a text whether it has some characters of the spans.

    It asks for the characters of a few tokens: a list of all would take a tenth of the time of tokenizing the text.
    """

    def start_of(token: int) -> int:
        return (encoding.token_to_chars(token) or (0, 0))[0]  # of tokens of a text never None

    def end_of(token: int) -> int:
        return (encoding.token_to_chars(token) or (0, 0))[1]

    tokens = range(len(encoding))
    targets = bytearray(len(tokens))
    for start, end in spans:
        first = bisect_right(tokens, start, key=end_of)
        last = bisect_left(tokens, end, lo=first, key=start_of)
        targets[first:last] = b"\1" * (last - first)
    return targets


def _encoder(setup: Setup) -> Callable[[list[str | Chat]], Encoded]:
    """Returns a function that tokenizes texts as the set-up says."""
    import tokenizers

    content, parse_special_tokens, bos_id, eos_id = setup
    start = [] if bos_id is None else [bos_id]
    backend = tokenizers.Tokenizer.from_str(content)
    backend.encode_special_tokens = not parse_special_tokens  # to_str() does not save it
    count = spelling_counter(backend)

    def encode(texts: list[str | Chat]) -> Encoded:
        ids, lengths, spelled, targets = array("I"), array("q"), array("q"), array("B")  # "H" takes twice as long
        for text in texts:
            if not isinstance(text, str):
                (encoding,) = backend.encode_batch([text[0]], add_special_tokens=False)
                ids.fromlist(encoding.ids)
                lengths.append(len(encoding))
                spelled.append(text[2])
                targets.extend(find_targets(encoding, text[1]))
                continue
            # One at a time: what the library allocates for a text stays in the processor's cache.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
            ids.fromlist(start)
            ids.fromlist(encoding.ids)
            ids.append(eos_id)
            lengths.append(len(start) + len(encoding) + 1)
            spelled.append(count(text))
        return ids, lengths, spelled, targets

    return encode


def _serve() -> None:
    """Answers until the input ends, also where the other process is killed while it writes or reads."""
    setup: Setup | None = None
    encode: Callable[[list[str | Chat]], Encoded] | None = None
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):
            return
        if isinstance(message, tuple):
            encode = None  # before another one is in memory
            setup = message
            continue
        try:
            assert setup is not None
            encode = encode or _encoder(setup)
            answer = encode(message)
        except BaseException as error:  # noqa: BLE001, the library's panics are no Exception
            answer = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # without another attempt to write what is buffered


if __name__ == "__main__":
    _serve()
