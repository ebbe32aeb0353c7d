"""Every private name of torch and torchft that the package uses, behind a public one.

Each says why it is needed and which public name would replace it. tests/test_torch_compat.py fails when a replacement
appears, or when the private name is gone. No other file uses a private name of torch or torchft.

Imports that cost start-up time are inside the functions that need them.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    import torchft
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti
    from torch.distributed.tensor import DTensor
else:
    PipelineStage = object

__all__ = ["TorchDispatchMode", "tree_leaves"]
# TorchDispatchMode: sees every operator that runs. Documented by PyTorch, but not importable from a public module.
# tree_leaves: the tensors in nested arguments. torch.utils has no public module for trees.

# Attention kernels that return the logarithm of the sum of exponentials, which merging blocks needs, and that are
# named in the selective checkpointing policy. scaled_dot_product_attention() returns the output only;
# torch.nn.attention would have to return both on CPU and for masks too.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

WRAPPER_NAMES = ("_checkpoint_wrapped_module", "_orig_mod")
"""Names that checkpoint_wrapper() and torch.compile put into the names of parameters."""


# --- Tensors ---------------------------------------------------------------------------------------------------------


def foreach_norms(tensors: list[Tensor], *, dtype: torch.dtype) -> Tensor:
    """Returns the 2-norm [len(tensors)] of each tensor, accumulated in `dtype`, in one kernel launch.

    torch.nn.utils.get_total_norm() is public and cannot accumulate in another dtype.
    """
    return torch.stack(torch._foreach_norm(tensors, 2, dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies all tensors by a number in place, in one kernel launch.

    torch.nn.utils.clip_grads_with_norm_() is public, but takes parameters and reads a norm of its own.
    """
    torch._foreach_mul_(tensors, factor)


def wait_tensor(x: Tensor) -> Tensor:
    """Returns the result of a functional collective once it has arrived.

    AsyncCollectiveTensor waits by itself when it is used; a compiled region does not see that. No public name yet.
    """
    return torch.ops._c10d_functional.wait_tensor(x)


def global_offset(tensor: "DTensor") -> tuple[int, ...]:
    """Returns the index in the global tensor at which this rank's shard starts.

    DTensor has no public method for it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def innermost_tensor(x: Tensor) -> Tensor:
    """Returns the plain tensor inside a DTensor or an AsyncCollectiveTensor, without waiting for it.

    DTensor.to_local() waits for the collective, and records a node for autograd.
    """
    while (inner := getattr(x, "_local_tensor", getattr(x, "elem", None))) is not None:
        x = inner
    return x


def storage_id(x: Tensor) -> int:
    """Returns a number that equals for tensors that share memory, also where tensors have no data.

    data_ptr() is public, and 0 for tensors on the meta device and fake tensors.
    """
    return innermost_tensor(x).untyped_storage()._cdata


def is_fake(x: Tensor) -> bool:
    """Whether the tensor has a shape and no data, as in a simulated run. torch.compiler has no such question."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def fake_tensors() -> AbstractContextManager[object]:
    """Returns a context in which tensors have shapes and no data; real ones may be mixed in.

    torch.device("meta") is public, but hides the device that a collective or a kernel would see.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# --- Operators -------------------------------------------------------------------------------------------------------


Operator = torch._ops.OpOverload
"""What a TorchDispatchMode sees; torch.ops has the values, and no public name for their type."""


def argument_names(func: Operator) -> list[str]:
    """Returns the names of an operator's arguments in their order. There is no public schema of an operator."""
    return [argument.name for argument in func._schema.arguments]


def look_inside(operation: torch.library.CustomOpDef, *, mode_class: type[TorchDispatchMode]) -> None:
    """Lets a dispatch mode see the operators that a custom op runs, and not only the op.

    CustomOpDef.register_torch_dispatch() is public; the function that the op was made of is not.
    """

    def run(mode: TorchDispatchMode, _func: object, _types: object, args: tuple = (), kwargs: dict | None = None):
        with mode:
            return operation._init_fn(*args, **(kwargs or {}))

    operation.register_torch_dispatch(mode_class, run)


# --- Modules ---------------------------------------------------------------------------------------------------------


def checkpoint_wrapper(module: nn.Module, **options: Any) -> nn.Module:
    """Returns the module with activation checkpointing around its forward.

    torch.utils.checkpoint.checkpoint() is public, but wraps calls and not modules.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module, **options)


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Has torch.compile split matrix products next to a collective over this mesh, so that both run at once.

    Source: PyTorch's async tensor parallelism. It has no public switch.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


# --- Process groups --------------------------------------------------------------------------------------------------


def all_to_all_with_gradient(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Sends slice r of dimension 0 to rank r, in equal slices; its backward is the reverse exchange.

    torch.distributed.nn.functional.all_to_all_single() is public, but torch.compile cannot trace it.
    """
    return all_to_all_single_autograd(x, None, None, group)


