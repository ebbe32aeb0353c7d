"""Compiled code that later starts load: it must be that of these blocks, inputs, sources and settings."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchtitan_clone.config import load_config
from torchtitan_clone.models.spec import KeptOperations
from torchtitan_clone.parallel.compiled_code import LEFT_TO_TORCH, CodeFolder, CompiledBlock
from torchtitan_clone.parallel.runtime import set_up_compile
from torchtitan_clone.run import preflight
from torchtitan_clone.run.engine import build_plan_mesh, parallelize_model_parts
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options, read_json_lines
from torchtitan_clone.torch_compat import checkpoint_wrapper, init_fake_process_group

SHAPE = (4, 8)


class Scale(nn.Module):
    """A block with a weight and a number."""

    def __init__(self, factor: float = 3.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE[1]))
        self.factor = factor

    def forward(self, x: Tensor, shifts: tuple[Tensor, Tensor] | None = None) -> Tensor:
        y = torch.tanh(x * self.weight) * self.factor
        return y if shifts is None else y + shifts[0] - shifts[1]


class ByTorch(nn.Module):
    """Stands for what torch.compile makes of a block, and notes the shapes of its inputs."""

    def __init__(self, block: nn.Module, shapes: list[torch.Size]):
        super().__init__()
        self._block, self._shapes = block, shapes

    def forward(self, x: Tensor, *more: object) -> Tensor:
        self._shapes.append(x.shape)
        return self._block(x, *more)


class Start:
    """What a start computes by a block with the code of a folder, and whether it has called torch.compile's."""

    def __init__(self, folder: Path, *, environment: str = "this one", **options: int):
        torch.compiler.reset()  # remembers numbers that have changed
        self.folder = CodeFolder(folder, environment=environment, **options)
        self.traced: list[torch.Size] = []

    def __call__(self, block: nn.Module, *inputs: object) -> Tensor:
        found = CompiledBlock(block, compiled=lambda block: ByTorch(block, self.traced), folder=self.folder)(*inputs)
        assert isinstance(found, Tensor)
        return found


