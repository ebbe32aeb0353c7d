"""Simulates a run of any size in one CPU process: for --dry-run and comm.mode = "fake_backend".

Rank 0's model parts are built on the meta device and parallelized as in training, over fake process groups whose
collectives return at once. One forward and backward then runs on fake tensors, which have shapes and no data.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_clone.config import Config
from torchtitan_clone.data import Batch
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.parallel.apply import named_parameters
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.planner.collective_trace import CollectiveTrace
from torchtitan_clone.planner.torch_compat import name_fsdp_modules
from torchtitan_clone.run.engine import build_plan_mesh
from torchtitan_clone.run.forward_backward import build_plan_forward_backward
from torchtitan_clone.run.model_parts import parallelize_model_parts
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.torch_compat import fake_tensors, init_fake_process_group

CPU = torch.device("cpu")


def simulate(plan: RunPlan) -> str:
    """Returns a table of the collectives of rank 0 in one step."""
    plan = simulated(plan)
    batch_size = plan.config.training.local_batch_size
    with fake_ranks(plan) as mesh:
        trace = _trace(plan, mesh)
    return f"collectives of rank 0 in one forward and backward of {batch_size} sequences\n{trace.table()}\n"


def simulated(plan: RunPlan, *, all_rows: bool = False) -> RunPlan:
    """Returns the plan as it is simulated: eager, of a pipeline as few micro-batches as show what it does."""
    # Compiled or not, a step communicates the same; tracing needs the operators one by one.
    eager = replace(plan.config, compile=replace(plan.config.compile, enable=False))
    training = eager.training
    batch_size = training.local_batch_size if all_rows else _simulated_batch_size(eager, stages=len(plan.stages.ranks))
    rows = plan.global_batch_size // training.local_batch_size * batch_size
    config = replace(eager, training=replace(training, local_batch_size=batch_size))
    return replace(plan, config=config, global_batch_size=rows)


def _simulated_batch_size(config: Config, *, stages: int) -> int:
    """Returns local_batch_size, or in a pipeline one micro-batch per stage: the others only repeat these."""
    batch_size, parallelism = config.training.local_batch_size, config.parallelism
    if parallelism.pipeline_parallel_degree == 1 or parallelism.pipeline_parallel_schedule_csv:
        return batch_size
    return min(batch_size, stages * parallelism.pipeline_parallel_microbatch_size)


def describe_layouts(plan: RunPlan) -> str:
    """Returns the sharding of rank 0's weights: one line for each layout, with a weight as an example."""
    # Which needs a package that this machine may lack, and leaves weights as they are.
    plan = replace(plan, config=replace(plan.config, model=replace(plan.config.model, converters=[])))
    layouts: dict[str, dict[str, str]] = {}
    with fake_ranks(plan) as mesh:
        for name, weight in named_parameters(parallelize_model_parts(plan, mesh=mesh)).items():
            example = f"{[*weight.shape]} -> {[*local_shard(weight).shape]}"
            layouts.setdefault(_describe_layout(weight), {}).setdefault(re.sub(r"\.\d+\.", ".*.", name), example)
    lines = []
    for layout, names in layouts.items():
        name, example = next(iter(names.items()))
        others = f", and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  {layout:38} {name} {example}{others}\n")
    return f"weights of rank 0\n{''.join(lines)}"


def _describe_layout(weight: Tensor) -> str:
    """Returns which dims of a weight are sharded over which mesh axes."""
    if not isinstance(weight, DTensor):
        return "replicated"
    mesh = weight.device_mesh
    splits = [
        # torch's placement of a dim that two axes shard is no Shard, but it has a dim too.
        f"dim {dim} over {axis.partition('.')[0]} {size}"
        for axis, placement, size in zip(mesh.mesh_dim_names or (), weight.placements, mesh.shape, strict=True)
        if size > 1 and (dim := getattr(placement, "dim", None)) is not None
    ]
    return ", ".join(reversed(splits)) or "replicated"


@contextmanager
def fake_ranks(plan: RunPlan, *, rank: int = 0) -> Iterator[Mesh]:
    """Yields the mesh as one rank sees it, without any peer."""
    # torch would warn that one rank uses only part of its communicators.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    init_fake_process_group(rank=rank, world_size=plan.world_size)
    try:
        yield build_plan_mesh(plan, device_type="cpu")
    finally:
        dist.destroy_process_group()


def _trace(plan: RunPlan, mesh: Mesh) -> CollectiveTrace:
    training = plan.config.training
    parts = parallelize_model_parts(plan, mesh=mesh)
    with fake_tensors(of_gpu=plan.device_type == "cuda"), CollectiveTrace(mesh.group_axes()) as trace:
        for part in parts:
            part.to_empty(device=CPU)
            part.init_buffers(CPU)
            name_fsdp_modules(part)
        step = build_plan_forward_backward(parts, plan=plan, mesh=mesh, device=CPU)
        step([fake_batch(plan)], num_targets=training.local_batch_size * training.seq_len)
    return trace


def fake_batch(plan: RunPlan) -> Batch:
    """Returns a batch of the shapes of a rank's: zeros, in one document a row."""
    training = plan.config.training
    documents_BT = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int32)
    tokens_BT = torch.zeros(training.local_batch_size, training.seq_len // plan.degrees.cp, dtype=torch.int64)
    depth = plan.model_args.mtp_depth
    return Batch(
        tokens_BT=tokens_BT,
        targets_BT=tokens_BT,
        positions_BT=tokens_BT,
        documents_BT=documents_BT if training.document_masking else None,
        num_targets=tokens_BT.numel(),
        mtp_targets_BKT=torch.stack([tokens_BT] * depth, dim=1) if depth else None,
        is_context_BKT=_all_context(plan) if plan.model_args.num_experts else None,
        groups_BT=tokens_BT if plan.mixture else None,
    )


def _all_context(plan: RunPlan) -> Tensor:
    training, degrees = plan.config.training, plan.degrees
    tokens = training.seq_len // degrees.cp // degrees.tp
    return torch.ones(training.local_batch_size, 1 + plan.model_args.mtp_depth, tokens, dtype=torch.bool)
