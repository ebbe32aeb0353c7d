"""Standard output and error of a process: a closed pipe, a full disk or a lost terminal must not end training."""

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TextIO, cast

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, escape

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

P = ParamSpec("P")
STDOUT, STDERR = 1, 2
_NAMES = {STDOUT: "standard output", STDERR: "standard error"}


class _Output(io.FileIO):
    """A descriptor on which a write that fails loses its text; the first is noted on the other descriptor."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_noted = False

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            while (count := super().write(data)) is None:  # another process made a shared terminal or pipe non-blocking
                select.select([], [self], [])
            return count
        except OSError as error:
            if not self._is_noted:
                self._is_noted = True
                _note_loss(self.fileno(), reason=error.strerror or str(error))
            return memoryview(data).nbytes


def guard_outputs() -> None:
    """Makes stdout and stderr of this process ignore errors of the system; call it once, before other files open.

    A descriptor that the process was started without is opened on /dev/null: the next file that opens would get its
    number, and what libraries print would be written into it.
    """
    missing = [descriptor for descriptor in _NAMES if not _is_open(descriptor)]
    for descriptor in missing:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, descriptor)
        if null not in _NAMES:
            os.close(null)
    sys.stdout, sys.stderr = _guarded(STDOUT), _guarded(STDERR)
    for descriptor in missing:
        _note_loss(descriptor, reason="closed")


def print_error(error: Exception | str) -> None:
    """Prints an error to stderr, one line per message: control characters in names and values are escaped."""
    text = str(error) if isinstance(error, ConfigError) else escape(str(error))  # ConfigError escapes its messages
    sys.stderr.write(f"error: {text}\n")


def reports_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Makes the main function of a script print errors that the user can correct, and return the exit code 2 for them.

    It returns 130 after Ctrl-C, and 141 if nothing reads its output any more, for example after `head`. Characters that
    a terminal cannot show are escaped, and a stream that is closed is /dev/null.
    """

    @wraps(main)
    def run(*args: P.args, **options: P.kwargs) -> int:
        sys.stdin = _lenient(sys.stdin, mode="r", errors="surrogateescape")
        sys.stdout = _lenient(sys.stdout, mode="w", errors="backslashreplace")
        sys.stderr = _lenient(sys.stderr, mode="w", errors="backslashreplace")
        try:
            code = main(*args, **options)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python writes what is left when it exits
            return 128 + signal.SIGPIPE
        except OSError as error:
            print_error(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error)
        except (ConfigError, DocumentError, UnicodeDecodeError) as error:
            print_error(error)
        return 2

    return run


def _lenient(stream: TextIO | None, *, mode: str, errors: str) -> TextIO:
    """Returns a standard stream that takes any character; None is one that this process was started without."""
    stream = stream or cast("TextIO", open(os.devnull, mode))  # noqa: SIM115, open until the process ends
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # its descriptor was replaced by another kind
            stream.reconfigure(errors=errors)
    return stream


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _guarded(descriptor: int) -> TextIO:
    buffered = io.BufferedWriter(_Output(descriptor))
    return io.TextIOWrapper(buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _note_loss(descriptor: int, *, reason: str) -> None:
    other = STDOUT if descriptor == STDERR else STDERR
    text = f"note: {_NAMES[descriptor]} cannot be written ({reason}); what is printed there is lost\n"
    with contextlib.suppress(OSError):
        os.write(other, text.encode())
