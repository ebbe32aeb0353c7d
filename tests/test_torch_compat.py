"""Private names of torch and torchft are used in torch_compat.py only (as ruff checks), and each is still needed.

A test below fails when torch has a public name instead; a private one that is gone fails the tests that use it.
"""

import ast
import importlib
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchtitan_clone
from torchtitan_clone import torch_compat

PACKAGE = Path(torchtitan_clone.__file__).parent
FILES = [path for path in sorted(PACKAGE.glob("**/*.py")) if path.name != "torch_compat.py"]
LIBRARIES = ("torch", "torchft")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def origins_of(tree: ast.Module) -> dict[str, str]:
    """Returns the dotted origin of each name that a file imports."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origins |= {(alias.asname or alias.name.split(".")[0]): alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origins |= {(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
    return origins


def hidden_private_names(tree: ast.Module) -> Iterator[str]:
    """Yields private names that ruff does not see: those of getattr(), and overridden methods of library classes."""
    origins = origins_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                yield ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                root, *path = ast.unparse(base).split(".")
                module, _, name = ".".join([origins.get(root, ""), *path]).rpartition(".")
                if module.split(".")[0] in LIBRARIES and "[" not in name:
                    known = getattr(importlib.import_module(module), name)
                    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                    yield from (f"{node.name}.{each}" for each in methods if is_private(each) and hasattr(known, each))


def test_no_other_file_hides_a_private_name() -> None:
    assert [*hidden_private_names(ast.parse("def f(x): return getattr(x, '_local_tensor', None)"))]
    assert [*hidden_private_names(ast.parse("from torch import nn\nclass A(nn.Module):\n    def _apply(self): pass"))]
    wrong = [f"{path}: {name}" for path in FILES for name in hidden_private_names(ast.parse(path.read_text()))]
    assert not wrong, "use torch_compat instead:\n" + "\n".join(wrong)


def test_slow_modules_are_imported_when_needed() -> None:
    slow = ("torch._inductor", "torch.distributed.pipelining", "torch.distributed.tensor", "torchft")
    code = f"import sys, torchtitan_clone.torch_compat; sys.exit(str([m for m in {slow} if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.stderr.strip() == "[]"


def test_styles_of_tensor_parallelism_override_a_private_method() -> None:
    from torch.distributed.tensor.parallel import ParallelStyle

    assert ParallelStyle.__abstractmethods__ == {"_apply"}
    assert not hasattr(ParallelStyle, "apply")


PUBLIC_WHEN_PRESENT = [
    # TorchDispatchMode, tree_leaves
    ("torch.utils", "TorchDispatchMode"),
    ("torch.overrides", "TorchDispatchMode"),
    ("torch.utils", "pytree"),
    # wait_tensor
    ("torch.distributed", "wait_tensor"),
    # foreach_norms, foreach_mul_
    ("torch", "foreach_norm"),
    ("torch", "foreach_mul_"),
    # global_offset
    ("torch.distributed.tensor", "compute_local_shape_and_global_offset"),
    ("torch.distributed.tensor.DTensor", "global_offset"),
    # is_fake, fake_tensors
    ("torch", "FakeTensor"),
    ("torch.utils", "FakeTensorMode"),
    ("torch.compiler", "is_fake"),
    # next_autograd_node, running_autograd_node
    ("torch.autograd.graph", "current_node"),
    ("torch.autograd.graph.Node", "sequence_nr"),
    # look_inside
    ("torch.library.CustomOpDef", "init_fn"),
    # checkpoint_wrapper
    ("torch.utils.checkpoint", "checkpoint_wrapper"),
    ("torch.distributed.algorithms", "checkpoint_wrapper"),
    # enable_async_tensor_parallel
    ("torch.distributed", "symmetric_memory"),
    # process_group_of, process_groups, set_group_timeout, dump_collectives
    ("torch.distributed", "resolve_process_group"),
    ("torch.distributed", "get_process_groups"),
    ("torch.distributed", "get_default_store"),
    ("torch.distributed", "dump_flight_recorder"),
    # init_fake_process_group
    ("torch.distributed", "FakeStore"),
    # schedule_from_file
    ("torch.distributed.pipelining", "PipelineScheduleRuntime"),
    # log_compilation
    ("torch", "set_logs"),
    ("torch.compiler", "set_logs"),
    # record_memory_history, dump_memory_snapshot
    ("torch.cuda.memory", "record_memory_history"),
    ("torch.cuda.memory", "dump_snapshot"),
]
"""Where a public name could appear that makes a function of torch_compat unnecessary."""


@pytest.mark.parametrize(("place", "name"), PUBLIC_WHEN_PRESENT)
def test_public_replacement_is_missing(place: str, name: str) -> None:
    module, _, class_name = place.rpartition(".") if place.split(".")[-1][0].isupper() else (place, "", "")
    holder = importlib.import_module(module)
    assert not hasattr(getattr(holder, class_name) if class_name else holder, name), f"{place}.{name} exists: use it"


def test_public_norm_cannot_accumulate_in_another_dtype() -> None:
    assert "dtype" not in inspect.signature(torch.nn.utils.get_total_norm).parameters
    norms = torch_compat.foreach_norms([torch.ones(4), torch.zeros(3)], dtype=torch.float64)
    assert norms.dtype == torch.float64
    assert norms.tolist() == [2.0, 0.0]


def test_storage_of_meta_tensors_has_no_public_identity() -> None:
    x, y = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() == 0
    assert torch_compat.storage_id(x) == torch_compat.storage_id(x[1:]) != torch_compat.storage_id(y)


def test_argument_names_have_no_public_schema() -> None:
    operator = torch.ops.c10d.allreduce_.default
    assert not hasattr(operator, "schema")
    assert "async_op" in torch_compat.argument_names(operator)


def test_numbers_of_autograd_nodes_have_no_public_reader() -> None:
    seen: list[int | None] = []
    first = torch_compat.next_autograd_node()
    x = torch.ones(2, requires_grad=True) * 2
    x.register_hook(lambda _: seen.append(torch_compat.running_autograd_node()))
    y = x * 3
    after = torch_compat.next_autograd_node()
    assert torch_compat.running_autograd_node() is None
    y.sum().backward()
    assert len(seen) == 1
    assert seen[0] is not None
    assert first <= seen[0] < after


def test_groups_and_their_timeouts() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
    try:
        (group,) = torch_compat.process_groups()
        torch_compat.set_group_timeout(group, timedelta(seconds=7))
        assert torch_compat.group_timeout(group, device=torch.device("cpu")) == timedelta(seconds=7)
        assert torch_compat.process_group_of(group.group_name) is group
        assert torch_compat.default_store().num_keys() >= 0
    finally:
        dist.destroy_process_group()


def test_torchft_manager_has_no_public_quorum() -> None:
    torchft = pytest.importorskip("torchft")
    source = inspect.getsource(torchft.Manager)
    assert "self._quorum_id" in source
    assert "self._quorum_future" in source
    assert "self._client._quorum(" in source
    assert "if quorum_id != self._quorum_id:" in source  # otherwise number_quorums_uniquely is not needed
    assert not hasattr(torchft.Manager, "quorum_id")


def test_oldest_torch_has_no_public_timeout_setter() -> None:
    """ProcessGroup.set_timeout() is in 2.13: with that as the oldest version, set_group_timeout() can go."""
    dependencies = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch_version,) = (line for line in dependencies if line.startswith("torch>="))
    assert torch_version.startswith(("torch>=2.11", "torch>=2.12"))


def test_wrappers_still_put_their_names_into_parameters() -> None:
    module = torch.compile(torch_compat.checkpoint_wrapper(torch.nn.Linear(1, 1)))
    names = {component for name, _ in module.named_parameters() for component in name.split(".")}
    assert set(torch_compat.WRAPPER_NAMES) < names
