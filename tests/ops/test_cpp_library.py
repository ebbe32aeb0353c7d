"""The library of C++ in the user's cache folder."""

from tests.ops.test_cpp_attention import check_case, quick_compiler
from torchtitan_clone.ops.cpp_library import is_loaded
from torchtitan_clone.testing.harness import run_ranks


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
