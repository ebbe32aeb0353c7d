"""C++ of this package, compiled into libraries when a run starts."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from hashlib import blake2b
from pathlib import Path
from shutil import which

import torch

from torchtitan_clone import compiler_guard
from torchtitan_clone.cache_folders import (
    NoCodeFolderError,
    code_folders,
    is_intact,
    locked,
    use_folder,
    write_with_digest,
)
from torchtitan_clone.cpu.torch_compat import HAS_AMX
from torchtitan_clone.torch_compat import compiler_command, identify_processor

logger = logging.getLogger("torchtitan_clone")

_VECTORS = {"AVX512": (16, "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma"), "AVX2": (8, "-mavx2 -mfma")}
"""Floats of a vector and flags of compilers by what torch calls the capability of a processor."""
FLOATS_OF_VECTOR, VECTOR_FLAGS = _VECTORS.get(torch.backends.cpu.get_cpu_capability(), (4, ""))
_KERNELS = ("attention.cpp", "product.cpp")
_TILES = ("tile_attention.cpp",)
TILE_FLAGS = ["-mamx-tile", "-mamx-bf16"]
_TIMEOUT_SECONDS = 300
_left_out: set[str] = set()


class CompilationError(Exception):
    """C++ cannot be compiled, or its library cannot be loaded; says why, and what to do."""


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
    """Returns the library of these files, which is compiled if no folder of code has it for this processor.

    CompilationError if there is no library.
    """
    compiler = which(compiler_command())
    remedy = "install g++, or set $CXX to the command of another compiler of C++"
    try:
        folders = code_folders(f"cpp/{identify_processor()}")
        _use_folder(folders[-1])
        name = _name_library(sources, compiler=compiler, flags=flags, libraries=libraries)
        found = _find(folders, name)
        if not found and not compiler:
            raise CompilationError(f"C++ was not compiled: {compiler_command()} is not on $PATH; {remedy}")
        return ctypes.CDLL(str(found or _build(folders[-1] / name, sources, flags, libraries)))
    except subprocess.CalledProcessError as error:
        reason = f"{compiler_command()} ended with status {error.returncode}: {error.stderr[-1000:].strip()}"
    except NoCodeFolderError as error:
        reason, _, remedy = str(error).rpartition("; ")
    except OSError as error:
        reason, remedy = str(error), "free space, or set $XDG_CACHE_HOME to another folder"
    raise CompilationError(f"C++ was not compiled: {reason}; {remedy}")


_use_folder = cache(use_folder)


def _name_library(
    sources: Sequence[Path], *, compiler: str | None, flags: Sequence[str], libraries: Sequence[str]
) -> str:
    """Returns the name of a library by what it is compiled of and by; without a compiler a pattern for any."""
    texts = [path.read_text() for path in (*sources, *sorted(sources[0].parent.glob("*.h")))]
    parts = [*flags, *libraries, torch.__version__, *texts]
    if compiler is None:
        return f"{_digest(parts)}-*.so"
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return f"{_digest(parts)}-{_digest([compiler_command(), repr(version)])}.so"


def _digest(texts: Sequence[str]) -> str:
    return blake2b(chr(0).join(texts).encode(), digest_size=10).hexdigest()


def _find(folders: Sequence[Path], name: str) -> Path | None:
    return next((path for folder in folders for path in sorted(folder.glob(name)) if is_intact(path)), None)


def _build(library: Path, sources: Sequence[Path], flags: Sequence[str], libraries: Sequence[str]) -> Path:
    """Compiles and links a library; others that need it wait. Objects are kept until then: a run may end before."""
    objects = [library.with_name(f"{library.stem}.{source.stem}.o") for source in sources]
    with locked(library.with_suffix(".lock")):
        if is_intact(library):  # another process has compiled it meanwhile
            return library
        try:
            for source, path in zip(sources, objects, strict=True):
                if not is_intact(path):
                    _run_compiler([*flags, "-fPIC", "-c", str(source)], output=path)
            _run_compiler([*flags, "-shared", *map(str, objects), *libraries], output=library)
        except subprocess.CalledProcessError:
            if not is_intact(library):  # without locks another process may have linked it, and removed the objects
                raise
        for path in objects:
            path.unlink(missing_ok=True)
    return library


def _run_compiler(arguments: Sequence[str], *, output: Path) -> None:
    """Runs the compiler as long as this process lives, and writes its output with a digest."""
    partial = output.with_name(f"{output.name}.{os.urandom(8).hex()}.partial")
    guard = [sys.executable, "-I", "-S", compiler_guard.__file__, str(os.getpid()), str(_TIMEOUT_SECONDS)]
    command = [*guard, compiler_command(), "-std=c++17", *arguments, "-o", str(partial)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
        write_with_digest(output, partial.read_bytes())
    finally:
        partial.unlink(missing_ok=True)


@torch.compiler.assume_constant_result
def is_loaded() -> bool:
    """Whether this process computes by the library, for which the first call waits."""
    return "cpp" not in _left_out and _library(_KERNELS).result() is not None


@torch.compiler.assume_constant_result
def has_tiles() -> bool:
    """Whether this process attends by the tiles of AMX: the processor, the compiler and Linux allow it."""
    return HAS_AMX and "tiles" not in _left_out and _library(_TILES).result() is not None


def loaded_names() -> list[str]:
    """Returns the names of the libraries that could be loaded, whether left out or not."""
    kinds = {"cpp": _KERNELS, **({"tiles": _TILES} if HAS_AMX else {})}
    return [name for name, files in kinds.items() if _library(files).result() is not None]


def leave_out(names: set[str]) -> None:
    """Makes is_loaded() and has_tiles() false for these of loaded_names(), and for no others."""
    _left_out.clear()
    _left_out.update(names)


def loaded_library() -> ctypes.CDLL:
    """Returns the library where is_loaded() is true."""
    library = _library(_KERNELS).result()
    assert library is not None
    return library


def tile_library() -> ctypes.CDLL:
    """Returns the library of attention in tiles; without AMX loops compute the same, slowly."""
    library = _library(_TILES).result()
    assert library is not None
    return library
