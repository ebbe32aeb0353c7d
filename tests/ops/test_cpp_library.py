"""The library of C++ in the user's cache folder."""

import platform
from pathlib import Path

import pytest

from tests.ops.test_cpp_attention import check_case, quick_compiler
from torchtitan_clone.ops import cpp_library
from torchtitan_clone.ops.cpp_library import (
    FLOATS_OF_VECTOR,
    TILE_FLAGS,
    VECTOR_FLAGS,
    is_loaded,
    load_cpp,
    permits_tiles,
)
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.torch_compat import HAS_AMX


def check_library():
    check_case("two tokens")
    assert is_loaded()


def test_a_library_that_cannot_be_kept_or_loaded_is_compiled_again(tmp_path):
    user = quick_compiler(tmp_path, "-O0")
    run_ranks(check_library, 1, env=user)
    (library,) = tmp_path.glob("torchtitan_clone/cpp_*")
    library.write_bytes(b"no library")
    run_ranks(check_library, 1, env=user)
    assert library.read_bytes().startswith(b"\x7fELF")
    written = library.stat().st_mtime_ns
    run_ranks(check_library, 1, env=user)
    assert library.stat().st_mtime_ns == written
    run_ranks(check_library, 1, env={**user, "XDG_CACHE_HOME": str(library)})


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_tiles_are_used_only_where_linux_permits_it():
    source = Path(cpp_library.__file__).with_name("cpp_tile_attention.cpp")
    flags = ["-O1", *TILE_FLAGS, f"-DFLOATS_OF_VECTOR={FLOATS_OF_VECTOR}", *VECTOR_FLAGS.split(), "-fopenmp"]
    assert permits_tiles(load_cpp([source], flags=flags)) is HAS_AMX
