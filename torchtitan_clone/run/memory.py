"""Finds before a start whether weights, optimizer state and batches cannot fit into the memory that is here."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.started import as_started
from torchtitan_clone.run.disk import checkpoint_bytes
from torchtitan_clone.run.plan import RunPlan, first_step_of

TOKEN_BYTES = 24
"""Token, target and position, each of 8 bytes."""


def find_memory_errors(plan: RunPlan, *, device: torch.device) -> Iterator[str]:
    """Yields one message if weights, optimizer state or a batch cannot fit; a run needs more than what is counted."""
    training, validation = plan.config.training, plan.config.validation
    start = "" if (step := first_step_of(plan)) == 1 else f"from step {step}, "
    processes = environment_integer("LOCAL_WORLD_SIZE", default=1, low=1)
    host = host_memory() // processes
    rows = plan.microbatches * training.local_batch_size
    state, weights_of_teacher, hidden_of_teacher = state_bytes(plan), *teacher_bytes(plan)
    on_device = host if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]
    needs = {
        "model.args: weights, gradients and optimizer state": (
            state, (of_weights := host if training.enable_cpu_offload else on_device),
            "set model.args to a smaller model, or train on more ranks",
        ),
        "distillation.teacher_path: the weights of the teacher, beside what the model has of these,": (
            # It is on the ranks with the last pipeline stage, which may have less state than others.
            weights_of_teacher and max(weights_of_teacher, state + weights_of_teacher // plan.degrees.pp), of_weights,
            as_started("set a smaller one, train on more ranks, or run scripts/store_predictions.py before"),
        ),
        f"training.local_batch_size = {training.local_batch_size}: the inputs of the layers": (
            activation_bytes(plan, rows=training.local_batch_size) + hidden_of_teacher, on_device,
            "decrease it or training.seq_len",
        ),
        f"training.global_batch_size = {plan.global_batch_size}: the tokens of one step": (
            rows * training.seq_len * TOKEN_BYTES // plan.degrees.cp, host,
            "decrease it or training.seq_len",
        ),
        f"validation.local_batch_size = {validation.local_batch_size}: the input of one layer": (
            hidden_bytes(plan, rows=validation.local_batch_size if validation.enable else 0), on_device,
            "decrease it or training.seq_len",
        ),
    }  # fmt: skip
    for name, (needed, present, remedy) in needs.items():
        if needed > present:
            sizes = f"{needed / 2**30:,.1f} GiB, more than the {present / 2**30:,.1f} GiB"
            yield f"{start}{name} need at least {sizes} of memory that a process has here; {remedy}."


def host_memory() -> int:
    """Returns the bytes of memory and swap of this machine."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return sizes["MemTotal"] + sizes["SwapTotal"]
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def state_bytes(plan: RunPlan) -> int:
    """Returns the bytes of weights, gradients, optimizer state and averages that a rank holds on average."""
    degrees = plan.degrees
    ranks = degrees.pp * degrees.dp_shard * degrees.cp * degrees.tp
    trained = sum(weight.numel() for weight in plan.trained_parameters.values())
    return (checkpoint_bytes(plan) + trained * getattr(torch, plan.config.training.dtype).itemsize) // ranks


def teacher_bytes(plan: RunPlan) -> tuple[int, int]:
    """Returns the bytes of the weights of a teacher on a rank that has some, and of its hidden states; 0 without."""
    if plan.config.distillation.teacher_path is None:
        return 0, 0
    from torchtitan_clone.run.teacher import find_teacher_plan

    teacher = find_teacher_plan(plan)
    assert teacher is not None, "it has a path"
    return state_bytes(teacher), hidden_bytes(teacher, rows=teacher.config.training.local_batch_size)


def activation_bytes(plan: RunPlan, *, rows: int) -> int:
    """Returns the bytes of the trained layers' inputs, which backward needs even if it recomputes all else."""
    if plan.degrees.pp > 1:  # of one micro-batch and layer: what runs at once depends on the schedule
        return hidden_bytes(plan, rows=min(rows, plan.config.parallelism.pipeline_parallel_microbatch_size))
    return (plan.model_args.n_layers - plan.frozen_layers) * hidden_bytes(plan, rows=rows)


def hidden_bytes(plan: RunPlan, *, rows: int) -> int:
    """Returns the bytes of one hidden state [rows, seq_len, dim] of this rank."""
    training, degrees = plan.config.training, plan.degrees
    tokens = rows * training.seq_len // (degrees.cp * degrees.tp)
    return tokens * plan.model_args.dim * getattr(torch, training.mixed_precision_param).itemsize
