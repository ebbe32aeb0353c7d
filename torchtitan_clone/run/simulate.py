"""A run of any size on one CPU process, without its memory and without its peers: for --dry-run and the fake backend.

Rank 0's part of the model is built on the meta device and parallelized as in training, over process groups that
answer at once with nothing; one forward and backward then runs on tensors that have shapes and no data.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_clone.config import Config
from torchtitan_clone.ops.cross_entropy import build_loss
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.parallel.apply import named_parameters
from torchtitan_clone.parallel.mesh import Mesh, build_mesh
from torchtitan_clone.parallel.trace import CollectiveTrace
from torchtitan_clone.run.preflight import RunPlan
from torchtitan_clone.torch_compat import fake_tensors, init_fake_process_group
from torchtitan_clone.trainer import build_step, parallelized_part

CPU = torch.device("cpu")


def simulate(plan: RunPlan) -> str:
    """Memory of every pipeline rank and the collectives of rank 0 in one step, as text."""
    # Compiled or not, a step communicates the same; tracing needs the operators one by one.
    eager = replace(plan.config, compile=replace(plan.config.compile, enable=False))
    rows = _rows_of_a_pass(eager, stages=len(plan.stages.ranks))
    plan = replace(plan, config=replace(eager, training=replace(eager.training, local_batch_size=rows)))
    with _pretended_ranks(plan) as mesh:
        trace = _trace(plan, mesh)
    return (
        f"{_memory_table(plan)}\n\ncollectives of rank 0 in one forward and backward of {rows} rows\n{trace.table()}\n"
    )


def _rows_of_a_pass(config: Config, *, stages: int) -> int:
    """As the run has them; of a long pipeline's pass one micro-batch a stage, as the rest repeats these."""
    rows, parallelism = config.training.local_batch_size, config.parallelism
    if parallelism.pipeline_parallel_degree == 1 or parallelism.pipeline_parallel_schedule_csv:
        return rows
    return min(rows, stages * parallelism.pipeline_parallel_microbatch_size)


def describe_layouts(plan: RunPlan) -> str:
    """What rank 0 holds of its weights: a line for each way in which they are split, with a weight as an example."""
    alike: dict[str, dict[str, str]] = {}
    with _pretended_ranks(plan) as mesh:
        for name, weight in named_parameters(_parts(plan, mesh)).items():
            example = f"{[*weight.shape]} -> {[*local_shard(weight).shape]}"
            alike.setdefault(_split(weight), {}).setdefault(re.sub(r"\.\d+\.", ".*.", name), example)
    lines = []
    for split, names in alike.items():
        name, example = next(iter(names.items()))
        others = f", and {len(names) - 1} like it" if len(names) > 1 else ""
        lines.append(f"  {split:38} {name} {example}{others}\n")
    return f"weights of rank 0\n{''.join(lines)}"


def _split(weight: Any) -> str:
    """Over which axes a weight is split, and what of it."""
    axes = zip(weight.device_mesh.mesh_dim_names, weight.placements, weight.device_mesh.shape, strict=True)
    dims = ("rows", "columns")
    splits = [
        f"{dims[placement.dim]} over {axis.partition('.')[0]} {size}"
        for axis, placement, size in axes
        if size > 1 and not placement.is_replicate()
    ]
    return ", ".join(reversed(splits)) or "whole"


@contextmanager
def _pretended_ranks(plan: RunPlan) -> Iterator[Mesh]:
    """The mesh as rank 0 sees it, with peers that are not there."""
    # Of a rank without peers torch would say that it uses only part of its communicators.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    init_fake_process_group(world_size=plan.world_size)
    try:
        yield build_mesh(plan.degrees, loss_rank=plan.stages.ranks[-1], device_type="cpu")
    finally:
        dist.destroy_process_group()


def _parts(plan: RunPlan, mesh: Mesh) -> list[Any]:
    return [parallelized_part(plan, stage=stage, mesh=mesh) for stage in plan.stages.of_rank(0)]


def _trace(plan: RunPlan, mesh: Mesh) -> CollectiveTrace:
    training = plan.config.training
    parts = _parts(plan, mesh)
    loss_fn = build_loss(chunk_tokens=training.loss_chunk_tokens, compile_backend=None)
    with fake_tensors(), CollectiveTrace(mesh.group_names()) as trace:
        for part in parts:
            part.to_empty(device=CPU)
            part.init_buffers(CPU)
        step = build_step(parts, plan=plan, mesh=mesh, loss_fn=loss_fn, device=CPU)
        step([_rows(plan)], num_targets=training.local_batch_size * training.seq_len)
    return trace


def _rows(plan: RunPlan) -> Any:
    training = plan.config.training
    documents_BT = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int32)
    tokens_BT = torch.zeros(training.local_batch_size, training.seq_len // plan.degrees.cp, dtype=torch.int64)
    return SimpleNamespace(
        tokens_BT=tokens_BT,
        targets_BT=tokens_BT,
        positions_BT=tokens_BT,
        documents_BT=documents_BT if training.document_masking else None,
    )


def _memory_table(plan: RunPlan) -> str:
    """What each rank keeps all the time. Activations and gathered weights come on top."""
    training = plan.config.training
    ranks = plan.degrees.dp_shard * plan.degrees.cp * plan.degrees.tp
    bytes_each = getattr(torch, training.dtype).itemsize
    lines = [f"{'pipeline rank':>14}{'parameters':>18}{'weights GiB':>13}{'gradients':>11}{'Adam state':>12}{'sum':>8}"]
    for rank in range(plan.degrees.pp):
        modules = tuple(f"{name}." for stage in plan.stages.of_rank(rank) for name in plan.stages.modules[stage])
        parameters = sum(p.numel() for name, p in plan.parameters.items() if name.startswith(modules))
        weights = parameters / ranks * bytes_each / 2**30
        numbers = f"{weights:13.2f}{weights:11.2f}{2 * weights:12.2f}{4 * weights:8.2f}"
        lines.append(f"{rank:14}{parameters:18,}{numbers}")
    return "\n".join(lines)
