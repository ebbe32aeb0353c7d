"""Keys of torchtitan that are no options here: ignored if off or without effect, else an error; and former names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torchtitan_clone.config.schema import Config


@dataclass(frozen=True)
class TorchtitanKey:
    """How to treat one key, or all keys that match a pattern."""

    reason: str
    """Why a value is an error and what to do instead."""
    harmless: tuple[object, ...] | None = (False,)
    """Values that have no effect here; None: all values."""
    tunes: str = ""
    """Key that enables the feature which this key tunes; while it is off, every value is harmless."""
    is_error: bool = True
    """False: other values are ignored with the reason as a warning."""
    only_with: tuple[str, object] | None = None
    """Option and the value of it with which the harmless values are harmless; None: always."""

    def is_harmless(self, value: object, *, values: Mapping[str, object]) -> bool:
        """Returns whether ignoring the value does not change the run; `values` are those of all keys of the files."""
        if self.harmless is None or (self.tunes and _is_one_of(values.get(self.tunes), (None, False, 1, []))):
            return True
        if self.only_with is not None and values.get(self.only_with[0]) != self.only_with[1]:
            return False
        return _is_one_of(value, self.harmless)


WITHOUT_EFFECT = (
    *("job.print_config", "job.print_args"),  # every run writes its config.toml
    "job.use_for_integration_test",
    *("model.print_after_conversion", "float8.*", "mx.*", "quantize.linear.mx.*", "quantize.grouped_mm.*"),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",  # numbers are the same without
    "memory_estimation.disable_fake_mode",
    *("optimizer.flatten", "optimizer.use_triton"),  # how other programs compute the same update
    *("optimizer.power_iters", "optimizer.qr_method", "optimizer.rcqr_oversample"),  # of Dion, no option of Muon
    "parallelism.expert_parallel_comm_backend",
    "parallelism.expert_tensor_parallel_degree",  # experts are sharded over the axis of experts, and by FSDP
    "parallelism.pipeline_parallel_expert_parallel_overlap",  # numbers are the same without
    "checkpoint.enable_ft_dataloader_checkpoints",  # a checkpoint stores the data position of all replica groups
    "activation_checkpoint.memory_budget",  # the mode memory_budget is an error
    "activation_checkpoint.preserve_rng_state",  # no layer uses random numbers
    "comm.save_traces_file_prefix",  # hang reports are named by rank
)
"""Keys that are ignored, whatever their value."""


def _rate_of(pattern: str) -> str:
    return f'write [[optimizer.groups]] with pattern = "{pattern}" and lr = the factor times optimizer.lr instead'


_OFF = TorchtitanKey("it is not supported; set it to false")
_VALIDATION_DATA = "validation uses the documents that data.held_out_fraction holds out; remove the key"
_HELD_OUT = TorchtitanKey(_VALIDATION_DATA, (), "validation.enable")

TORCHTITAN_KEYS = dict.fromkeys(WITHOUT_EFFECT, TorchtitanKey("", None)) | {
    "job.save_config_file": TorchtitanKey("every run writes config.toml into its folder; remove the key", ("",)),
    "job.custom_config_module": TorchtitanKey(
        "add options to config/schema.py and remove the key", ("", "torchtitan.components.ft.config")
    ),
    "experimental.custom_args_module": TorchtitanKey("add options to config/schema.py and remove the key", ("",)),
    "experimental.*": TorchtitanKey(
        'set job.imports = ["my_module"] instead, and remove the key; see docs/extending.md',
        ("",),
    ),
    "metrics.save_for_all_ranks": TorchtitanKey("rank 0 writes values reduced over all ranks; set it to false"),
    "model.tokenizer_path": TorchtitanKey("set model.hf_assets_path to the folder that holds tokenizer.json", ()),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": TorchtitanKey(
        "FSDP gathers weights in training.mixed_precision_param, and they are cast afterwards",
        tunes="model.converters",
        is_error=False,
    ),
    "memory_estimation.enable": TorchtitanKey("--comm.mode=fake_backend prints the estimate; set it to false"),
    "optimizer.early_step_in_backward": TorchtitanKey("gradients are clipped before the step; set it to false"),
    "optimizer.algorithm": TorchtitanKey(
        'set optimizer.name to "Muon", "AdamW" or "Adam" instead', ("muon",), only_with=("optimizer.name", "Muon")
    ),
    "optimizer.mu": TorchtitanKey("set optimizer.args.momentum instead", (0.95,)),
    "optimizer.nesterov": TorchtitanKey("set optimizer.args.nesterov instead", (True,)),
    "optimizer.adjust_lr": TorchtitanKey(
        'set optimizer.args.adjust_lr to "match_rms_adamw", "spectral" or "original" instead', ("rms_norm",)
    ),
    "optimizer.embedding_lr_factor": TorchtitanKey(_rate_of("tok_embeddings.weight"), (1, 1.0)),
    "optimizer.head_lr_factor": TorchtitanKey(_rate_of("output.weight"), (1, 1.0)),
    "optimizer.scalar_lr_factor": TorchtitanKey(_rate_of("*norm.weight"), (1, 1.0)),
    "optimizer.expert_lr_factor": TorchtitanKey(_rate_of("*.experts.*"), (1, 1.0)),
    "optimizer.*_optimizer": TorchtitanKey(
        "with Muon, AdamW updates the embedding, the output projection and vectors; name another optimizer for them in "
        "[[optimizer.groups]]",
        ("adamw",),
    ),
    "training.gc_debug": TorchtitanKey("garbage collection time is always logged; set it to false"),
    "training.dataloader.num_workers": TorchtitanKey("set data.num_workers instead", (0,)),
    "training.dataloader.*": TorchtitanKey(
        "the loader prefetches automatically; remove the key, and set data.num_workers for streamed data"
    ),
    "validation.dataloader.*": _HELD_OUT,
    "validation.dataset": _HELD_OUT,
    "validation.dataset_path": _HELD_OUT,
    "validation.seq_len": TorchtitanKey("validation uses training.seq_len; remove the key", (), "validation.enable"),
    "parallelism.enable_compiled_autograd": _OFF,
    "parallelism.disable_loss_parallel": TorchtitanKey(
        "tensor parallelism always computes the loss on vocabulary shards; set it to false"
    ),
    "parallelism.context_parallel_load_balancer": TorchtitanKey(
        'ranks share the work of causal attention as with "headtail"; set it to "headtail"', ("headtail",)
    ),
    "checkpoint.initial_load_in_hf_quantized": TorchtitanKey(
        "quantized weights of DeepSeek V3 and gpt-oss are read without this option; set it to false"
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": TorchtitanKey(
        "selective checkpointing selects matrix products by operation; remove the key", ([], ["moe.router.gate"])
    ),
    "activation_checkpoint.early_stop": _OFF,
    "activation_checkpoint.visualize_memory_budget_pareto": _OFF,
    "activation_checkpoint.determinism_check": TorchtitanKey('it is not supported; set it to "default"', ("default",)),
    "activation_checkpoint.debug": _OFF,
    "fault_tolerance.should_quantize": TorchtitanKey(
        "gradients are not quantized between replica groups; set it to false"
    ),
    "hf_transformers.*": TorchtitanKey("models of the transformers library are not supported; remove the table", ()),
}


_MOVED = (
    "nodes", "gpus_per_node", "processes_per_node", "cpus_per_node", "time", "max_starts_without_progress", "setup",
    "environment",
)  # fmt: skip
RENAMED: dict[tuple[str, ...], tuple[str, ...]] = {("slurm", key): ("launch", key) for key in _MOVED}
RENAMED["slurm", "signal_seconds"] = ("launch", "grace_seconds")
"""Options that files and checkpoints of earlier versions name otherwise."""


def renamed(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the present name of an option, or of an entry of it."""
    return (*RENAMED.get(path[:2], path[:2]), *path[2:])


