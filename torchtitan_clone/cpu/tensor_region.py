"""Allocator of CPU tensors that avoids the fragmentation of malloc (tensor_region.cpp)."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch

from torchtitan_clone.cpu.library import CompilationError, load_cpp

logger = logging.getLogger("torchtitan_clone")

_TORCH = Path(torch.__file__).parent
_FLAGS = ["-O2", f"-I{_TORCH / 'include'}"]
_LIBRARIES = [f"-L{_TORCH / 'lib'}", "-lc10"]
_library: ctypes.CDLL | None = None


@cache
def use_tensor_region() -> None:
    """Allocates CPU tensors of 64 KiB or more in a region of memory of their own from now on; logs the allocator.

    It stays malloc with ALLOCATOR=default, without a compiler of C++, and where address space cannot be reserved.
    """
    logger.info("allocator of CPU tensors: %s", _set_up())


def _set_up() -> str:
    if os.environ.get("ALLOCATOR") == "default":
        return "malloc, as $ALLOCATOR is default"
    try:
        library = load_cpp([Path(__file__).with_suffix(".cpp")], flags=_FLAGS, libraries=_LIBRARIES)
    except CompilationError as error:
        return f"malloc, which needs more memory: {error}"
    library.use_tensor_region.restype = ctypes.c_bool
    if not library.use_tensor_region():
        remedy = "see ulimit -v, ulimit -d and vm.overcommit_memory"
        return f"malloc, which needs more memory: address space cannot be reserved; {remedy}"
    global _library
    _library = library
    return "a region of their own"


def use_huge_pages() -> None:
    """Lets the kernel use huge pages for the region from now on, which a run calls after its first step.

    The first touch of huge pages takes a virtual machine up to 3 s/GiB if its host supplies them, of small pages 0.4 s.
    The kernel joins the small pages of a longer run in the background.
    """
    if _library is not None:
        _library.use_huge_pages()
