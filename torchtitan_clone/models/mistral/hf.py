"""Mistral's formats on the Hugging Face hub: a window is one of all layers. Folders with images are read too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.formats import CONFIG_KEYS, DecoderHub
from torchtitan_clone.hub.keys import Arguments, entry_of, read_argument
from torchtitan_clone.hub.latent import LATENT_RULES, LATENT_SIZES, LatentHub
from torchtitan_clone.hub.mapping import DECODER_RULES, GATE_UP_RULES
from torchtitan_clone.hub.predicting import GROUPED_KEYS, N_DENSE, PREDICTING_RULES
from torchtitan_clone.hub.wrapped import WrappedHub
from torchtitan_clone.models.mistral.model import ROUTER, Mistral4Args, MistralArgs

_WINDOW, _QUERY_SCALE, _SHARE = "sliding_window", "llama_4_scaling_beta", "partial_rotary_factor"
_TABLES = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True, kw_only=True)
class MistralHub(WrappedHub):
    """The format of dense models."""

    window: int | None = 4096
    """Size of the windows where config.json has none; None: no windows."""

    def arguments(self, args: MistralArgs) -> Arguments:
        kind, *_ = args.layer_types
        return {**super().arguments(args), "layer_types": [kind], "window": args.window if kind == "window" else None}

    def to_config(self, args: MistralArgs) -> dict[str, object]:
        return {**super().to_config(args), _WINDOW: self.arguments(args)["window"]}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        entry = entry_of({_WINDOW: self.window, **given}, _WINDOW)
        if entry.value is None:
            return {**values, "layer_types": ["full"], "window": None}
        return {**values, "layer_types": ["window"], "window": read_argument("window", entry)}


@dataclass(frozen=True, kw_only=True)
class QueryScaledHub(DecoderHub):
    """The format of models whose table of rotary positions says how queries grow."""

    def rotary_share(self, values: Arguments) -> float:
        """Returns the share of a head's features that is rotated, which the table may state."""
        return 1.0

    def arguments(self, args: Any) -> Arguments:
        return {**super().arguments(args), "query_scale": args.query_scale}

    def to_config(self, args: Any) -> dict[str, object]:
        config, share = super().to_config(args), self.rotary_share(self.arguments(args))
        more = {_QUERY_SCALE: args.query_scale} | ({_SHARE: share} if share != 1.0 else {})
        return config | {key: {**entry_of(config, key).plain_entries(), **more} for key in _TABLES}

    def read(self, given: Mapping[str, object]) -> Arguments:
        key = next((key for key in _TABLES if given.get(key)), None)
        entries = entry_of(given, key).entries() if key else {}
        if key is None or _QUERY_SCALE not in entries:
            raise ConfigError(f"config.json: {key or _TABLES[1]} has no {_QUERY_SCALE}, which {self.family} needs")
        own = {_QUERY_SCALE, _SHARE, "max_position_embeddings"}  # the last is without effect
        values = super().read({**given, key: {name: each.value for name, each in entries.items() if name not in own}})
        if not values["rope_scaling"] or values["rope_scaling"]["rope_type"] != "yarn":
            entry_of(given, key).refuse(f'{self.family} supports only the type "yarn"')
        share = self.rotary_share(values)
        if _SHARE in entries and entries[_SHARE].value not in (None, share):
            entries[_SHARE].refuse(f"{self.family} rotates {share} of a head with these sizes")
        return {**values, "query_scale": entries[_QUERY_SCALE].number(low=0.0)}


@dataclass(frozen=True, kw_only=True)
class Ministral3Hub(QueryScaledHub, MistralHub):
    """Ministral 3's format."""


@dataclass(frozen=True, kw_only=True)
class Mistral4Hub(QueryScaledHub, WrappedHub, LatentHub):
    """Mistral 4's format."""

    def rotary_share(self, values: Arguments) -> float:
        return values["qk_rope_head_dim"] / (values["qk_nope_head_dim"] + values["qk_rope_head_dim"])

    def arguments(self, args: Mistral4Args) -> Arguments:
        return {**super().arguments(args), "n_dense_layers": args.n_dense_layers}

    def to_config(self, args: Mistral4Args) -> dict[str, object]:
        return {**super().to_config(args), N_DENSE: args.n_dense_layers, "head_dim": args.latent_sizes.qk}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        size = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        if given.get("head_dim", size) != size:  # which transformers takes the share of
            entry_of(given, "head_dim").refuse(f"must be qk_nope_head_dim + qk_rope_head_dim = {size}")
        return {**values, "n_dense_layers": entry_of({N_DENSE: 0, **given}, N_DENSE).integer(low=0, high=1024)}


_WRAPPED: Arguments = {
    "wrapper": "mistral3",
    "wrapper_keys": frozenset(
        {
            "image_token_id", "image_token_index", "multimodal_projector_bias", "projector_hidden_act",
            "spatial_merge_size", "vision_feature_layer",
        }
    ),
    "image_tensors": ("vision_tower.", "multi_modal_projector."),
}  # fmt: skip
_DEFAULTS: Arguments = {"tie_word_embeddings": False, "num_key_value_heads": 8}
_DENSE: Arguments = {
    "keys": {**CONFIG_KEYS, "head_dim": "head_dim"},
    "others": frozenset({_WINDOW}),
    "nulls": {_WINDOW: None},
    **_WRAPPED,
}
HUB = MistralHub(
    family="mistral",
    architecture="MistralForCausalLM",
    fixed={"model_type": "mistral", "hidden_act": "silu"},
    defaults={**_DEFAULTS, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072},
    **_DENSE,
)
MINISTRAL3_HUB = Ministral3Hub(
    family="ministral3",
    architecture="Ministral3ForCausalLM",
    fixed={"model_type": "ministral3", "hidden_act": "silu"},
    defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "head_dim": 128},
    window=None,
    **_DENSE,
)
MISTRAL4_HUB = Mistral4Hub(
    family="mistral4",
    architecture="Mistral4ForCausalLM",
    fixed={
        "model_type": "mistral4", "hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True,
        "rope_interleave": True,
    },
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576, "tie_word_embeddings": False, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    },
    others=frozenset({N_DENSE}),
    # What transformers derives from the sizes of heads.
    without_effect=frozenset({"head_dim", "qk_head_dim"}),
    nulls={"n_group": 1, "topk_group": 1, "q_lora_rank": None},
    aliases={"num_local_experts": "n_routed_experts"},
    keys={**CONFIG_KEYS, **LATENT_SIZES},
    rules={**DECODER_RULES, **PREDICTING_RULES, **GATE_UP_RULES, **LATENT_RULES},
    moe=ROUTER,
    moe_keys=GROUPED_KEYS,
    **_WRAPPED,
)  # fmt: skip
