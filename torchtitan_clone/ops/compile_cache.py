"""Where torch.compile keeps its results, and the compiler of C++ that it calls."""

import os
import shlex
import sys
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path
from shutil import which

import torch

from torchtitan_clone import compiler_guard
from torchtitan_clone.cache_folders import code_folders, locked, use_folder
from torchtitan_clone.files import write_atomically
from torchtitan_clone.torch_compat import compiler_command, identify_processor, set_up_inductor

PACKAGE = Path(__file__).parents[1]


def set_compile_cache(backend: str) -> None:
    """Makes torch.compile keep its results in the user's cache folder, or in $TORCHINDUCTOR_CACHE_DIR.

    torch's default is in the folder of temporary files: a restart of the machine empties it, and its name is known to
    other users, whose code would be loaded from it.

    torch's keys name neither the instructions that code for a CPU uses nor the gradients of this package's operators:
    each processor has a folder of its own, and a tag of each key names both.
    """
    processor, tag = identify_processor(), os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = f"{tag}{processor}{_identify_package()}"
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if chosen.startswith(f"{tempfile.gettempdir()}/torchinductor_"):  # as libraries that use torch.compile set it
        chosen = ""
    folder = code_folders(f"inductor/{processor}", chosen=chosen)[-1]
    use_folder(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    if backend == "inductor":
        set_up_inductor(precompiled_headers=folder / "precompiled_headers", compiler=_guarded_compiler(folder))


def _guarded_compiler(folder: Path) -> str:
    """Returns the command of a compiler of C++ that ends with the process that started it."""
    compiler = which(compiler_command()) or compiler_command()
    guard, command = shlex.join([sys.executable, "-I", "-S", compiler_guard.__file__]), shlex.quote(compiler)
    question = f'case "$1" in --version | -dump*) exec {command} "$@" ;; esac'
    script = f'#!/bin/sh\n{question}\nexec {guard} "$PPID" inf {command} "$@"\n'
    # The script names this installation; another one that shares the folder has its own. torch reads the name.
    guarded = folder / "compiler" / blake2b(script.encode(), digest_size=8).hexdigest() / Path(compiler).name
    guarded.parent.mkdir(parents=True, exist_ok=True)
    with locked(guarded.with_suffix(".lock")):
        if not os.access(guarded, os.X_OK):
            write_atomically(guarded, script.encode())
            guarded.chmod(0o755)
    return str(guarded)


@cache
def _identify_package() -> str:
    """Returns a hash of the Python files of this package."""
    digest = blake2b(digest_size=8)
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