def process_group_of(group_name: str) -> dist.ProcessGroup:
    """Returns the process group that torch knows by this name; a custom op can take names, but no groups."""
    return dist.distributed_c10d._resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]


def default_store() -> dist.Store:
    """Returns the key-value store of the default process group. torch.distributed has no public getter."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[dist.ProcessGroup]:
    """Returns all process groups of this process, those of meshes too. torch.distributed has no public list."""
    return list(dist.distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta, *, device_type: str | None = None) -> None:
    """Sets how long later collectives of the group may take, on all of its devices or on one type of them.

    ProcessGroup.set_timeout() does this for all devices; to be used once 2.13 is the oldest torch that is supported.
    """
    devices = [torch.device(device_type)] if device_type else [torch.device(kind) for kind in group._device_types]
    for backend in {group._get_backend(device) for device in devices}:
        backend._set_default_timeout(timeout)


def group_timeout(group: dist.ProcessGroup, *, device: torch.device) -> timedelta:
    """Returns how long collectives of the group on this device may take. There is no public getter."""
    return group._get_backend(device).options._timeout


def dump_collectives() -> bytes:
    """Returns the last collectives of this process as JSON, by backend: "gloo", and "nccl" where torch has it.

    TORCH_NCCL_DUMP_ON_TIMEOUT is public; it exists for NCCL only and writes to a file.
    """
    from torch._C import _distributed_c10d

    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}  # the latter not in torch for CPUs
    dumps = {name: getattr(_distributed_c10d, dump, None) for name, dump in recorders.items()}
    return json.dumps({name: json.loads(dump()) for name, dump in dumps.items() if dump}).encode()


def init_fake_process_group(*, world_size: int) -> None:
    """Starts a default process group of which this process is rank 0 and the other ranks do not exist.

    Collectives return at once. The backend "fake" is public by name only; its store belongs to torch's tests.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


# --- Pipelines -------------------------------------------------------------------------------------------------------


class PipelineStageFixes(PipelineStage):
    """Stands before PipelineStage among the bases of a class; makes it work for frozen stages and simulated ranks.

    The first `frozen_stages` stages get no gradients. The methods that it overrides are named like public ones and are
    documented nowhere. It can go when torch.distributed.pipelining skips stages without gradients by itself.
    """

    def __init__(self, *args: Any, frozen_stages: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_frozen = self.stage_index < frozen_stages
        self._is_behind_frozen = 0 < self.stage_index <= frozen_stages

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs both halves of backward at once where the input needs no gradient: torch loses those of the weights."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self._is_behind_frozen, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Does nothing where both halves of backward have run."""
        if not self._is_behind_frozen:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Returns None where there are no gradients for the previous stage on the same rank; torch asserts some."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Does nothing where there is no backward."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        # A simulated rank has no neighbours whose vote it could read; all shapes are given, which is what is voted on.
        return torch.tensor(1) if dist.get_backend() == "fake" else super()._warmup_backward_result(*args, **kwargs)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives nothing on a frozen stage; before 2.13 torch sends gradients to it."""
        return [] if self._is_frozen else super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends nothing to a frozen stage."""
        if not self._is_behind_frozen:
            return super().get_bwd_send_ops(bwd_chunk_id)
        self.bwd_cache.pop(bwd_chunk_id, None)
        return []


def schedule_from_file(path: str, *, stages: Sequence[Any], **options: Any) -> "PipelineScheduleMulti":
    """Returns a pipeline schedule with the actions of a CSV file. torch has no public class that loads one."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(list(stages), **options)
    schedule._load_csv(path)
    return schedule


# --- Memory ----------------------------------------------------------------------------------------------------------


def record_memory_history(*, max_entries: int) -> None:
    """Starts to record the allocations of CUDA memory. PyTorch documents the private name and has no other."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def stop_memory_history() -> None:
    """Stops to record the allocations of CUDA memory."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: str) -> None:
    """Writes the recorded allocations to a file. torch.cuda.memory_snapshot() is public and leaves the history out."""
    torch.cuda.memory._dump_snapshot(path)


# --- torchft ---------------------------------------------------------------------------------------------------------


def quorum_id(manager: "torchft.Manager") -> int:
    """Returns the number of the quorum that the manager is in, -1 before the first. It has no public property."""
    return manager._quorum_id


def forget_failed_quorum(manager: "torchft.Manager") -> None:
    """Lets a manager start another quorum after one that failed, whose error it would raise again."""
    manager._quorum_future = None