FORMER_NAMES = {
    "activation_checkpoint.enable": "activation_checkpoint.mode",
    "checkpoint.create_seed_checkpoint_only": "checkpoint.create_seed_checkpoint",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.interval_type": "checkpoint.interval_minutes",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "config": "job.config_file",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
    "experimental.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "float8.enable_float8_linear": "model.converters",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "metrics.enable_color_printing": "metrics.disable_color_printing",
    "module": "model.name",
    "optimizer.foreach": "optimizer.implementation",
    "optimizer.fused": "optimizer.implementation",
    "parallelism.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_type": "parallelism.data_parallel_replicate_degree",
}
"""Options by the names that other versions of torchtitan have for them, where the name of the key differs too."""


def describe_differences(config: Config) -> str:
    """Returns what a run computes otherwise than in torchtitan, each with the option that does the same; "" if none."""
    found: list[str] = []
    if config.training.document_masking:
        found.append("attention stays within a document (training.document_masking = false)")
    if not config.optimizer.decay_all_parameters:
        found.append("norms are not decayed (optimizer.decay_all_parameters = true)")
    if config.training.init_cutoff < math.inf:
        cutoff = config.training.init_cutoff
        found.append(f"initial values are clamped at {cutoff:g} standard deviations (training.init_cutoff = inf)")
    if config.data.add_bos is None:
        found.append(
            "a bos_token precedes documents only if the tokenizer's files add it to texts (data.add_bos = true)"
        )
    if not config.training.parse_special_tokens:
        found.append("special tokens in text are characters (training.parse_special_tokens = true)")
    return "; ".join(found)


def _is_one_of(value: object, items: tuple[object, ...]) -> bool:
    """Returns `value in items` with types compared too: Python's True equals 1, a configuration's true does not."""
    return any(type(value) is type(item) and value == item for item in items)


def torchtitan_key(key: str) -> TorchtitanKey | None:
    """Returns the entry of a dotted torchtitan key, or None if torchtitan does not have the key either."""
    if key in FORMER_NAMES:
        return None
    matching = (entry for pattern, entry in TORCHTITAN_KEYS.items() if fnmatchcase(key, pattern))
    return TORCHTITAN_KEYS.get(key) or next(matching, None)
