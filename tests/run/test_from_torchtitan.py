"""The files of torchtitan v0.2.2 can be dry-run on a machine without GPUs, or one refusal names all that they lack.

Of torchtitan_clone/config/compat.py. The table holds names and values of these files; COMMON is in all.
With TORCHTITAN_CHECKOUT set to a checkout of that version, the files themselves are read.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.marks import needs_door
from torchtitan_clone.config import ConfigError, read_config
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER
from torchtitan_clone.run import preflight
from torchtitan_clone.run.describe import simulated_device_type, summary

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
         "profiling.enable_memory_snapshot": True, "model.converters": ["float8"],
         "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
         "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True},
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
    "llama4_17bx16e": (
        64,
        {"model.name": "llama4", "model.flavor": "17bx16e", "training.seq_len": 8192, "optimizer.eps": 1e-15, DEGREE: 8,
         "parallelism.expert_tensor_parallel_degree": 8, "activation_checkpoint.mode": "full",
         "quantize.linear.float8.filter_fqns": ["output", "router.gate"],
         "quantize.linear.mx.filter_fqns": ["output", "router.gate"]},
    ),
    "gpt_oss": (
        8,
        {"model.name": "gpt_oss", "model.flavor": "debugmodel", "activation_checkpoint.mode": "none",
         "quantize.grouped_mm.float8.fqns": ["experts"]},
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    # Both fail in torchtitan too: with no sequences in a batch, and in torch's schedule.
    "llama3_ft without its command line": (
        8,
        {"fault_tolerance.enable": True, "fault_tolerance.process_group": "nccl"},
        "fault_tolerance.group_size = 0",
    ),
    "llama4_17bx128e": (
        256,
        {"model.name": "llama4", "model.flavor": "17bx128e", "training.local_batch_size": 1, "training.seq_len": 8192,
         DEGREE: 8, "parallelism.pipeline_parallel_degree": 4},
        "training.local_batch_size = 1",
    ),
}  # fmt: skip


def dry_run(keys: dict[str, Any], *, world_size: int) -> str:
    """Returns what a dry run of these keys prints on a machine without GPUs, but for the layout of the weights."""
    return dry_run_of([f"--{key}={toml_like(value)}" for key, value in keys.items()], world_size=world_size)


def dry_run_of(argv: list[str], *, world_size: int) -> str:
    loaded = read_config(argv)
    plan = preflight.resolve(
        loaded.config,
        world_size=world_size,
        device_type=simulated_device_type(loaded.config, present="cpu"),
        problems=loaded.problems,
        looks_for_data=True,
    )
    return summary(plan)


def needed(own: dict[str, object]) -> list[pytest.MarkDecorator]:
    """Returns the marks of a file by its keys."""
    return [needs_door("torchft")] if own.get("fault_tolerance.enable") else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=needed(own)) for name, (_, own) in FILES.items()])
def test_a_file_is_dry_run_unchanged(name: str) -> None:
    world_size, own = FILES[name]
    text = dry_run(COMMON | own, world_size=world_size)
    assert f"flavor = {toml_like(own['model.flavor'])}" in text
    assert "mesh              " in text


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused_names_its_key(name: str) -> None:
    world_size, own, key = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        dry_run(COMMON | own, world_size=world_size)
    (message,) = caught.value.messages
    assert message.startswith(key)


RANKS = {"llama3_405b": 512, "deepseek_v3_671b": 512, "llama4_17bx128e": 256}
LARGE = ("70b", "32b", "16b", "16e")


def test_fifteen_of_the_seventeen_files_resolve_with_only_paths() -> None:
    if not (checkout := os.environ.get("TORCHTITAN_CHECKOUT")):
        pytest.skip("TORCHTITAN_CHECKOUT is not set to a checkout of torchtitan v0.2.2")
    families = ("deepseek_v3", "gpt_oss", "llama3", "llama3_ft", "llama4", "qwen3")
    files = [
        file for name in families for file in Path(checkout).glob(f"torchtitan/models/{name}/train_configs/*.toml")
    ]
    files.append(Path(checkout) / "tests/integration_tests/base_config.toml")
    assert len(files) == 17
    refused: dict[str, str] = {}
    for file in files:
        ranks = RANKS.get(file.stem, 64 if file.stem.endswith(LARGE) else 8)
        argv = [f"--job.config_file={file}", f"--model.hf_assets_path={SHIPPED_FOLDER}"]
        try:
            assert "mesh              " in dry_run_of(argv, world_size=ranks)
        except ConfigError as error:
            (message,) = error.messages
            refused[f"{file.parts[-3]}/{file.name}"] = message.partition(" =")[0]
    assert refused == {
        "llama3_ft/debug_model.toml": "fault_tolerance.group_size",
        "llama4/llama4_17bx128e.toml": "training.local_batch_size",
    }


@needs_door("torchft")
def test_one_refusal_names_all_that_a_file_lacks() -> None:
    keys = COMMON | {
        "model.name": "flux",
        "checkpoint.initial_load_in_hf_quantized": True,
        "model.hf_assets_path": "./assets/hf/Llama-4",
        "training.dataset": "c5",
        DEGREE: 3,
        "optimizer.mu": 0.9,
        "lr_scheduler.decay_type": "step",
    }
    with pytest.raises(ConfigError) as caught:
        dry_run(keys, world_size=8)
    found = sorted(message.removeprefix("command line: ").split(":")[0] for message in caught.value.messages)
    assert found == [
        "checkpoint.initial_load_in_hf_quantized = true",
        'lr_scheduler.decay_type = "step"',
        'model.hf_assets_path = "./assets/hf/Llama-4"',
        'model.name = "flux"',
        "optimizer.mu = 0.9",
        "parallelism",
    ]
    with pytest.raises(ConfigError) as caught:
        dry_run(keys | {"model.name": "llama3"}, world_size=8)
    assert any(message.startswith('training.dataset = "c5"') for message in caught.value.messages)


def test_the_device_of_a_dry_run_is_an_option() -> None:
    keys = COMMON | FILES["llama3_405b"][1]
    with pytest.raises(ConfigError, match="requires CUDA, and this run is on cpu"):
        dry_run(keys | {"job.dry_run_device": "cpu"}, world_size=512)
    config = read_config(["--job.dry_run_device=cuda"]).config
    assert simulated_device_type(config, present="cpu") == "cuda"
    assert simulated_device_type(read_config([]).config, present="cpu") == "cpu"
