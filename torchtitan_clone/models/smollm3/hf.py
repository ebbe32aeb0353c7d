"""SmolLM3's format on the Hugging Face hub: layers with rotary positions are given as a number and as a list."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_clone.documents import shorten
from torchtitan_clone.hub.formats import CONFIG_KEYS, DecoderHub
from torchtitan_clone.hub.keys import Arguments, entry_of
from torchtitan_clone.models.smollm3 import SmolLM3Args

_LIST = "no_rope_layers"
"""1 where a layer has rotary positions, whatever the name says."""


@dataclass(frozen=True, kw_only=True)
class SmolLM3Hub(DecoderHub):
    """SmolLM3's format."""

    def to_config(self, args: SmolLM3Args) -> dict[str, object]:
        rotary = [int(args.has_rope(layer)) for layer in range(args.n_layers)]
        # transformers has the release's token where none is given, which may be outside of the vocabulary.
        return {**super().to_config(args), _LIST: rotary, "pad_token_id": None}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        args = SmolLM3Args(n_layers=values["n_layers"], no_rope_every=values["no_rope_every"])
        wanted = [int(args.has_rope(layer)) for layer in range(args.n_layers)]
        if given.get(_LIST, wanted) != wanted:
            every = f"no_rope_layer_interval = {args.no_rope_every}"
            entry_of(given, _LIST).refuse(f"smollm3 supports only {shorten(repr(wanted))} with {every}")
        return values


HUB = SmolLM3Hub(
    family="smollm3",
    architecture="SmolLM3ForCausalLM",
    fixed={
        "model_type": "smollm3", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "use_sliding_window": False,
    },
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": True, "num_key_value_heads": 4,
        "rope_theta": 2000000.0, "no_rope_layer_interval": 4,
    },
    keys={**CONFIG_KEYS, "no_rope_every": "no_rope_layer_interval"},
    others=frozenset({_LIST}),
    # Unused, since use_sliding_window is false.
    without_effect=frozenset({"sliding_window", "max_window_layers"}),
)  # fmt: skip
