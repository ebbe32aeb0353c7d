"""Tests of checks.py and remedies.py: a violated rule gives exactly one message with value, rule and remedy."""

import pytest

from torchtitan_clone.config import Config, load_config
from torchtitan_clone.config.checks import BOUNDS, find_config_errors

OUT_OF_BOUNDS = {
    "training.seq_len": 0,
    "training.local_batch_size": 0,
    "training.global_batch_size": -2,
    "training.steps": 0,
    "training.max_norm": 0,
    "training.loss_chunk_tokens": 0,
    "training.max_skipped_steps": -1,
    "training.gc_freq": 0,
    "data.num_workers": -1,
    "data.prepare_processes": 0,
    "data.held_out_fraction": 1.0,
    "data.max_bad_rows": -1,
    "optimizer.lr": "nan",
    "optimizer.beta1": 1.0,
    "optimizer.beta2": -0.1,
    "optimizer.eps": 0,
    "optimizer.weight_decay": "inf",
    "lr_scheduler.warmup_steps": -1,
    "lr_scheduler.decay_ratio": 0,
    "lr_scheduler.min_lr_factor": 1.1,
    "parallelism.data_parallel_replicate_degree": 0,
    "parallelism.data_parallel_shard_degree": 0,
    "parallelism.fsdp_prefetch_blocks": 0,
    "parallelism.tensor_parallel_degree": 0,
    "parallelism.pipeline_parallel_degree": -1,
    "parallelism.expert_parallel_degree": "0",
    "parallelism.context_parallel_degree": 0,
    "parallelism.pipeline_parallel_microbatch_size": 0,
    "parallelism.pipeline_parallel_layers_per_stage": 0,
    "parallelism.pipeline_parallel_first_stage_less_layers": -1,
    "parallelism.pipeline_parallel_last_stage_less_layers": -1,
    "checkpoint.interval": 0,
    "checkpoint.interval_minutes": 0,
    "checkpoint.keep_latest_k": -1,
    "checkpoint.keep_every": -1,
    "checkpoint.writer_timeout_seconds": 0,
    "checkpoint.load_step": -2,
    "preemption.deadline_seconds": 0,
    "training.max_seconds": 0,
    "checkpoint.hf_export_interval": -1,
    "metrics.log_freq": 0,
    "profiling.profile_freq": 0,
    "profiling.profiler_warmup": -1,
    "profiling.profiler_active": 0,
    "comm.init_timeout_seconds": 0,
    "comm.train_timeout_seconds": 0,
    "comm.trace_buf_size": -1,
    "comm.straggler_freq": -1,
    "validation.freq": 0,
    "validation.steps": 0,
    "validation.local_batch_size": 0,
    "fault_tolerance.process_group_timeout_ms": 0,
    "fault_tolerance.replica_id": -1,
    "fault_tolerance.group_size": -1,
    "fault_tolerance.min_replica_size": 0,
    "fault_tolerance.stall_factor": 0.5,
    "fault_tolerance.sync_steps": 0,
    "fault_tolerance.num_fragments": 0,
    "fault_tolerance.fragment_sync_delay": -1,
    "fault_tolerance.fragment_update_alpha": 1.5,
    "fault_tolerance.heartbeat_timeout_ms": 0,
    "fault_tolerance.join_timeout_ms": 0,
    "slurm.nodes": 0,
    "slurm.gpus_per_node": -1,
    "slurm.processes_per_node": 0,
    "slurm.cpus_per_node": 0,
    "slurm.signal_seconds": 0,
    "slurm.max_starts_without_progress": 0,
    "debug.seed": -1,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_option_outside_its_bounds(name: str) -> None:
    (message,) = find_config_errors(load_config([f"--{name}={OUT_OF_BOUNDS[name]}"]), device_type="cpu")
    assert message.startswith(f"{name} = ")
    assert ": must be " in message


ASYNC_TENSOR = "--parallelism.enable_async_tensor_parallel"
FT = "--fault_tolerance"
SEMI_SYNC = [f"{FT}.enable", f"{FT}.group_size=2", f"{FT}.semi_sync_method=diloco"]
GROUPS = "--optimizer.groups"
GROUP_OUT_OF_BOUNDS = {"lr": "0.0", "weight_decay": "-0.1", "beta1": "1.0", "beta2": "-0.5", "eps": "nan"}

RULES = [
    *(
        (
            [f"{GROUPS}=[{{pattern = 'norm*'}}, {{pattern = '*', {key} = {value}}}]"],
            "cpu",
            f'optimizer.groups, pattern "*": {key} = {value} must be {BOUNDS[f"optimizer.{key}"][0]}.',
        )
        for key, value in GROUP_OUT_OF_BOUNDS.items()
    ),
    *(
        ([f"--slurm.time={time}"], "cpu", f'slurm.time = "{time}": not in Slurm\'s format; for example "90" (minutes)')
        for time in ("1 hour", "1-", "12:00:00:00", "0")
    ),
    (
        ["--slurm.time=2:00", "--slurm.signal_seconds=120"],
        "cpu",
        'slurm.signal_seconds = 120: must be less than slurm.time "2:00" = 120 s; decrease it',
    ),
    (["--slurm.environment={'A B' = 1}"], "cpu", 'slurm.environment: "A B" is not a valid name'),
    (
        ["--job.dump_folder=s3://bucket/runs"],
        "cpu",
        'job.dump_folder = "s3://bucket/runs": object stores are not supported',
    ),
    (["--checkpoint.folder=gs://bucket"], "cpu", 'checkpoint.folder = "gs://bucket": object stores are not supported'),
    (
        [f"{FT}.enable"],
        "cpu",
        "fault_tolerance.group_size = 0: must be at least 1 with fault_tolerance.enable; set it to the number of "
        "replica groups.",
    ),
    (
        [f"{FT}.enable", f"{FT}.group_size=2", f"{FT}.replica_id=2"],
        "cpu",
        "fault_tolerance.replica_id = 2: must be at most 1 with fault_tolerance.group_size 2.",
    ),
    (
        [f"{FT}.enable", f"{FT}.group_size=2", f"{FT}.process_group=nccl"],
        "cpu",
        'fault_tolerance.process_group = "nccl": gradients are on cpu; set it to "gloo".',
    ),
    (
        [f"{FT}.enable", f"{FT}.group_size=2", f"{FT}.join_timeout_ms=1000"],
        "cpu",
        "fault_tolerance.join_timeout_ms = 1000: the lighthouse would drop a replica group that waits for "
        "process_group_timeout_ms; set it to more than 10000.",
    ),
    (
        [*SEMI_SYNC, f"{FT}.sync_steps=5", f"{FT}.num_fragments=2"],
        "cpu",
        "fault_tolerance.sync_steps = 5: not a multiple of the number of fragments 2; set it to 4 or 6.",
    ),
    (
        [*SEMI_SYNC, f"{FT}.sync_steps=10", f"{FT}.num_fragments=2", f"{FT}.fragment_sync_delay=5"],
        "cpu",
        "fault_tolerance.fragment_sync_delay = 5: must be less than the interval between two averages, 5 "
        "steps; set it to at most 4.",
    ),
    (
        [*SEMI_SYNC, f"{FT}.sync_steps=10", "--checkpoint.interval=25"],
        "cpu",
        "checkpoint.interval = 25: not a multiple of the 10 steps between two averages, after which all replica groups "
        "hold equal weights; set it to 20 or 30.",
    ),
    (
        ["--training.dtype=bfloat16", "--training.mixed_precision_param=float32"],
        "cpu",
        'set training.mixed_precision_param to "bfloat16" or training.dtype to "float32"',
    ),
    (["--training.steps=20"], "cpu", "lr_scheduler.warmup_steps = 200: exceeds training.steps 20"),
    (
        ["--activation_checkpoint.selective_ac_option=0"],
        "cpu",
        'selective_ac_option = "0": must be "op", or a positive integer',
    ),
    (["--activation_checkpoint.selective_ac_option=some"], "cpu", 'selective_ac_option = "some": must be "op"'),
    (["--compile.enable", "--compile.components=[]"], "cpu", "no component is selected; add model or loss"),
    (
        ["--profiling.enable_memory_snapshot"],
        "cpu",
        "memory snapshots require CUDA, and this run is on cpu; set it to false",
    ),
    (
        [ASYNC_TENSOR, "--parallelism.tensor_parallel_degree=2", "--compile.enable"],
        "cpu",
        "requires CUDA, and this run is on cpu; set it to false",
    ),
    ([ASYNC_TENSOR, "--parallelism.tensor_parallel_degree=2"], "cuda", "set compile.enable to true"),
    ([ASYNC_TENSOR, "--compile.enable"], "cuda", "parallelism.tensor_parallel_degree is 1"),
    (["--profiling.enable_profiling", "--profiling.profile_freq=3"], "cpu", "set it to at least 4"),
    (
        ["--validation.enable", "--data.held_out_fraction=0"],
        "cpu",
        "holds out no documents; set data.held_out_fraction",
    ),
    (
        ['--checkpoint.exclude_from_loading=["modell"]'],
        "cpu",
        'exclude_from_loading = ["modell"]: unknown state; use model, optimizer, rng, data, or a name such as',
    ),
]


@pytest.mark.parametrize(("argv", "device_type", "fragment"), RULES)
def test_violated_rule(argv: list[str], device_type: str, fragment: str) -> None:
    (message,) = find_config_errors(load_config(argv), device_type=device_type)
    assert fragment in message


VALID = [
    ([ASYNC_TENSOR, "--parallelism.tensor_parallel_degree=2", "--compile.enable"], "cuda"),
    (["--profiling.enable_memory_snapshot"], "cuda"),
    *(
        ([argument], "cpu")
        for argument in (
            "--training.max_norm=inf",
            "--lr_scheduler.decay_ratio=1",
            "--lr_scheduler.min_lr_factor=1",
            "--activation_checkpoint.selective_ac_option=op",
            "--training.dtype=bfloat16",
            "--training.enable_cpu_offload",
            "--training.steps=200",
            "--data.held_out_fraction=0",
            "--profiling.profile_freq=1",
            *(f"--slurm.time={time}" for time in ("90", "2:01", "12:00:00", "1-12", "1-12:30", "1-12:30:05")),
            "--slurm.time=UNLIMITED",
        )
    ),
]


@pytest.mark.parametrize(("argv", "device_type"), VALID)
def test_valid_options(argv: list[str], device_type: str) -> None:
    assert find_config_errors(load_config(argv), device_type=device_type) == []


def test_defaults_are_valid() -> None:
    assert find_config_errors(Config(), device_type="cpu") == []


def test_schedule_rule_is_skipped_if_an_option_is_out_of_bounds() -> None:
    (message,) = find_config_errors(load_config(["--training.steps=0"]), device_type="cpu")
    assert message == "training.steps = 0: must be at least 1."
