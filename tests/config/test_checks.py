"""Tests of checks.py, remedies.py and schema.py: a violated rule gives one message with value, rule and remedy."""

import math
from operator import attrgetter
from typing import get_args, get_origin, get_type_hints

import pytest

from torchtitan_clone.config import Config, load_config
from torchtitan_clone.config.checks import find_config_errors, ranges_of
from torchtitan_clone.config.schema_training import DataSource, Freeze, OptimizerGroup, Range, Stage

RANGES = {
    f"{table}.{key}": limits for table, cls in get_type_hints(Config).items() for key, limits in ranges_of(cls).items()
}
TABLES_IN_LISTS = {"freeze_schedule": Freeze, "groups": OptimizerGroup, "sources": DataSource, "stages": Stage}


def test_every_number_has_a_range() -> None:
    tables = [*get_type_hints(Config).values(), *TABLES_IN_LISTS.values()]
    without = [
        f"{table.__name__}.{key}"
        for table in tables
        for key, hint in get_type_hints(table).items()
        if {int, float} & {hint, *get_args(hint)} and key not in ranges_of(table)
        if get_origin(hint) is not dict  # the weights of a stage, see config/stages.py
    ]
    assert without == []


def outside(limits: Range) -> list[float]:
    """Returns values just outside of a range, and extreme ones."""
    if isinstance(limits.low, int):
        return [limits.low - (2 if limits.or_auto else 1), int(limits.high) + 1, 2**63 - 1, -(2**63)]
    ends = [limits.low] * limits.above + [limits.high] * limits.below
    return [*ends, -1e-9 + limits.low, *([] if math.isinf(limits.high) else [limits.high * 1.001, math.inf]), math.nan]


@pytest.mark.parametrize("name", RANGES)
def test_option_outside_its_range(name: str) -> None:
    limits = RANGES[name]
    for value in outside(limits):
        if not limits.holds(value) and not (isinstance(limits.low, int) and value >= 2**63):
            errors = find_config_errors(load_config([f"--{name}={value}"]), device_type="cpu")
            assert f"{name} = {value}: must be {limits.describe()}." in errors
    default = attrgetter(name)(Config())
    assert default is None or limits.holds(default)


@pytest.mark.parametrize(
    ("limits", "wording"),
    [
        (Range(1, 10**9), "from 1 to 1,000,000,000"),
        (Range(1, 5, or_auto=True), "-1 or from 1 to 5"),
        (Range(0.0, 1.0, below=True), "at least 0 and below 1"),
        (Range(0.0, math.inf, above=True), "above 0 and at most inf"),
    ],
)
def test_wording_of_a_range(limits: Range, wording: str) -> None:
    assert limits.describe() == wording


ASYNC_TENSOR = "--parallelism.enable_async_tensor_parallel"
FT = "--fault_tolerance"
SEMI_SYNC = [f"{FT}.enable", f"{FT}.group_size=2", f"{FT}.semi_sync_method=diloco"]
GROUPS = "--optimizer.groups"
GROUP_OUT_OF_BOUNDS = {"lr": "0.0", "weight_decay": "-0.1", "beta1": "1.0", "beta2": "-0.5", "eps": "nan"}

