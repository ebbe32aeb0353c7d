"""The files of torchtitan v0.2.2 can be dry-run on a machine without GPUs, or one refusal names all that they lack.

Of torchtitan_clone/config/torchtitan_compat.py. The table holds names and values of these files; COMMON is in all.
"""

from typing import Any

import pytest

from torchtitan_clone.config import ConfigError, read_config
from torchtitan_clone.config.overlay import toml_like
from torchtitan_clone.run import preflight
from torchtitan_clone.run.dry_run import simulated_device_type, summary

COMMON = {
    "job.print_config": False,
    "profiling.save_traces_folder": "profile_trace",
    "profiling.profile_freq": 100,
    "metrics.log_freq": 10,
    "optimizer.name": "AdamW",
    "optimizer.eps": 1e-8,
    "training.max_norm": 1.0,
    "training.dataset": "c4",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.pipeline_parallel_expert_parallel_overlap": True,
    "parallelism.context_parallel_load_balancer": "headtail",
    "checkpoint.enable": False,
    "checkpoint.last_save_model_only": True,
    "checkpoint.async_mode": "disabled",
    "compile.components": ["model", "loss"],
    "quantize.linear.float8.enable_fsdp_float8_all_gather": False,
    "quantize.linear.float8.filter_fqns": ["output"],
    "validation.dataset": "c4_validation",
    "validation.steps": 1200,
}
DEGREE = "parallelism.tensor_parallel_degree"
FILES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama3_8b": (
        8,
        {"model.flavor": "8B", "optimizer.lr": 3e-4, "training.seq_len": 8192, "training.local_batch_size": 1,
         "training.steps": 1000, "activation_checkpoint.selective_ac_option": "op"},
    ),
    "llama3_70b": (
        64,
        {"model.flavor": "70B", "optimizer.lr": 1.5e-4, "training.seq_len": 8192, DEGREE: 8,
         "activation_checkpoint.mode": "full"},
    ),
    "llama3_405b": (
        512,
        {"model.flavor": "405B", "lr_scheduler.warmup_steps": 600, "lr_scheduler.total_steps": 3000, DEGREE: 8,
         "training.seq_len": 8192, "training.local_batch_size": 2, "compile.enable": True,
         "parallelism.enable_async_tensor_parallel": True, "activation_checkpoint.mode": "full",
         "profiling.enable_memory_snapshot": True},
    ),
    "llama3_ft": (
        8,
        {"model.flavor": "debugmodel", "job.custom_config_module": "torchtitan.components.ft.config",
         "lr_scheduler.warmup_steps": 2, "lr_scheduler.decay_ratio": 0.8, "training.steps": 10,
         "comm.train_timeout_seconds": 15, "fault_tolerance.enable": True, "fault_tolerance.group_size": 2,
         "fault_tolerance.sync_steps": 10, "fault_tolerance.num_fragments": 2, "fault_tolerance.process_group": "nccl",
         "fault_tolerance.semi_sync_method": "diloco"},
    ),
    "qwen3_0.6b": (
        8,
        {"model.name": "qwen3", "model.flavor": "0.6B", "training.seq_len": 4096, "lr_scheduler.warmup_steps": 2,
         "training.steps": 10, "checkpoint.export_dtype": "float16"},
    ),
    "qwen3_32b": (
        64,
        {"model.name": "qwen3", "model.flavor": "32B", "training.seq_len": 4096, "lr_scheduler.warmup_steps": 600,
         "training.local_batch_size": 2, "activation_checkpoint.mode": "full"},
    ),
}  # fmt: skip


def dry_run(keys: dict[str, Any], *, world_size: int) -> str:
    """Returns what a dry run of these keys prints on a machine without GPUs, but for the layout of the weights."""
    loaded = read_config([f"--{key}={toml_like(value)}" for key, value in keys.items()])
    plan = preflight.resolve(
        loaded.config,
        world_size=world_size,
        device_type=simulated_device_type(loaded.config, present="cpu"),
        problems=[*loaded.problems, *preflight.find_source_errors(loaded.config.training)],
    )
    return summary(plan)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_dry_run_unchanged(name: str) -> None:
    world_size, own = FILES[name]
    text = dry_run(COMMON | own, world_size=world_size)
    assert f"flavor = {toml_like(own['model.flavor'])}" in text
    assert "mesh              " in text


def test_one_refusal_names_all_that_a_file_lacks() -> None:
    keys = COMMON | {
        "model.name": "flux",
        "model.converters": ["float8"],
        "model.hf_assets_path": "./assets/hf/Llama-4",
        "training.dataset": "c5",
        DEGREE: 3,
        "optimizer.nesterov": True,
        "lr_scheduler.decay_type": "step",
    }
    with pytest.raises(ConfigError) as caught:
        dry_run(keys, world_size=8)
    found = sorted(message.removeprefix("command line: ").split(":")[0] for message in caught.value.messages)
    assert found == [
        'lr_scheduler.decay_type = "step"',
        'model.converters = ["float8"]',
        'model.hf_assets_path = "assets/hf/Llama-4"',
        'model.name = "flux"',
        "optimizer.nesterov",
        "parallelism",
        'training.dataset = "c5"',
    ]


def test_the_device_of_a_dry_run_is_an_option() -> None:
    keys = COMMON | FILES["llama3_405b"][1]
    with pytest.raises(ConfigError, match="requires CUDA, and this run is on cpu"):
        dry_run(keys | {"job.dry_run_device": "cpu"}, world_size=512)
    config = read_config(["--job.dry_run_device=cuda"]).config
    assert simulated_device_type(config, present="cpu") == "cuda"
    assert simulated_device_type(read_config([]).config, present="cpu") == "cpu"
