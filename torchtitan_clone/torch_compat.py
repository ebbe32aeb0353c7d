"""Every private name of torch that the core uses, behind a public one that says why it is needed.

Packages behind doors have a file of this name for those that only they use.

tests/test_torch_compat.py fails when a public name replaces one. Slow imports are inside the functions that need them.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti
    from torch.distributed.tensor import DTensor
else:
    PipelineStage = object

TORCH = Path(torch.__file__).parent

__all__ = ["TorchDispatchMode", "tree_leaves"]  # neither is importable from a public module

# Attention kernels that also return the logarithm of the sum of exponentials, which merging blocks needs:
# torch.nn.attention would have to return both on CPU and for masks too. The backward of its varlen_attn() does not take
# results that were merged.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
varlen_attention = torch.ops.aten._flash_attention_forward
varlen_attention_backward = torch.ops.aten._flash_attention_backward
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Tags of an operator's overload that writes into a given result; inductor uses it from torch 2.13 on.
OUT_TAGS = (torch.Tag.out,) if hasattr(torch.Tag, "out") else ()


# Names that checkpoint_wrapper() and torch.compile put into the names of parameters.
WRAPPER_NAMES = ("_checkpoint_wrapped_module", "_orig_mod")


def foreach_norms(tensors: list[Tensor], *, dtype: torch.dtype) -> Tensor:
    """Returns the 2-norm [len(tensors)] of each tensor, accumulated in `dtype`, which get_total_norm() cannot."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype))


# Multiplies all tensors by a number in place; clip_grads_with_norm_() has parameters and a norm of its own.
foreach_mul_ = torch._foreach_mul_
# Adds a number to all tensors in place; there is no public function.
foreach_add_ = torch._foreach_add_
# Moves all tensors towards others by a share; there is no public function.
foreach_lerp_ = torch._foreach_lerp_


def converted(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the tensors in a data type: themselves, or copies."""
    # By the kernel of a GPU for many tensors, which is twice as fast as to(), also for one, and not a public function.
    if all(x.dtype == dtype for x in tensors):
        return tensors
    copies = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


# Waits for the result of a functional collective and returns it; a compiled region does not do so by itself.
wait_tensor = torch.ops._c10d_functional.wait_tensor
# Functional collectives, which a compiled region can contain, without the tensor class that postpones the wait.
all_gather = torch.ops._c10d_functional.all_gather_into_tensor
all_to_all = torch.ops._c10d_functional.all_to_all_single
reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor
# Their names since torch 2.13, where the older ones, which torch 2.11 has, warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def with_shard(tensor: "DTensor", local: Tensor) -> "DTensor":
    """Returns a DTensor that differs in this rank's shard, whose data type its specification does not name.

    DTensor.from_local() takes 10 times as long.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=False)


def global_offset(tensor: "DTensor") -> tuple[int, ...]:
    """Returns the index in the global tensor at which this rank's shard starts. DTensor has no public method for it."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # a rank that the mesh does not have
        return (0,) * tensor.ndim
    offset, size = shard_bounds(tensor, coordinate)
    assert size == tensor._local_tensor.shape, (size, tensor._local_tensor.shape)
    return offset


def shard_bounds(tensor: "DTensor", coordinate: "Sequence[int]") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns offset and size in the global tensor of the shard that the rank at this coordinate of the mesh holds.

    FSDP shards what the axes after it have sharded. torch's compute_local_shape_and_global_offset() is wrong there for
    sizes that the number of ranks does not divide.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    offset, size = [0] * tensor.ndim, list(tensor.shape)
    axes = zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True)
    for placement, ranks, rank in sorted(axes, key=lambda axis: isinstance(axis[0], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            dim = placement.dim
            largest = -(-size[dim] // ranks)
            start = min(size[dim], rank * largest)
            offset[dim] += start
            size[dim] = min(largest, size[dim] - start)
    return tuple(offset), tuple(size)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the persistent buffers by name; state_dict() has them too, and runs the hooks of FSDP and of wrappers."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


@cache
def identify_processor() -> str:
    """Returns a hash of the instructions of this processor, and of what torch may use of them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = sorted({line for line in lines if line.startswith(("model", "flags", "Features"))})
    return hashlib.blake2b(repr((torch.backends.cpu.get_cpu_capability(), found)).encode(), digest_size=8).hexdigest()


