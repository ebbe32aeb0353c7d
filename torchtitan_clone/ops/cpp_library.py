"""C++ of this package, compiled into libraries when a run starts."""

import ctypes
import logging
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from torchtitan_clone.files import user_cache_folder
from torchtitan_clone.torch_compat import HAS_AMX, HAS_AVX512_BF16

logger = logging.getLogger("torchtitan_clone")

_VECTORS = {"AVX512": (16, "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma"), "AVX2": (8, "-mavx2 -mfma")}
"""Floats of a vector and flags of compilers by what torch calls the capability of a processor."""
FLOATS_OF_VECTOR, VECTOR_FLAGS = _VECTORS.get(torch.backends.cpu.get_cpu_capability(), (4, ""))
_KERNELS = ("cpp_attention.cpp", "cpp_product.cpp")
_TILES = ("cpp_tile_attention.cpp", "cpp_tile_product.cpp")
TILE_FLAGS = ["-mamx-tile", "-mamx-bf16", *(["-mavx512bf16"] if HAS_AVX512_BF16 else [])]
_TIMEOUT_SECONDS = 300


class CompilationError(Exception):
    """C++ cannot be compiled, or its library cannot be loaded; says why, and what to do."""


def cpp_compiler() -> str:
    """Returns the command of the compiler of C++, which is also that of torch.compile."""
    return os.environ.get("CXX") or "g++"


def start_compiling() -> None:
    """Starts to compile and load what this processor uses, in threads; else the first use does, and waits."""
    _library(_KERNELS)
    if HAS_AMX:
        _library(_TILES)


@cache
def _library(names: tuple[str, ...]) -> Future[ctypes.CDLL | None]:
    """Starts to compile and load these files in a thread; the result is None if that fails, which the log says."""
    return ThreadPoolExecutor(1).submit(_load_kernels, names)


def _load_kernels(names: tuple[str, ...]) -> ctypes.CDLL | None:
    tiles = TILE_FLAGS if HAS_AMX and names == _TILES else []
    flags = ["-O3", *VECTOR_FLAGS.split(), *tiles, f"-DFLOATS_OF_VECTOR={FLOATS_OF_VECTOR}", "-fopenmp"]
    try:
        library = load_cpp([Path(__file__).with_name(name) for name in names], flags=flags)
        if not tiles or permits_tiles(library):
            return library
        reason = "Linux does not permit this process to use the tiles of AMX; update Linux to 5.16 or later"
    except CompilationError as error:
        reason = str(error)
    logger.warning("a CPU uses torch's kernels, which are slower: %s", reason)
    return None


def permits_tiles(library: ctypes.CDLL) -> bool:
    """Asks Linux for the registers of tiles; returns whether this process may use them."""
    library.permit_tiles.restype = ctypes.c_bool
    return library.permit_tiles()


def load_cpp(sources: Sequence[Path], *, flags: Sequence[str], libraries: Sequence[str] = ()) -> ctypes.CDLL:
    """Returns the library of these files, which is compiled into the user's cache folder if it is not there.

    Where that folder cannot be written, each process compiles. CompilationError if there is no library.
    """
    folder = user_cache_folder()
    try:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return _load(folder, sources, flags=flags, libraries=libraries)
        with TemporaryDirectory() as private:
            return _load(Path(private), sources, flags=flags, libraries=libraries)
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[0]} ended with status {error.returncode}: {error.stderr[-1000:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    remedy = "install g++, or set $CXX to the command of another compiler of C++"
    raise CompilationError(f"C++ was not compiled: {reason}; {remedy}")


def _load(folder: Path, sources: Sequence[Path], *, flags: Sequence[str], libraries: Sequence[str]) -> ctypes.CDLL:
    command = [cpp_compiler(), "-std=c++17", *flags, "-shared", "-fPIC", *map(str, sources), *libraries]
    texts = [path.read_text() for path in (*sources, *sorted(sources[0].parent.glob("*.h")))]
    parts = [cpp_compiler(), *flags, *libraries, torch.__version__, *texts]
    library = folder / f"cpp_{blake2b(chr(0).join(parts).encode(), digest_size=16).hexdigest()}.so"
    if library.exists():
        with suppress(OSError):  # a file that is damaged
            return ctypes.CDLL(str(library))
    with TemporaryDirectory(dir=folder) as temporary:
        partial = Path(temporary, library.name)
        command += ["-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        partial.rename(library)  # ranks of a machine may compile at the same time
    return ctypes.CDLL(str(library))


@torch.compiler.assume_constant_result
def is_loaded() -> bool:
    """Whether the library could be compiled and loaded, for which the first call waits."""
    return _library(_KERNELS).result() is not None


@torch.compiler.assume_constant_result
def has_tiles() -> bool:
    """Whether this process multiplies by the tiles of AMX: the processor, the compiler and Linux allow it."""
    return HAS_AMX and _library(_TILES).result() is not None


def loaded_library() -> ctypes.CDLL:
    """Returns the library where is_loaded() is true."""
    library = _library(_KERNELS).result()
    assert library is not None
    return library


def tile_library() -> ctypes.CDLL:
    """Returns the library of attention and products in tiles; without AMX loops compute the same, slowly."""
    library = _library(_TILES).result()
    assert library is not None
    return library