def times(folder: Path) -> dict[str, int]:
    """Returns when each file of a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def check(start: Start, block: nn.Module, *inputs: Tensor) -> None:
    """Compares results and gradients with those of the block itself; the code of a folder must have been used."""
    found, wanted = [], []
    for results, run in ((found, start), (wanted, lambda block, *inputs: block(*inputs))):
        block.zero_grad()
        y = run(block, *inputs)
        y.sum().backward()
        results += [y.detach(), *(weight.grad for weight in block.parameters())]
    torch.testing.assert_close(found, wanted)
    assert not start.traced


def test_a_later_start_loads_the_code_of_an_earlier_one(tmp_path):
    x = torch.randn(SHAPE)
    check(Start(tmp_path), Scale(), x)
    before = times(tmp_path)
    assert len(before) == 1
    start = Start(tmp_path)
    check(start, Scale(), x)
    check(start, Scale(), x + 1)
    assert times(tmp_path) == before


@pytest.mark.parametrize("change", ["number in the block", "environment", "threads", "dtype", "frozen", "no gradients"])
def test_what_the_code_depends_on_is_compiled_for(tmp_path, change):
    x = torch.randn(SHAPE)
    check(Start(tmp_path), Scale(), x)
    before = times(tmp_path)
    block = Scale(factor=5.0 if change == "number in the block" else 3.0)
    start = Start(tmp_path, environment="another" if change == "environment" else "this one")
    threads = torch.get_num_threads()
    try:
        if change == "threads":
            torch.set_num_threads(threads + 1)
        if change == "dtype":
            block, x = block.double(), x.double()
        if change == "frozen":
            block.weight.requires_grad_(False)
        if change == "no gradients":
            with torch.no_grad():
                torch.testing.assert_close(start(block, x), block(x))
        elif change == "frozen":
            torch.testing.assert_close(start(block, x), block(x))
        else:
            check(start, block, x)
        assert not start.traced
        assert times(tmp_path) != before
    finally:
        torch.set_num_threads(threads)


def test_code_for_another_number_does_not_replace_the_first(tmp_path):
    x = torch.randn(SHAPE)
    for factor in (3.0, 5.0):
        check(Start(tmp_path), Scale(factor=factor), x)
    before = times(tmp_path)
    for factor in (3.0, 5.0):
        check(Start(tmp_path), Scale(factor=factor), x)
    assert times(tmp_path) == before


def test_each_number_among_the_blocks_of_a_start_gets_code(tmp_path):
    x = torch.randn(SHAPE)
    for _ in range(2):
        start = Start(tmp_path)
        for factor in (3.0, 5.0, 3.0):
            check(start, Scale(factor), x)
        assert len(times(tmp_path)) == 2


def test_a_number_that_changes_during_a_start_is_left_to_torch_compile(tmp_path):
    start, block = Start(tmp_path), Scale()
    compiled = CompiledBlock(block, compiled=lambda block: ByTorch(block, start.traced), folder=start.folder)
    for block.factor in (3.0, 5.0, 7.0):
        compiled(torch.randn(SHAPE))
    assert len(start.traced) == 2
    assert len(times(tmp_path)) == 1


class Activated(nn.Module):
    """A block with a function and arguments of it."""

    def __init__(self, function: Callable[..., Tensor], *arguments: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE[1]))
        self.function, self.arguments = function, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight, *self.arguments)


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (F.silu, F.gelu),
        (torch.tanh, torch.sin),
        (double, triple),
        (torch.ops.aten.tanh.default, torch.ops.aten.sin.default),
    ],
)
def test_code_is_of_the_functions_of_a_block(tmp_path, first, second):
    x = torch.randn(SHAPE)
    start = Start(tmp_path)
    check(start, Activated(first), x)
    torch.testing.assert_close(start(Activated(second), x), second(x))
    start = Start(tmp_path)
    torch.testing.assert_close(start(Activated(second), x), second(x))


@pytest.mark.parametrize("function", [lambda x, size: x * size, F.max_pool1d])
def test_a_function_whose_name_is_not_unique_is_left_to_torch_compile(tmp_path, function):
    x, start = torch.randn(SHAPE), Start(tmp_path)
    torch.testing.assert_close(start(Activated(function, 2), x), function(x, 2))
    assert start.traced == [SHAPE]


def test_inputs_with_gradients_and_without_get_code(tmp_path):
    """The block behind frozen ones has none."""
    x = torch.randn(SHAPE)
    for _ in range(2):
        start = Start(tmp_path)
        check(start, Scale(), x)
        check(start, Scale(), x.clone().requires_grad_())
        assert len(times(tmp_path)) == 2


def test_the_number_of_compilations_of_a_start_is_limited(tmp_path):
    x = torch.ones(SHAPE)
    start = Start(tmp_path, most_kinds=1)
    check(start, Scale(), x)
    torch.testing.assert_close(start(Scale().double(), x.double()), Scale().double()(x.double()))
    assert start.traced == [SHAPE]


def test_code_of_other_kinds_of_recomputation_is_not_replaced(tmp_path):
    x, keep_nothing = torch.randn(SHAPE), KeptOperations(always=frozenset(), alternating=frozenset())
    blocks = [checkpoint_wrapper(Scale()), checkpoint_wrapper(Scale(), context_fn=partial(contexts, keep_nothing))]
    for block in blocks:
        check(Start(tmp_path), block, x)
    written = times(tmp_path)
    for block in blocks:
        check(Start(tmp_path), block, x)
    assert times(tmp_path) == written


def contexts(kept: KeptOperations):
    """Returns the contexts of a block whose recomputation keeps results of these operations."""
    return create_selective_checkpoint_contexts(list(kept.always))


def test_code_is_of_the_operations_that_recomputation_keeps(tmp_path):
    """No saved guard tests them: they are compared between starts, and between the blocks of one."""
    always = [frozenset(kept) for kept in ([], [torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor])]
    kept = [KeptOperations(always=each, alternating=frozenset()) for each in always]
    first, second = (checkpoint_wrapper(Scale(), context_fn=partial(contexts, each)) for each in kept)
    x = torch.randn(SHAPE)
    check(Start(tmp_path), first, x)
    written = times(tmp_path)
    check(Start(tmp_path), first, x)
    assert times(tmp_path) == written
    check(Start(tmp_path), second, x)
    assert times(tmp_path) != written
    check(Start(tmp_path), checkpoint_wrapper(Scale(), context_fn=partial(contexts, kept=kept[0])), x)  # has no args[0]
    check(Start(tmp_path), second, x)
    start = Start(tmp_path)
    check(start, second, x)
    torch.testing.assert_close(start(first, x), first(x))
    assert start.traced == [SHAPE]


def test_inputs_of_other_shapes_are_left_to_torch_compile(tmp_path):
    for _ in range(2):
        start = Start(tmp_path)
        for rows in (4, 6, 4, 8):
            x = torch.randn(rows, SHAPE[1])
            torch.testing.assert_close(start(Scale(), x), Scale()(x))
        assert start.traced == [(6, 8), (8, 8)]
    assert len(times(tmp_path)) == 1


def test_hooks_and_a_stance_are_left_to_torch_compile(tmp_path):
    x, block = torch.randn(SHAPE), Scale()
    start = Start(tmp_path)
    with torch.compiler.set_stance("force_eager"):
        start(block, x)
    handle = block.register_forward_hook(lambda _module, _inputs, output: output + 1)
    torch.testing.assert_close(start(block, x), Scale()(x) + 1)
    handle.remove()
    assert len(start.traced) == 2
    check(Start(tmp_path), block, x)


@pytest.mark.parametrize("damage", ["cut", "bit", "no code"])
def test_a_damaged_file_is_written_again(tmp_path, damage):
    x = torch.randn(SHAPE)
    check(Start(tmp_path), Scale(), x)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    broken = {"cut": content[:-1], "bit": content[:-9] + b"\1" + content[-8:], "no code": b"0" * 64 + b"\n{}\n"}
    path.write_bytes(broken[damage])
    check(Start(tmp_path), Scale(), x)
    assert path.read_bytes() != broken[damage]
    before = times(tmp_path)
    check(Start(tmp_path), Scale(), x)
    assert times(tmp_path) == before


MODULE = """
import torch
from torch import nn