def compiler_command() -> str:
    """Returns the command of the compiler of C++ that torch.compile calls on a CPU."""
    return os.environ.get("CXX") or "g++"


def local_storage(x: Tensor) -> torch.UntypedStorage:
    """Returns a tensor's memory on this rank."""
    # Into a DTensor or AsyncCollectiveTensor, without waiting for it as to_local() does.
    while (inner := getattr(x, "_local_tensor", getattr(x, "elem", None))) is not None:
        x = inner
    return x.untyped_storage()


def storage_id(x: Tensor) -> int:
    """Returns the identity of a tensor's memory. data_ptr() is 0 for fake tensors and those on the meta device."""
    return local_storage(x)._cdata


def is_fake(x: Tensor) -> bool:
    """Whether the tensor has a shape and no data, as in a simulated run. There is no public predicate."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def simulates_gpu(x: Tensor) -> bool:
    """Whether the tensor stands for one of a GPU, see fake_tensors()."""
    return _fakes_are_of_gpu and not torch.compiler.is_compiling() and is_fake(getattr(x, "_local_tensor", x))


_fakes_are_of_gpu = False


@contextmanager
def fake_tensors(*, of_gpu: bool = False) -> Iterator[None]:
    """Lets new tensors have no data inside; torch.device("meta") would hide their device type.

    With `of_gpu` those of a CPU stand for those of a GPU: torch for CPUs has no autograd for fake tensors of CUDA.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    global _fakes_are_of_gpu
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fakes_are_of_gpu = of_gpu
        try:
            yield
        finally:
            _fakes_are_of_gpu = False


Operator = torch._ops.OpOverload  # what a TorchDispatchMode sees; torch.ops has the values only


def argument_names(func: Operator) -> list[str]:
    """Returns the names of an operator's arguments in their order. There is no public schema of an operator."""
    return [argument.name for argument in func._schema.arguments]


def next_autograd_node() -> int:
    """Returns the number that the next autograd node of this thread gets. Numbers of nodes are not public."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def running_autograd_node() -> int | None:
    """Returns the number of the autograd node that runs; None outside of backward. There is no public way to ask."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def runs_backward() -> bool:
    """Whether autograd runs a backward on this thread, functions of after_backward() included; nothing public tells."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """Whether the backward that runs leaves tensors saved for another one; there is no public way to ask."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def after_backward(callback: Callable[[], None]) -> None:
    """Calls a function when the backward that runs ends; public hooks belong to one tensor, module or node."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def look_inside(operation: torch.library.CustomOpDef, *, mode_class: type[TorchDispatchMode]) -> None:
    """Lets a dispatch mode see the operators inside a custom op, whose own function has no public name."""

    def run(mode: TorchDispatchMode, _func: object, _types: object, args: tuple = (), kwargs: dict | None = None):
        with mode:
            return operation._init_fn(*args, **(kwargs or {}))

    operation.register_torch_dispatch(mode_class, run)


def checkpoint_wrapper(module: nn.Module, **options: Any) -> nn.Module:
    """Returns the module with its forward checkpointed. torch.utils.checkpoint has only a function that wraps calls."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module, **options)


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Makes torch.compile overlap matrix products with collectives over this mesh. There is no public switch."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def round_as_eager() -> None:
    """Makes torch.compile round intermediate results as eager execution does, until pytorch/pytorch#150859 is fixed.

    Without it, recomputed activations differ from those of forward, and float8 with a scale per row gives NaN.
    """
    from torch._inductor import config

    config.emulate_precision_casts = True


def recompute_inputs_of_products() -> None:
    """Makes torch.compile compute again in backward what products read there, if elementwise operations suffice.

    By default it keeps these inputs: of a block the results of norms and gates, a fourth of its activations.
    """
    from torch._functorch import config

    config.ban_recompute_materialized_backward = False


