"""TOML files written for torchtitan v0.2 load, or the error names the key and the reason."""

import logging
import re
from pathlib import Path

import pytest

from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.compat import FORMER_NAMES, TORCHTITAN_KEYS
from torchtitan_clone.config.reader import TABLES
from torchtitan_clone.config.schema_training import Optimizer

SMALL = """
[job]
print_config = false

[training]
max_norm = 1
steps = 10

[checkpoint]
enable = false

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false

[validation]
dataset = "c4_validation"
"""

LARGE = """
[model]
converters = ["float8"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]

[comm]
trace_buf_size = 20000

[fault_tolerance]
enable = true
group_size = 2
should_quantize = true
"""


DEFAULTS = """
[job]
dump_folder = "./outputs"
description = "default job"
print_config = false
custom_config_module = ""

[profiling]
enable_profiling = false
save_traces_folder = "profile_traces"
profile_freq = 10
profiler_active = 1
profiler_warmup = 3
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"

[metrics]
log_freq = 10
enable_tensorboard = false
disable_color_printing = false
save_tb_folder = "tb"
save_for_all_ranks = false
enable_wandb = false

[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
converters = []
print_after_conversion = false

[optimizer]
name = "AdamW"
lr = 0.0008
beta1 = 0.9
beta2 = 0.95
eps = 1e-08
weight_decay = 0.1
implementation = "fused"
early_step_in_backward = false

[lr_scheduler]
warmup_steps = 200
decay_type = "linear"
min_lr_factor = 0.0

[training]
dataset = "c4_test"
local_batch_size = 8
global_batch_size = -1
seq_len = 2048
max_norm = 1.0
steps = 10000
enable_cpu_offload = false
dtype = "float32"
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
gc_freq = 50
gc_debug = false

[training.dataloader]
num_workers = 0
persistent_workers = false
pin_memory = false

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
disable_loss_parallel = false
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_first_stage_less_layers = 1
pipeline_parallel_last_stage_less_layers = 1
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_schedule_csv = ""
pipeline_parallel_microbatch_size = 1
pipeline_parallel_expert_parallel_overlap = true
context_parallel_degree = 1
context_parallel_load_balancer = "headtail"
context_parallel_rotate_method = "allgather"
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1
expert_parallel_comm_backend = "standard"

[checkpoint]
enable = false
enable_ft_dataloader_checkpoints = true
folder = "checkpoint"
interval = 500
initial_load_model_only = true
initial_load_in_hf = false
initial_load_in_hf_quantized = false
last_save_model_only = true
last_save_in_hf = false
export_dtype = "float32"
async_mode = "disabled"
keep_latest_k = 10
load_step = -1
exclude_from_loading = []
enable_first_step_checkpoint = false
create_seed_checkpoint = false
load_only = false

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
per_op_sac_force_recompute_mm_shapes_by_fqns = ["moe.router.gate"]
early_stop = false
memory_budget = 0.5
visualize_memory_budget_pareto = false
preserve_rng_state = true
determinism_check = "default"
debug = false

[compile]
enable = false
components = ["model", "loss"]
backend = "inductor"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = []
emulate = false

[quantize.linear.mx]
mxfp8_dim1_cast_kernel_choice = "triton"
recipe_name = "mxfp8_cublas"
filter_fqns = ["output"]

[quantize.grouped_mm.float8]
fqns = []

[quantize.grouped_mm.mx]
recipe_name = "mxfp8"
fqns = []

[comm]
init_timeout_seconds = 300
train_timeout_seconds = 100
trace_buf_size = 20000
save_traces_folder = "comm_traces"
save_traces_file_prefix = "rank_"
mode = "default"

[memory_estimation]
enable = false
disable_fake_mode = false

[fault_tolerance]
enable = false
process_group = "gloo"
process_group_timeout_ms = 10000
replica_id = 0
group_size = 0
min_replica_size = 1

[experimental]
custom_import = ""
custom_args_module = ""

[validation]
enable = false
dataset = "c4_validation"
local_batch_size = 8
seq_len = 2048
freq = 10
steps = -1

[validation.dataloader]
num_workers = 0
persistent_workers = false
pin_memory = false

[debug]
deterministic = false
deterministic_warn_only = false
moe_force_load_balance = false
"""
"""The 134 keys of torchtitan v0.2.2's JobConfig that have a default other than None, with these defaults."""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "titan.toml"
    path.write_text(text)
    return f"--job.config_file={path}"