RULES = [
    (["--device=h100"], "cpu", "--device=h100: is for --dry-run; add --dry-run, or leave it out."),
    *(
        (
            [f"{GROUPS}=[{{pattern = 'norm*'}}, {{pattern = '*', {key} = {value}}}]"],
            "cpu",
            f'optimizer.groups, pattern "*": {key} = {value} must be {RANGES[f"optimizer.{key}"].describe()}.',
        )
        for key, value in GROUP_OUT_OF_BOUNDS.items()
    ),
    *(
        ([f"--slurm.time={time}"], "cpu", f'launch.time = "{time}": not in Slurm\'s format; for example "90" (minutes)')
        for time in ("1 hour", "1-", "12:00:00:00", "0")
    ),
    (
        ["--slurm.time=2:00", "--slurm.signal_seconds=120"],
        "cpu",
        'launch.grace_seconds = 120: must be less than launch.time "2:00" = 120 s; decrease it',
    ),
    (["--slurm.environment={'A B' = 1}"], "cpu", 'launch.environment: "A B" is not a valid name'),
    (
        ["--job.dump_folder=s3://bucket/runs"],
        "cpu",
        'job.dump_folder = "s3://bucket/runs": only checkpoint.folder may be in an object store',
    ),
    (
        ["--job.dump_folder=s3://key:secret@bucket/runs"],
        "cpu",
        'job.dump_folder = "s3://...": only checkpoint.folder may be in an object store',
    ),
    (
        ["--checkpoint.folder=s3://key:sec/ret@bucket/runs"],
        "cpu",
        'checkpoint.folder = "s3://...": a URL must not hold credentials',
    ),
    (["--checkpoint.folder=hf"], "cpu", 'checkpoint.folder = "hf": the run writes other files there; choose another'),
    (["--checkpoint.folder=./slurm/x"], "cpu", 'checkpoint.folder = "./slurm/x": the run writes other files there'),
    (
        ["--checkpoint.folder=s3://b/x", "--checkpoint.store_timeout_seconds=1000"],
        "cpu",
        "checkpoint.store_timeout_seconds = 1000: must be less than comm.init_timeout_seconds",
    ),
    (["--checkpoint.folder=gs://"], "cpu", 'checkpoint.folder = "gs://": must be SCHEME://BUCKET/PREFIX'),
    (["--checkpoint.folder=gs://b/../x"], "cpu", 'checkpoint.folder = "gs://b/../x": must be SCHEME://BUCKET/PREFIX'),
    (["--checkpoint.folder=file://x"], "cpu", 'checkpoint.folder = "file://x": must name an absolute path'),
    (
        ["--checkpoint.folder=s3://b/x", "--checkpoint.local_folder=s3://b/x"],
        "cpu",
        "only checkpoint.folder may be in an object store",
    ),
    (["--checkpoint.folder=s3://b/x", "--checkpoint.local_folder=hf"], "cpu", "the run writes other files there"),
    (
        ["--checkpoint.local_keep_latest_k=3"],
        "cpu",
        "checkpoint.local_keep_latest_k = 3: is for checkpoints in an object",
    ),
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
        [*SEMI_SYNC, "--training.steps=1000", f"{FT}.sync_steps=5", "--checkpoint.interval_minutes=5"],
        "cpu",
        "checkpoint.interval_minutes: saves a step between two averages, when replica groups hold other weights",
    ),
    (
        [*SEMI_SYNC, "--training.steps=1000", f"{FT}.sync_steps=5", "--checkpoint.keep_every=7"],
        "cpu",
        "checkpoint.keep_every = 7: not a multiple of the 5 steps between two averages",
    ),
    (
        [f"{FT}.enable", f"{FT}.group_size=2", "--checkpoint.load_step=10"],
        "cpu",
        "checkpoint.load_step = 10: a replica group that starts again would move aside what the others have saved",
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
        'exclude_from_loading = ["modell"]: unknown state; use model, optimizer, ema, rng, data, or a name',
    ),
    (["--ema.half_life=0.1"], "cpu", "ema.half_life = 0.1: no average is kept with ema.enable = false; set ema.enable"),
    (
        ["--ema.enable", "--ema.validate"],
        "cpu",
        "ema.validate = true: validation.enable and evaluation.enable are false",
    ),
    (["--ema.enable", "--ema.export"], "cpu", "ema.export = true: nothing is exported; set checkpoint.last_save_in_hf"),
    (
        [
            "--ema.enable",
            "--fault_tolerance.enable",
            "--fault_tolerance.group_size=2",
            "--fault_tolerance.semi_sync_method=diloco",
        ],
        "cpu",
        "ema.enable = true: with fault_tolerance.semi_sync_method every replica group would average weights of its own",
    ),
    (
        ["--checkpoint.enable=false", "--checkpoint.load_step=5"],
        "cpu",
        "checkpoint.load_step = 5: nothing is resumed with checkpoint.enable = false; set checkpoint.enable and",
    ),
    *(
        (
            [f"--checkpoint.{off}", "--checkpoint.create_seed_checkpoint"],
            "cpu",
            f"create_seed_checkpoint = true: nothing is saved with checkpoint.{off.replace('=', ' = ')}; change one",
        )
        for off in ("enable=false", "load_only=true")
    ),
    *(
        (
            ["--training.on_spike=rewind", f"--checkpoint.{off}"],
            "cpu",
            f'training.on_spike = "rewind": nothing is saved with checkpoint.{off.replace("=", " = ")}, so there is no',
        )
        for off in ("enable=false", "load_only=true")
    ),
    (
        ["--training.on_spike=rewind", "--checkpoint.keep_latest_k=1"],
        "cpu",
        'checkpoint.keep_latest_k = 1: training.on_spike = "rewind" goes back to a checkpoint that is older than',
    ),
    (
        ["--training.on_spike=rewind", "--training.spike_patience=1"],
        "cpu",
        'training.spike_patience = 1: with training.on_spike = "rewind" single spikes are skipped; set it to at least',
    ),
    (
        [
            "--training.on_spike=rewind",
            "--fault_tolerance.enable",
            "--fault_tolerance.group_size=2",
            "--fault_tolerance.semi_sync_method=diloco",
            "--training.steps=1000",
        ],
        "cpu",
        'training.on_spike = "rewind": with fault_tolerance.semi_sync_method within a round each replica group has',
    ),
]


@pytest.mark.parametrize(("argv", "device_type", "fragment"), RULES)
def test_violated_rule(argv: list[str], device_type: str, fragment: str) -> None:
    (message,) = find_config_errors(load_config(argv), device_type=device_type)
    assert fragment in message


VALID = [
    ([ASYNC_TENSOR, "--parallelism.tensor_parallel_degree=2", "--compile.enable"], "cuda"),
    (["--profiling.enable_memory_snapshot"], "cuda"),
    ([*SEMI_SYNC, f"{FT}.sync_steps=3", "--training.steps=999", "--checkpoint.enable=false"], "cpu"),
    *(
        ([argument], "cpu")
        for argument in (
            "--training.max_norm=inf",
            "--lr_scheduler.decay_ratio=1",
            "--lr_scheduler.min_lr_factor=1",
            "--activation_checkpoint.selective_ac_option=op",
            "--training.dtype=bfloat16",
            "--training.enable_cpu_offload",
            "--training.steps=5",
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
