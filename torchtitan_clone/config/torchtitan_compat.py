"""The keys of torchtitan v0.2 that this package does not have, so that its TOML files load here.

A key is left out where its value changes nothing here: it means "off", or it tunes something that is off. Any other
value is an error that says why and what to do instead. This is the only place that knows of them.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

ANY = object()
"""Every value of the key is harmless."""


@dataclass(frozen=True)
class ForeignKey:
    """What becomes of one key, or of all that match a pattern."""

    otherwise: str
    """Why a value is refused, and what to do instead; where every value is harmless: why none matters."""
    harmless: tuple[Any, ...] = ()
    """Values that change nothing here."""
    tunes: str = ""
    """The key that switches on what this one tunes; while that one is off, every value is harmless."""

    def admits(self, value: Any, *, switch: Any) -> bool:
        """Whether the value may be left out without changing the run; `switch` is the value of the key in `tunes`."""
        if self.tunes and _is_one_of(switch, _SWITCHED_OFF):
            return True
        return ANY in self.harmless or _is_one_of(value, self.harmless)


_NO_FLOAT8 = "there is no quantized training here; remove the key and model.converters"
_NO_EXPERT = "there are no mixture-of-experts models yet; set it to 1"
_HELD_OUT = "validation reads the documents that data.held_out_fraction keeps from training; remove the key"
_LOADER = "the loader reads ahead by itself; remove the key, and set data.num_workers for streamed data"

FOREIGN_KEYS: dict[str, ForeignKey] = {
    "job.print_config": ForeignKey("every run writes its config.toml", (ANY,)),
    "job.print_args": ForeignKey("every run writes its config.toml", (ANY,)),
    "job.use_for_integration_test": ForeignKey("of use in torchtitan's own tests only", (ANY,)),
    "job.save_config_file": ForeignKey("every run writes config.toml into its folder; remove the key", ("",)),
    "job.custom_config_module": ForeignKey("options stand in config/schema.py; add a field there", ("",)),
    "experimental.*": ForeignKey("models and datasets are entered in MODELS and DATASETS; remove the key", ("",)),
    "metrics.save_for_all_ranks": ForeignKey("rank 0 writes values reduced over all ranks; set it to false", (False,)),
    "model.tokenizer_path": ForeignKey("set model.hf_assets_path to the folder that holds tokenizer.json"),
    "model.converters": ForeignKey("there is no quantized training here; set it to []", ([],)),
    "model.print_after_conversion": ForeignKey("there are no converters", (ANY,)),
    "quantize.*": ForeignKey(_NO_FLOAT8, (ANY,)),
    "float8.*": ForeignKey(_NO_FLOAT8, (ANY,)),
    "mx.*": ForeignKey(_NO_FLOAT8, (ANY,)),
    "memory_estimation.enable": ForeignKey("--dry-run prints what a run needs; set it to false", (False,)),
    "memory_estimation.disable_fake_mode": ForeignKey("there is no memory estimation; remove the key", (ANY,)),
    "optimizer.early_step_in_backward": ForeignKey("gradients are clipped before the step; set it to false", (False,)),
    "training.gc_debug": ForeignKey("the time of garbage collection is logged anyway; set it to false", (False,)),
    "training.dataloader.num_workers": ForeignKey("set data.num_workers instead", (0,)),
    "training.dataloader.*": ForeignKey(_LOADER, (False,)),
    "validation.dataloader.*": ForeignKey(_HELD_OUT, tunes="validation.enable"),
    "validation.dataset": ForeignKey(_HELD_OUT, tunes="validation.enable"),
    "validation.dataset_path": ForeignKey(_HELD_OUT, tunes="validation.enable"),
    "validation.seq_len": ForeignKey("validation uses training.seq_len; remove the key", tunes="validation.enable"),
    "parallelism.enable_compiled_autograd": ForeignKey("it is not supported; set it to false", (False,)),
    "parallelism.disable_loss_parallel": ForeignKey(
        "the loss is computed on shards of the vocabulary wherever matrices are split; set it to false", (False,)
    ),
    "parallelism.expert_parallel_degree": ForeignKey(_NO_EXPERT, (1,)),
    "parallelism.expert_tensor_parallel_degree": ForeignKey(_NO_EXPERT, (1,)),
    "parallelism.expert_parallel_comm_backend": ForeignKey(_NO_EXPERT, (ANY,)),
    "checkpoint.initial_load_in_hf_quantized": ForeignKey("quantized weights cannot be trained on", (False,)),
    "checkpoint.enable_ft_dataloader_checkpoints": ForeignKey(
        "the checkpoint of the whole run says which rows are done", (ANY,)
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ForeignKey(
        "every matrix multiplication whose output is kept is chosen by operation; remove the key",
        ([], ["moe.router.gate"]),
    ),
    "activation_checkpoint.early_stop": ForeignKey("it is not supported; set it to false", (False,)),
    "activation_checkpoint.memory_budget": ForeignKey("mode has no memory_budget here", (ANY,)),
    "activation_checkpoint.visualize_memory_budget_pareto": ForeignKey(
        "it is not supported; set it to false", (False,)
    ),
    "activation_checkpoint.preserve_rng_state": ForeignKey("no layer draws random numbers", (ANY,)),
    "activation_checkpoint.determinism_check": ForeignKey('it is not supported; set it to "default"', ("default",)),
    "activation_checkpoint.debug": ForeignKey("it is not supported; set it to false", (False,)),
    "comm.save_traces_file_prefix": ForeignKey("a report is named by its rank", (ANY,)),
    "fault_tolerance.should_quantize": ForeignKey("nothing is quantized between replica groups", (False,)),
    "debug.moe_force_load_balance": ForeignKey("there are no mixture-of-experts models yet; remove it", (False,)),
}

_SWITCHED_OFF = (None, False, 1)


def _is_one_of(value: Any, items: tuple[Any, ...]) -> bool:
    """`value in items`, but for Python true is 1 and 0 is false, and for a configuration they are not."""
    return any(type(value) is type(item) and value == item for item in items)


def foreign_key(key: str) -> ForeignKey | None:
    """The entry of a dotted key of torchtitan's, or None for a key that torchtitan does not have either."""
    return FOREIGN_KEYS.get(key) or next((FOREIGN_KEYS[name] for name in FOREIGN_KEYS if fnmatchcase(key, name)), None)