def test_file_with_harmless_torchtitan_keys_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchtitan_clone"):
        config = load_config([write(tmp_path, SMALL)])
    assert (config.training.steps, config.training.max_norm, config.checkpoint.enable) == (10, 1.0, False)
    ignored, differences = [record.getMessage() for record in caplog.records]
    scales = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    gather = "quantize.linear.float8.enable_fsdp_float8_all_gather"
    names = f"job.print_config, {gather}, {scales}, validation.dataset"
    assert ignored == f"keys of torchtitan without effect here, ignored: {names}"
    assert "attention stays within a document (training.document_masking = false)" in differences
    assert "norms are not decayed (optimizer.decay_all_parameters = true)" in differences
    assert "clamped at 3 standard deviations (training.init_cutoff = inf)" in differences
    assert "only if the tokenizer's files add it to texts (data.add_bos = true)" in differences
    assert "special tokens in text are characters (training.parse_special_tokens = true)" in differences


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_a_former_name_is_an_error_that_names_the_option(tmp_path: Path, former: str) -> None:
    table, _, key = former.rpartition(".")
    text = f"[{table}]\n{key} = 1\n" if table else f"{key} = 1\n"
    with pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path, text)])
    line = 2 if table else 1
    problem = f"{former}: unknown option; did you mean {FORMER_NAMES[former]}?"
    assert caught.value.messages == [f"{tmp_path}/titan.toml:{line}: {problem}"]
    name, *keys = FORMER_NAMES[former].split(".")
    assert keys[0] in TABLES[name]


def test_a_module_of_ones_own_is_the_way_to_import_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"set job\.imports = \[\"my_module\"\] instead"):
        load_config(["--experimental.custom_import=my_models"])


def test_all_defaults_of_torchtitan_load(tmp_path: Path) -> None:
    assert sum(len(line.split(" = ")) - 1 for line in DEFAULTS.splitlines()) == 134
    config = load_config([write(tmp_path, DEFAULTS)])
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.checkpoint.enable is False


def test_no_line_on_differences_if_there_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    same = ["--training.document_masking=false", "--optimizer.decay_all_parameters", "--training.init_cutoff=inf"]
    same += ["--data.add_bos", "--training.parse_special_tokens"]
    with caplog.at_level(logging.INFO, logger="torchtitan_clone"):
        load_config([write(tmp_path, SMALL), *same])
        load_config([])
    assert not any("unlike there" in record.getMessage() for record in caplog.records)


def test_a_key_that_changes_numbers_slightly_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, LARGE.partition("[comm]")[0])
    config = load_config([path])
    load_config([path, "--model.converters=[]"])
    assert (config.model.converters, config.quantize.linear.float8.filter_fqns) == (["float8"], ["output"])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    key = "quantize.linear.float8.enable_fsdp_float8_all_gather = true"
    reason = "FSDP gathers weights in training.mixed_precision_param, and they are cast afterwards"
    assert warning.endswith(f"titan.toml:6: {key} is ignored: {reason}")


def test_unsupported_keys_are_reported_with_their_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path, LARGE)])
    assert [message.partition("titan.toml:")[2] for message in caught.value.messages] == [
        "15: fault_tolerance.should_quantize = true: gradients are not quantized between replica groups; set it to "
        "false",
    ]


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--validation.enable", "--validation.dataset=c4"], "validation uses the documents that data.held_out"),
        (["--model.tokenizer_path=x"], "set model.hf_assets_path to the folder"),
        (["--checkpoint.initial_load_in_hf_quantized=true"], "are read without this option; set it to false"),
        (["--parallelism.context_parallel_load_balancer=ptrr"], 'as with "headtail"; set it to "headtail"'),
        (["--job.custom_config_module=mine"], "add options to config/schema.py"),
        (["--hf_transformers.model=x"], "models of the transformers library are not supported"),
        (["--training.dataloader.num_workers=2"], "set data.num_workers instead"),
        (['--model.converters=["mx"]'], 'must be "float8" | "quantize.linear.float8"'),
        (["--quantize.linear.float8.emulated"], "did you mean quantize.linear.float8.emulate?"),
        (["--quantize.linear.float8.recipe_name=row"], 'must be "tensorwise" | "rowwise" | "rowwise_with_gw_hp"'),
        (["--checkpoint.initial_load_in_hf_quantized=1"], "are read without this option; set it to false"),
    ],
)
def test_unsupported_torchtitan_keys(argv: list[str], fragment: str) -> None:
    with pytest.raises(ConfigError, match=argv[-1].removeprefix("--").partition("=")[0]) as caught:
        load_config(argv)
    (message,) = caught.value.messages
    assert fragment in message


