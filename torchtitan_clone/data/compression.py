"""Decompresses files as streams in bounded memory: gzip, bzip2, xz and zstandard."""

import bz2
import gzip
import io
import lzma
import zlib
from typing import TYPE_CHECKING, BinaryIO, cast

from torchtitan_clone.documents import DocumentError

if TYPE_CHECKING:
    import zstandard
    from _typeshed import WriteableBuffer

SUFFIXES = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}
"""Compression by the end of a file's name."""
MAGIC = {b"\x1f\x8b\x08": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\0": "xz"}
MAGIC |= {b"BZh%d1AY&SY" % level: "bz2" for level in range(1, 10)}
"""Compression by the first bytes of a file."""
ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What the streams raise if the data is truncated or corrupt."""
_MAX_WINDOW = 1 << 31
"""The longest window of a zstandard frame: that of `zstd --long=31`."""


def decompressed(raw: BinaryIO, *, compression: str) -> BinaryIO:
    """Returns a stream of the decompressed data; `raw` itself if `compression` is empty."""
    if compression == "gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw))
    if compression == "bz2":
        return cast("BinaryIO", bz2.BZ2File(raw))
    if compression == "xz":
        return cast("BinaryIO", lzma.LZMAFile(raw))
    if compression == "zst":
        return io.BufferedReader(_ZstdReader(raw))
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompresses frame by frame, because zstandard's own reader accepts a truncated file."""

    INPUT_BYTES = 1 << 10
    """Become at most 32 MiB: a block of 128 KiB has at least 4 bytes."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fills the buffer from the data; 0 at its end. EOFError if it is truncated, OSError if it is corrupt.

        DocumentError if it needs too much memory.
        """
        while not self._output:
            self._input = self._input or self._raw.read(self.INPUT_BYTES)
            if not self._input:
                break
            self._decompress()
        if self._frame is not None and not self._output:
            raise EOFError("truncated within a frame")
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._output))
        target[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _decompress(self) -> None:
        import zstandard

        frame = self._frame or zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        try:
            self._output = memoryview(frame.decompress(self._input))
        except zstandard.ZstdError as error:
            reason = str(error).rpartition(": ")[2]
            if "too much memory" in reason:
                raise DocumentError("its window is longer than 2 GiB: compress it with zstd --long=31") from error
            raise OSError(reason) from error
        self._input = frame.unused_data
        self._frame = None if frame.eof else frame
