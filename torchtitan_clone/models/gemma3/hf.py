"""Gemma 3's format on the Hugging Face hub: Gemma3ForCausalLM. Imports the text model of folders with images too."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.documents import Value
from torchtitan_clone.hub.formats import CONFIG_KEYS
from torchtitan_clone.hub.keys import Arguments, entry_of
from torchtitan_clone.hub.layered import LayeredRopeHub
from torchtitan_clone.hub.mapping import DECODER_RULES, QK_NORM_RULES, same
from torchtitan_clone.hub.wrapped import WrappedHub
from torchtitan_clone.models.gemma3 import Gemma3Args

_LOCAL, _EVERY = "rope_local_base_freq", "sliding_window_pattern"
_NORMS = {
    "attention_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffn_norm": "post_feedforward_layernorm",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gemma3Hub(WrappedHub, LayeredRopeHub):
    """Gemma 3's format: releases say by a number which layers are full, and have a second theta."""

    def arguments(self, args: Gemma3Args) -> Arguments:
        return {**super().arguments(args), "window_rope_theta": args.window_rope_theta}

    def to_config(self, args: Gemma3Args) -> dict[str, object]:
        return {**super().to_config(args), _LOCAL: args.window_rope_theta}

    def read(self, given: Mapping[str, object]) -> Arguments:
        count, every = (
            entry_of({**self.defaults, **given}, key).integer(low=1) for key in ("num_hidden_layers", _EVERY)
        )
        types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(count)]
        return super().read({"layer_types": types, **given})

    def read_window_rope(self, sliding: Value, *, theta: float, given: Mapping[str, object]) -> Arguments:
        entries = sliding.entries()
        found = entries.pop("rope_theta", entry_of({**self.defaults, **given}, _LOCAL))
        if {key: entry.value for key, entry in entries.items()} not in ({}, {"rope_type": "default"}):
            sliding.refuse("gemma3 supports no scaling here")
        return {"window_rope_theta": found.number(low=1.0)}


HUB = Gemma3Hub(
    family="gemma3",
    architecture="Gemma3ForCausalLM",
    wrapper="gemma3",
    wrapper_keys=frozenset(
        {
            "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id", "image_token_index",
            "mm_tokens_per_image",
        }
    ),
    image_tensors=("vision_tower.", "multi_modal_projector."),
    fixed={"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "tie_word_embeddings": True, "head_dim": 256,
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 262208, "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0, _LOCAL: 10000.0, _EVERY: 6,
    },
    only={"use_bidirectional_attention": False, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    keys={**CONFIG_KEYS, "head_dim": "head_dim", "query_size": "query_pre_attn_scalar"},
    others=frozenset({_LOCAL, _EVERY}),
    without_effect=frozenset({f"_{_EVERY}"}),
    pattern=("full",),
    window=4096,
    rules={
        **DECODER_RULES, **QK_NORM_RULES,
        **{f"layers.*.{ours}.weight": same(f"model.layers.*.{theirs}.weight") for ours, theirs in _NORMS.items()},
    },
)  # fmt: skip
