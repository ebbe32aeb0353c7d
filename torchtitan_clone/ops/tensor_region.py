"""Memory of CPU tensors: a region of their own, whose free blocks fit the next step's tensors (tensor_region.cpp)."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch

from torchtitan_clone.ops.cpp_library import CompilationError, load_cpp

logger = logging.getLogger("torchtitan_clone")

_TORCH = Path(torch.__file__).parent
_FLAGS = ["-O2", f"-I{_TORCH / 'include'}"]
_LIBRARIES = [f"-L{_TORCH / 'lib'}", "-lc10"]


@cache
def use_tensor_region() -> None:
    """Allocates large CPU tensors in a region from now on, if the environment does not have ALLOCATOR=default.

    Logs which allocator is used. It stays malloc where no C++ can be compiled or where addresses are limited.
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
        return "malloc, which needs more memory: the system limits the addresses of a process (see ulimit -v)"
    return "a region of their own"
