"""Code of compiled blocks that a later start loads, without tracing the blocks or importing the compiler.

torch's caches are looked up with a traced graph, by modules that can also compile. This saves what tracing gives too:
the code of the graph, and the guards that say for which blocks and inputs it holds.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor, nn
from torch.compiler import config as compiler_config

from torchtitan_clone.observe.logging import logger
from torchtitan_clone.ops.cpp_library import has_tiles, is_loaded
from torchtitan_clone.torch_compat import (
    TORCH,
    GuardedCode,
    SavedCode,
    StaleCodeError,
    changed_constants,
    compile_forward,
    compiler_settings,
    identify_torch,
    import_inductor,
    load_forward,
    needs_torch_compile,
)

LEFT_TO_TORCH = b"can only be compiled by torch.compile"
"""Content of the file of code that cannot be saved or loaded."""


def compile_blocks(
    layers: nn.ModuleDict, *, backend: str, device_type: str, fullgraph: bool, can_be_saved: bool
) -> None:  # fmt: skip
    """Replaces each block by its compiled form in place; equal blocks share one compilation.

    On a CPU inductor's code is saved where set_up_compile() keeps torch's, unless it depends on objects of this start,
    as on process groups.
    """
    on_cpu = device_type == "cpu" and backend == "inductor"
    folder = _code_folder() if on_cpu and can_be_saved else None
    if on_cpu and folder is None:
        import_inductor()
    compiled = cast("Callable[[nn.Module], nn.Module]", partial(torch.compile, backend=backend, fullgraph=fullgraph))
    for name, block in list(layers.items()):
        layers[name] = compiled(block) if folder is None else CompiledBlock(block, compiled=compiled, folder=folder)


def _code_folder() -> "CodeFolder | None":
    """Returns a folder in torch's cache, None if the user has turned caches off, or none can be written."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None or compiler_config.force_disable_caches:
        return None
    environment = f"{identify_torch(TORCH).hex()} {compiler_config.cache_key_tag}"
    return CodeFolder(Path(folder, "blocks"), environment=environment)


class CompiledBlock(nn.Module):
    """A block that runs code of a folder, or what `compiled` makes of it where the folder has none for its inputs."""

    def __init__(self, block: nn.Module, *, compiled: Callable[[nn.Module], nn.Module], folder: "CodeFolder"):
        super().__init__()
        self._orig_mod = block  # as torch.compile names it
        self._compiled = cache(lambda: compiled(block))  # not a child of this module: it has the same one
        self._folder = folder
        self._kind = repr((block, _attributes_of(block), [_describe(weight) for weight in block.parameters()]))

    def forward(self, *inputs: object) -> object:
        """Returns what the block returns."""
        block = self._orig_mod
        code = None if needs_torch_compile(block) else self._folder.find(block, inputs, kind=self._kind)
        if code is not None:
            return code.fn(block, *inputs)
        import_inductor()
        result = self._compiled()(*inputs)
        self._folder.leave_failed_to_torch()
        return result


class CodeFolder:
    """The compiled code of the blocks of a model, and the folder where later starts find it.

    A file is named by what no guard covers: torch, this package, the processor (`environment`), and the compiler's
    settings. Up to `most_kinds` kinds of blocks and inputs get code in a start: each takes about 10 s to compile.
    """

    def __init__(self, folder: Path, *, environment: str, most_kinds: int = 32) -> None:
        self._folder, self._environment, self._most_kinds = folder, environment, most_kinds
        self._codes: list[tuple[GuardedCode, dict[str, str]]] = []  # and constants of a block, which no guard tests
        self._tried: set[str] = set()
        self._failed: list[Path] = []

    def find(self, block: nn.Module, inputs: Sequence[object], *, kind: str) -> GuardedCode | None:
        """Returns code whose guards accept the block and its inputs, loaded or compiled, or None.

        Only the first inputs of blocks of a kind get code, with gradients and without: torch.compile makes code that
        takes any sizes of all others, and limits how often it compiles for a number that changes.
        """
        for code, constants in self._codes:
            if code.guard_check(block, *inputs) and not changed_constants(constants, block):
                return code
        tensors = [*block.parameters(), *(each for each in inputs if isinstance(each, Tensor))]
        kind += f" {torch.is_grad_enabled()} {[each.requires_grad for each in tensors]}"
        if kind in self._tried or len(self._tried) == self._most_kinds:
            return None
        self._tried.add(kind)
        settings = f"{self._environment} {compiler_settings()} {is_loaded()} {has_tiles()}"
        name = f"{settings} {kind} {_attributes_of(block)} {_describe(inputs)}"
        path = self._folder / blake2b(name.encode(), digest_size=16).hexdigest()
        content = path.read_bytes() if path.exists() else b""
        if content == LEFT_TO_TORCH or " at 0x" in name:  # an address, which another start does not have
            return None
        try:
            code, saved = _load(content, block=block, inputs=inputs) or _compile(path, block=block, inputs=inputs)
        except Exception as error:  # noqa: BLE001, whatever it is: torch.compile compiles the block, or raises it
            logger.debug("no compiled code in %s: %s", path, error)
            self._failed.append(path)
            return None
        self._codes.append((code, {name: text for name, text in saved.constants.items() if name.startswith("self")}))
        return code

    def leave_failed_to_torch(self) -> None:
        """Notes for later starts that code which torch.compile has compiled can be neither saved nor loaded."""
        for path in self._failed:
            _write(path, LEFT_TO_TORCH)
        self._failed.clear()


def _attributes_of(block: nn.Module) -> list[tuple[str, object]]:
    """Returns the numbers of a block and the keywords of its partial functions, for the name of its code."""
    return [
        (f"{path}.{name}", sorted(value.keywords) if isinstance(value, partial) else value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None | partial)
    ]


def _describe(value: object) -> object:
    """Returns what code depends on of an input, for the name of a file."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.requires_grad)
    return [_describe(each) for each in cast("Sequence[object]", value)] if isinstance(value, tuple) else repr(value)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=32).hexdigest().encode()


def _load(content: bytes, *, block: nn.Module, inputs: Sequence[object]) -> tuple[GuardedCode, SavedCode] | None:
    """Returns the code of a file's content, None if it is incomplete, or of other sources or constants."""
    digest, _, content = content.partition(b"\n")
    if digest != _digest(content):
        return None
    header, _, data = content.partition(b"\n")
    try:
        saved = SavedCode(data=data, **json.loads(header))
        code = load_forward(block, saved)
    except StaleCodeError as error:
        logger.debug("compiled code is compiled again: %s", error)
        return None
    return (code, saved) if code.guard_check(block, *inputs) else None


def _compile(path: Path, *, block: nn.Module, inputs: Sequence[object]) -> tuple[GuardedCode, SavedCode]:
    """Compiles for these inputs and writes the file."""
    import_inductor()
    code, saved = compile_forward(block, inputs)
    header = json.dumps({"constants": saved.constants, "sources": saved.sources}).encode()
    content = b"\n".join((header, saved.data))
    _write(path, b"\n".join((_digest(content), content)))
    return code, saved


def _write(path: Path, content: bytes) -> None:
    """Writes a file as a whole; several ranks may do so at a time."""
    with suppress(OSError):  # as a full disk: a later start compiles again
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as folder:
            partial = Path(folder, path.name)
            partial.write_bytes(content)
            partial.rename(path)
