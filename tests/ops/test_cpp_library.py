"""The library of C++ in the user's cache folder."""

from tests.ops.test_cpp_attention import run_python
from torchtitan_clone.ops.cpp_library import cpp_compiler


def test_a_library_that_cannot_be_kept_or_loaded_is_compiled_again(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {cpp_compiler()} "$@" -O0\n')  # compiles in less time
    compiler.chmod(0o755)
    user = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    run_python("check_case('two tokens')", **user)
    (library,) = tmp_path.glob("torchtitan_clone/cpp_*")
    library.write_bytes(b"no library")
    assert not run_python("check_case('two tokens')", **user)
    assert library.read_bytes().startswith(b"\x7fELF")
    assert not run_python("check_case('two tokens')", **{**user, "XDG_CACHE_HOME": str(library)})