def test_table_of_torchtitan_keys_holds_no_option_of_the_schema() -> None:
    """A key that becomes an option must be removed from the table."""
    ours = {f"{table}.{key}" for table in TABLES for key in TABLES[table]}
    assert sorted(ours & TORCHTITAN_KEYS.keys()) == []
    assert {key.tunes for key in TORCHTITAN_KEYS.values()} - {""} <= ours


# The optimizer of a fork's file of 2026, in the dialect of v0.2.
MUON = """
[optimizer]
name = "Muon"
algorithm = "muon"
lr = 3e-4
mu = 0.95
nesterov = true
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
adjust_lr = "rms_norm"
flatten = true
use_triton = false
power_iters = 1
qr_method = "rcqr"
rcqr_oversample = 1.25
embedding_lr_factor = 1.0
embedding_optimizer = "adamw"
head_lr_factor = 1.0
head_optimizer = "adamw"
scalar_lr_factor = 1.0
scalar_optimizer = "adamw"
expert_lr_factor = 1.0
"""


def test_a_table_of_muon_loads(tmp_path):
    optimizer = load_config([write(tmp_path, MUON)]).optimizer
    assert optimizer == Optimizer(name="Muon", lr=3e-4)


SAME = {"name", "lr", "weight_decay", "beta1", "beta2", "eps"}
IGNORED = {"flatten", "use_triton", "power_iters", "qr_method", "rcqr_oversample"}
ANSWERED = {
    "algorithm": ('"dion"', 'set optimizer.name to "Muon", "AdamW" or "Adam" instead'),
    "mu": ("0.9", "set optimizer.args.momentum instead"),
    "nesterov": ("false", "set optimizer.args.nesterov instead"),
    "adjust_lr": (
        '"spectral_norm"', 'set optimizer.args.adjust_lr to "match_rms_adamw", "spectral" or "original" instead'
    ),
    "embedding_lr_factor": ("0.5", '[[optimizer.groups]] with pattern = "tok_embeddings.weight" and lr = the factor'),
    "head_lr_factor": ("0.5", '[[optimizer.groups]] with pattern = "output.weight" and lr = the factor'),
    "scalar_lr_factor": ("0.5", '[[optimizer.groups]] with pattern = "*norm.weight" and lr = the factor'),
    "expert_lr_factor": ("0.5", '[[optimizer.groups]] with pattern = "*.experts.*" and lr = the factor'),
    "embedding_optimizer": ('"lion"', "name another optimizer for them in [[optimizer.groups]]"),
    "head_optimizer": ('"lion"', "name another optimizer for them in [[optimizer.groups]]"),
    "scalar_optimizer": ('"lion"', "name another optimizer for them in [[optimizer.groups]]"),
}  # fmt: skip
"""Another value of each key that changes a run, and a part of the answer."""


def test_each_key_of_the_table_of_muon_has_another_value_or_an_answer(tmp_path):
    """All other values at once: those without effect are ignored, the others are named, each on its own line."""
    assert set(re.findall(r"^(\w+) =", MUON, re.MULTILINE)) == SAME | IGNORED | ANSWERED.keys()
    text = MUON.replace("flatten = true", "flatten = false").replace("power_iters = 1", "power_iters = 3")
    for key, (value, _) in ANSWERED.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
    with pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path, text)])
    found = {message.split("optimizer.")[1].split(" ")[0]: message for message in caught.value.messages}
    assert found.keys() == ANSWERED.keys()
    assert all(answer in found[key] for key, (_, answer) in ANSWERED.items())


def test_an_algorithm_that_no_name_repeats_is_answered(tmp_path):
    with pytest.raises(ConfigError, match=r'optimizer\.algorithm = "muon": set optimizer.name to "Muon"'):
        load_config([write(tmp_path, MUON.replace('name = "Muon"\n', ""))])
