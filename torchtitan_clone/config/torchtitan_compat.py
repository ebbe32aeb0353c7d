"""Keys of torchtitan v0.2 that this package does not have, so that torchtitan's TOML files load here.

A key is ignored if its value has no effect here: it means "off", or it tunes a feature that is off. Every other value
is an error that states the reason and the remedy. No other module knows these keys.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

ANY_VALUE = object()
"""Marks a key that has no effect here, whatever its value."""


@dataclass(frozen=True)
class TorchtitanKey:
    """How to treat one key, or all keys that match a pattern."""

    reason: str
    """Why a value is an error and what to do instead; for a key without effect: why it has none."""
    harmless: tuple[object, ...] = ()
    """Values that have no effect here."""
    tunes: str = ""
    """Key that enables the feature which this key tunes; while it is off, every value is harmless."""

    def is_harmless(self, value: object, *, switch: object) -> bool:
        """Returns whether ignoring the value does not change the run; `switch` is the value of the key in `tunes`."""
        if self.tunes and _is_one_of(switch, _SWITCHED_OFF):
            return True
        return ANY_VALUE in self.harmless or _is_one_of(value, self.harmless)


_NO_FLOAT8 = "quantized training is not supported; remove the key and model.converters"
_NO_EXPERT = "mixture-of-experts models are not supported; set it to 1"
_HELD_OUT = "validation uses the documents that data.held_out_fraction holds out; remove the key"
_LOADER = "the loader prefetches automatically; remove the key, and set data.num_workers for streamed data"

TORCHTITAN_KEYS: dict[str, TorchtitanKey] = {
    "job.print_config": TorchtitanKey("every run writes its config.toml", (ANY_VALUE,)),
    "job.print_args": TorchtitanKey("every run writes its config.toml", (ANY_VALUE,)),
    "job.use_for_integration_test": TorchtitanKey("used only by torchtitan's own tests", (ANY_VALUE,)),
    "job.save_config_file": TorchtitanKey("every run writes config.toml into its folder; remove the key", ("",)),
    "job.custom_config_module": TorchtitanKey(
        "options are defined in config/schema.py; add a field there and remove the key", ("",)
    ),
    "experimental.*": TorchtitanKey("models and datasets are registered in MODELS and DATASETS; remove the key", ("",)),
    "metrics.save_for_all_ranks": TorchtitanKey(
        "rank 0 writes values reduced over all ranks; set it to false", (False,)
    ),
    "model.tokenizer_path": TorchtitanKey("set model.hf_assets_path to the folder that holds tokenizer.json"),
    "model.converters": TorchtitanKey("quantized training is not supported; set it to []", ([],)),
    "model.print_after_conversion": TorchtitanKey("model converters are not supported", (ANY_VALUE,)),
    "quantize.*": TorchtitanKey(_NO_FLOAT8, (ANY_VALUE,)),
    "float8.*": TorchtitanKey(_NO_FLOAT8, (ANY_VALUE,)),
    "mx.*": TorchtitanKey(_NO_FLOAT8, (ANY_VALUE,)),
    "memory_estimation.enable": TorchtitanKey(
        "--comm.mode=fake_backend prints the memory estimate; set it to false", (False,)
    ),
    "memory_estimation.disable_fake_mode": TorchtitanKey(
        "--comm.mode=fake_backend prints the memory estimate", (ANY_VALUE,)
    ),
    "optimizer.early_step_in_backward": TorchtitanKey(
        "gradients are clipped before the optimizer step; set it to false", (False,)
    ),
    "training.gc_debug": TorchtitanKey("garbage collection time is always logged; set it to false", (False,)),
    "training.dataloader.num_workers": TorchtitanKey("set data.num_workers instead", (0,)),
    "training.dataloader.*": TorchtitanKey(_LOADER, (False,)),
    "validation.dataloader.*": TorchtitanKey(_HELD_OUT, tunes="validation.enable"),
    "validation.dataset": TorchtitanKey(_HELD_OUT, tunes="validation.enable"),
    "validation.dataset_path": TorchtitanKey(_HELD_OUT, tunes="validation.enable"),
    "validation.seq_len": TorchtitanKey("validation uses training.seq_len; remove the key", tunes="validation.enable"),
    "parallelism.enable_compiled_autograd": TorchtitanKey("it is not supported; set it to false", (False,)),
    "parallelism.disable_loss_parallel": TorchtitanKey(
        "tensor parallelism always computes the loss on vocabulary shards; set it to false", (False,)
    ),
    "parallelism.expert_parallel_degree": TorchtitanKey(_NO_EXPERT, (1,)),
    "parallelism.expert_tensor_parallel_degree": TorchtitanKey(_NO_EXPERT, (1,)),
    "parallelism.expert_parallel_comm_backend": TorchtitanKey(_NO_EXPERT, (ANY_VALUE,)),
    "checkpoint.initial_load_in_hf_quantized": TorchtitanKey(
        "quantized weights are not supported; set it to false", (False,)
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": TorchtitanKey(
        "the checkpoint of the run stores the data position of all replica groups", (ANY_VALUE,)
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": TorchtitanKey(
        "selective checkpointing selects matrix products by operation; remove the key",
        ([], ["moe.router.gate"]),
    ),
    "activation_checkpoint.early_stop": TorchtitanKey("it is not supported; set it to false", (False,)),
    "activation_checkpoint.memory_budget": TorchtitanKey("the mode memory_budget is not supported", (ANY_VALUE,)),
    "activation_checkpoint.visualize_memory_budget_pareto": TorchtitanKey(
        "it is not supported; set it to false", (False,)
    ),
    "activation_checkpoint.preserve_rng_state": TorchtitanKey("no layer uses random numbers", (ANY_VALUE,)),
    "activation_checkpoint.determinism_check": TorchtitanKey('it is not supported; set it to "default"', ("default",)),
    "activation_checkpoint.debug": TorchtitanKey("it is not supported; set it to false", (False,)),
    "comm.save_traces_file_prefix": TorchtitanKey("hang reports are named by rank", (ANY_VALUE,)),
    "fault_tolerance.should_quantize": TorchtitanKey(
        "gradients are not quantized between replica groups; set it to false", (False,)
    ),
    "debug.moe_force_load_balance": TorchtitanKey(
        "mixture-of-experts models are not supported; remove the key", (False,)
    ),
}

_SWITCHED_OFF = (None, False, 1)


def _is_one_of(value: object, items: tuple[object, ...]) -> bool:
    """Returns `value in items` with types compared too: Python's True equals 1, a configuration's true does not."""
    return any(type(value) is type(item) and value == item for item in items)


def torchtitan_key(key: str) -> TorchtitanKey | None:
    """Returns the entry of a dotted torchtitan key, or None if torchtitan does not have the key either."""
    matching = (entry for pattern, entry in TORCHTITAN_KEYS.items() if fnmatchcase(key, pattern))
    return TORCHTITAN_KEYS.get(key) or next(matching, None)