def set_up_inductor(*, precompiled_headers: Path, compiler: str) -> None:
    """Makes torch.compile call this compiler of C++, and precompile its header into this folder.

    Its own is in the folder of temporary files, wherever its cache is; other users know its name and can make it first.
    """
    from torch._inductor import codecache, config

    config.cpp.cxx = (None, compiler)
    codecache._HEADER_DIR = str(precompiled_headers)
    codecache._HEADER_LOCK_DIR = str(precompiled_headers / "locks")


def has_triton() -> bool:
    """Whether Triton is installed and supports this machine's GPU. There is no public function."""
    from torch.utils._triton import has_triton

    return has_triton()


def log_compilation() -> None:
    """Lets torch.compile log graph breaks and recompilations with their reasons, as $TORCH_LOGS does at the start."""
    torch._logging.set_logs(graph_breaks=True, recompiles=True)


def sum_over_group(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over the ranks, without a gradient. dist.all_reduce changes its argument, also where compiled."""
    return wait_tensor(all_reduce(x, "sum", group))


def process_group_of(group_name: str) -> dist.ProcessGroup:
    """Returns the process group that torch knows by this name; a custom op can take names, but no groups."""
    return dist.distributed_c10d._resolve_process_group(group_name)  # pyright: ignore[reportArgumentType]


# Returns the key-value store of the default process group. torch.distributed has no public getter.
default_store = dist.distributed_c10d._get_default_store


def process_groups() -> list[dist.ProcessGroup]:
    """Returns all process groups of this process, those of meshes too. torch.distributed has no public list."""
    return list(dist.distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta, *, device_type: str | None = None) -> None:
    """Sets the timeout of later collectives on all or one of the group's device types; set_timeout() is new in 2.13."""
    devices = [torch.device(device_type)] if device_type else [torch.device(kind) for kind in group._device_types]
    for backend in {group._get_backend(device) for device in devices}:
        backend._set_default_timeout(timeout)


def group_timeout(group: dist.ProcessGroup, *, device: torch.device) -> timedelta:
    """Returns how long collectives of the group on this device may take. There is no public getter."""
    return group._get_backend(device).options._timeout


def dump_collectives() -> bytes:
    """Returns this process's last collectives as JSON by backend; TORCH_NCCL_DUMP_ON_TIMEOUT is for NCCL only."""
    from torch._C import _distributed_c10d

    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}  # the latter not in torch for CPUs
    dumps = {name: getattr(_distributed_c10d, dump, None) for name, dump in recorders.items()}
    return json.dumps({name: json.loads(dump()) for name, dump in dumps.items() if dump}).encode()


def init_fake_process_group(*, rank: int, world_size: int) -> None:
    """Creates a default process group with simulated ranks other than this; its store belongs to torch's tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


class PipelineStageFixes(PipelineStage):
    """Mixin before PipelineStage that supports stages without gradients (the first `frozen_stages`) and fake ranks."""

    def __init__(self, *args: Any, frozen_stages: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_frozen = self.stage_index < frozen_stages
        self._is_behind_frozen = 0 < self.stage_index <= frozen_stages

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        # Both halves at once where the input needs no gradient: torch would lose the gradients of the weights.
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self._is_behind_frozen, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self._is_behind_frozen:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # torch asserts that there are gradients for the previous stage on the same rank.
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        # 2.13 only, whose stages vote one after another; 2.15 sums votes. A simulated rank has no neighbours whose vote
        # it could read. All shapes are given, which is what is voted on.
        return torch.tensor(1) if dist.get_backend() == "fake" else super()._warmup_backward_result(*args, **kwargs)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        # Before 2.13 torch sends gradients to frozen stages.
        return [] if self._is_frozen else super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
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


# PyTorch documents these private names and has no others; memory_snapshot() is public and leaves the history out.
record_memory_history = torch.cuda.memory._record_memory_history
stop_memory_history = partial(record_memory_history, enabled=None)
dump_memory_snapshot = torch.cuda.memory._dump_snapshot


class ModuleStyle(ABC):
    """First base of a tensor-parallel style, before ParallelStyle, which has no public method to override."""

    @abstractmethod
    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shards the module in place and returns it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)
