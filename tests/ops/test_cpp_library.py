"""The library of C++ in the user's cache folder."""

from tests.ops.test_cpp_attention import quick_compiler, run_python


def test_a_library_that_cannot_be_kept_or_loaded_is_compiled_again(tmp_path):
    user = quick_compiler(tmp_path, "-O0")
    run_python("check_case('two tokens')", **user)
    (library,) = tmp_path.glob("torchtitan_clone/cpp_*")
    library.write_bytes(b"no library")
    assert not run_python("check_case('two tokens')", **user)
    assert library.read_bytes().startswith(b"\x7fELF")
    assert not run_python("check_case('two tokens')", **{**user, "XDG_CACHE_HOME": str(library)})
