"""Llama 4's format on the Hugging Face hub: Llama4ForCausalLM. Imports the text model of the published folders."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.hub.formats import CONFIG_KEYS, MoEHub
from torchtitan_clone.hub.keys import Arguments
from torchtitan_clone.hub.mapping import DECODER_RULES, Rules, rotary_rows, stacked_expert_rules, swiglu_rules
from torchtitan_clone.hub.wrapped import WrappedHub
from torchtitan_clone.models.llama4.model import ROUTER, Llama4Args

_MLP = "model.layers.*.feed_forward"


@dataclass(frozen=True, kw_only=True)
class Llama4Hub(WrappedHub, MoEHub):
    """Llama 4's format. Kinds of layers are given as numbers, and may be listed too."""

    def rules_of(self, args: Llama4Args) -> Rules:
        rotary = {
            f"layers.*.attention.{ours}.weight": rotary_rows(
                f"model.layers.*.self_attn.{theirs}.weight", plain=0, rotary=args.head_dim
            )
            for ours, theirs in {"wq": "q_proj", "wk": "k_proj"}.items()
        }
        return {**self.rules, **rotary}

    def to_config(self, args: Llama4Args) -> dict[str, object]:
        return super().to_config(args) | _lists(args) | {"attn_temperature_tuning": args.query_scale > 0}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        tuning = Value(given.get("attn_temperature_tuning", True), where="config.json: attn_temperature_tuning")
        # The first releases have a number.
        is_tuned = tuning.value > 0 if type(tuning.value) is int else tuning.flag()
        counts = {name: values[name] for name in ("n_layers", "moe_every", "full_every")}
        for key, wanted in _lists(Llama4Args(**counts)).items():
            if given.get(key, wanted) not in (wanted, []):
                rule = f"llama4 supports only {shorten(repr(wanted))} here"
                raise DocumentError(f"config.json: {key} = {shorten(repr(given[key]))}, and {rule}")
        return values | {"query_scale": values["query_scale"] if is_tuned else 0.0}


def _lists(args: Llama4Args) -> dict[str, list[object]]:
    """Returns the entries that list what layers are."""
    is_full = [args.is_full(layer) for layer in range(args.n_layers)]
    return {
        "moe_layers": [layer for layer in range(args.n_layers) if args.has_experts(layer)],
        "no_rope_layers": [int(not full) for full in is_full],
        "layer_types": ["full_attention" if full else "chunked_attention" for full in is_full],
    }


HUB = Llama4Hub(
    family="llama4",
    architecture="Llama4ForCausalLM",
    wrapper="llama4",
    wrapper_keys=frozenset(
        {
            "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id", "image_token_index",
        }
    ),
    image_tensors=("vision_model.", "multi_modal_projector."),
    fixed={"model_type": "llama4_text", "hidden_act": "silu", "attention_bias": False},
    only={"router_jitter_noise": 0.0},
    others=frozenset({"attn_temperature_tuning", "layer_types", "moe_layers", "no_rope_layers"}),
    without_effect=frozenset({"for_llm_compressor"}),
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": False, "head_dim": 128,
        "rope_theta": 500000.0, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192, "floor_scale": 8192, "use_qk_norm": True, "attn_scale": 0.1,
        "num_key_value_heads": 8,
    },
    keys={
        **CONFIG_KEYS, "hidden_dim": "intermediate_size_mlp", "head_dim": "head_dim",
        "moe_every": "interleave_moe_layer_step", "full_every": "no_rope_layer_interval",
        "chunk": "attention_chunk_size", "query_scale": "attn_scale", "query_scale_floor": "floor_scale",
        "qk_norm": "use_qk_norm",
    },
    rules={
        **DECODER_RULES,
        **swiglu_rules("layers.*.feed_forward", _MLP),
        **swiglu_rules("layers.*.feed_forward.shared_experts", f"{_MLP}.shared_expert"),
        **stacked_expert_rules(_MLP, interleaved=False),
    },
    moe=ROUTER,
    moe_keys={"num_experts": "num_local_experts", "top_k": "num_experts_per_tok", "hidden_dim": "intermediate_size"},
)  # fmt: skip