SCALE = 2.0
TABLE = {"shift": 1.0}

class Settings:
    pass

SETTINGS = Settings()

def scaled(x, powers=(1.0, 2.0), *, shift=0.5):
    return (x * SCALE) ** powers[1] + shift

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return scaled(x * self.weight) + 1
"""


def own_block(folder: Path, text: str) -> nn.Module:
    """Returns the block of a module with this text, as a process imports it that has not imported another version."""
    (folder / "own_family.py").write_text(text)
    sys.modules.pop("own_family", None)
    importlib.invalidate_caches()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        return importlib.import_module("own_family").Block()
    finally:
        sys.dont_write_bytecode = before


@pytest.mark.parametrize(
    ("old", "new"), [("+ 1", "+ 2"), ("SCALE = 2.0", "SCALE = 3.0"), ("x * SCALE", "x + SCALE"), ("", "")]
)
def test_a_changed_source_of_a_family_is_compiled_again(tmp_path, monkeypatch, old, new):
    monkeypatch.syspath_prepend(tmp_path)
    x, folder = torch.randn(SHAPE), tmp_path / "blocks"
    check(Start(folder), own_block(tmp_path, MODULE), x)
    before = times(folder)
    check(Start(folder), own_block(tmp_path, MODULE.replace(old, new)), x)
    assert (times(folder) != before) == (old != new)


@pytest.mark.parametrize("change", ["SCALE = 7.0", "scaled.__kwdefaults__['shift'] = 7.0"])
def test_a_constant_that_another_process_sets_is_compared(tmp_path, monkeypatch, change):
    monkeypatch.syspath_prepend(tmp_path)
    x, folder = torch.randn(SHAPE), tmp_path / "blocks"
    check(Start(folder), own_block(tmp_path, MODULE), x)
    before = times(folder)
    block = own_block(tmp_path, MODULE)
    exec(change, vars(sys.modules["own_family"]))
    check(Start(folder), block, x)
    assert times(folder) != before


@pytest.mark.parametrize("factor", ['TABLE["shift"]', "(2.0 if isinstance(SETTINGS, Settings) else 3.0)"])
def test_code_that_depends_on_an_object_is_left_to_torch_compile(tmp_path, monkeypatch, factor):
    monkeypatch.syspath_prepend(tmp_path)
    x, folder = torch.randn(SHAPE), tmp_path / "blocks"
    block = own_block(tmp_path, MODULE.replace("x * SCALE", f"x * {factor}"))
    written = []
    for _ in range(2):
        start = Start(folder)
        torch.testing.assert_close(start(block, x), block(x))
        assert start.traced == [SHAPE]
        assert [path.read_bytes() for path in folder.iterdir()] == [LEFT_TO_TORCH]
        written.append(times(folder))
    assert written[0] == written[1]  # the second start did not try again


def test_a_block_that_fails_is_not_left_to_torch_compile(tmp_path, monkeypatch):
    """The next start may have the memory, or the corrected source."""
    monkeypatch.syspath_prepend(tmp_path)
    x, folder = torch.randn(SHAPE), tmp_path / "blocks"
    block = own_block(tmp_path, MODULE.replace("x * SCALE", "x * torch.ones(3)"))
    with pytest.raises(RuntimeError, match="size of tensor"):
        Start(folder)(block, x)
    assert not folder.exists()
    check(Start(folder), own_block(tmp_path, MODULE), x)


def test_an_object_of_this_start_among_the_inputs_is_left_to_torch_compile(tmp_path):
    start = Start(tmp_path / "blocks")
    block, x = Scale(), torch.randn(SHAPE)
    block.extra_repr = lambda: str(object())
    start(block, x)
    assert (start.traced, (tmp_path / "blocks").exists()) == ([SHAPE], False)


PROGRAM = """
import sys
from torchtitan_clone.train import main
code = main(sys.argv[1:])
print("compiler:", *[name for name in ("torch._inductor.graph", "torch._inductor.lowering") if name in sys.modules])
sys.exit(code)
"""


def test_a_run_starts_without_the_compiler(corpus, tmp_path):
    """The first run compiles; its steps and those of the second have the same bits. The first block is recomputed."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    outputs, losses = [], []
    for name in ("first", "second"):
        changes = {
            "compile__enable": True, "training__steps": 3, "checkpoint__enable": False, "job__run_name": name,
            "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op",
            "activation_checkpoint__first_blocks": 1,
        }  # fmt: skip
        command = [sys.executable, "-c", PROGRAM, *options(corpus, tmp_path / "runs", **changes)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.splitlines()[-1])
        rows = read_json_lines(tmp_path / "runs" / name / "metrics.jsonl")
        losses.append([(row["loss"], row["grad_norm"]) for row in rows if "loss" in row])
    assert outputs == ["compiler: torch._inductor.graph torch._inductor.lowering", "compiler:"]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def uses_folder(argv, world_size):
    """Returns whether the blocks of a run with these options use code of a folder, on a process group without ranks."""
    init_fake_process_group(rank=0, world_size=world_size)
    plan = preflight.resolve(load_config(argv), world_size=world_size, device_type="cpu")
    set_up_compile(plan.config.compile, device_type="cpu")
    (model,) = parallelize_model_parts(plan, mesh=build_plan_mesh(plan, device_type="cpu"))
    (found,) = {isinstance(block, CompiledBlock) for block in model.layers.values()}
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parallelism__data_parallel_shard_degree": 2}, True),
        ({"parallelism__tensor_parallel_degree": 2}, False),
        ({"parallelism__context_parallel_degree": 2}, False),
        ({"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}, True),
    ],
)
def test_blocks_with_collectives_use_no_folder(corpus, tmp_path, changes, expected):
    """Code with collectives names process groups of a start."""
    argv = options(corpus, tmp_path, **changes, compile__enable=True)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    assert run_ranks(uses_folder, 1, argv, 2, env=environment) == [expected]
