"""The formats of Qwen3.5 and Qwen3-Next on the Hugging Face hub; of published folders, the text model is imported."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torchtitan_clone.hub.formats import DecoderHub, MoEHub
from torchtitan_clone.hub.hybrid import HYBRID_KEYS, HybridHub
from torchtitan_clone.hub.keys import Arguments, entry_of
from torchtitan_clone.hub.mapping import (
    DECODER_RULES,
    EXPERT_RULES,
    GATE_UP_RULES,
    QK_NORM_RULES,
    Rule,
    Rules,
    channels,
    of_heads,
    rows,
    same,
    swiglu_rules,
)
from torchtitan_clone.hub.wrapped import WrappedHub
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.delta_net import DeltaSizes
from torchtitan_clone.models.qwen3_5.model import ROUTER, GatedHybridArgs, Qwen3_5MoEArgs
from torchtitan_clone.ops.tensor_slices import TensorSlice

_LINEAR = "model.layers.*.linear_attn"
_CONV = f"{_LINEAR}.conv1d.weight"
_FULL = "model.layers.*.self_attn"
_MLP = "model.layers.*.mlp"
_WRAPPED = "model.language_model."
_PREDICTION = "mtp."
_SHARED = "shared_expert_intermediate_size"
_RULES: Rules = {
    **DECODER_RULES,
    "layers.*.attention.decay.A_log": same(f"{_LINEAR}.A_log"),
    "layers.*.attention.decay.dt_bias": same(f"{_LINEAR}.dt_bias"),
    "layers.*.attention.norm.weight": same(f"{_LINEAR}.norm.weight"),
    "layers.*.attention.wo.weight": same(f"{_LINEAR}.out_proj.weight"),
    **QK_NORM_RULES,
}


@dataclass(frozen=True, kw_only=True)
class GatedHub(HybridHub):
    """A format in which q and gates of full attention are one tensor, and q, k and v of the convolutions."""

    projections: Callable[[DeltaSizes], Rules]
    """Returns the rules of the matrices of linear attention by their names in it."""

    def rules_of(self, args: GatedHybridArgs) -> Rules:
        sizes = args.delta_sizes
        convolutions = zip(("q_conv", "k_conv", "v_conv"), _thirds(channels(_CONV), sizes), strict=True)
        own = {**dict(convolutions), **self.projections(sizes)}
        linear = {f"layers.*.attention.{ours}.weight": rule for ours, rule in own.items()}
        full = {
            f"layers.{layer}.attention.{ours}.weight": rule
            for layer in range(args.n_layers)
            if not args.is_linear(layer)
            for ours, rule in _full_rules(args.head_dim).items()
        }
        return {**self.rules, **linear, **full}

    def is_leftover(self, name: str, *, args: ModelArgs) -> bool:
        return name.startswith(_PREDICTION) or super().is_leftover(name, args=args)

    def describe_leftovers(self, names: Iterable[str], *, args: ModelArgs) -> list[str]:
        names = list(names)
        count = sum(name.startswith(_PREDICTION) for name in names)
        what = f"leaves out the {count} tensors of {_PREDICTION}*, which predict tokens after the next one"
        return super().describe_leftovers(names, args=args) + ([what] if count else [])


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Hub(WrappedHub, GatedHub):
    """Qwen3.5's format; in folders with images names of tensors have another prefix."""

    def prefix(self, config: Mapping[str, object]) -> str:
        return _WRAPPED if "text_config" in config else ""

    def slices(
        self, tensors: Mapping[str, Sequence[int]], *, args: Any, prefix: str = ""
    ) -> dict[str, list[TensorSlice]]:
        found = super().slices(tensors, args=args)
        if not prefix:
            return found
        return {
            name: [replace(part, source=re.sub(r"^model\.", prefix, part.source)) for part in parts]
            for name, parts in found.items()
        }


@dataclass(frozen=True, kw_only=True)
class GatedMoEHub(GatedHub, MoEHub):
    """A format with experts; it has the size of the shared one, not how many of the others it is as large as."""

    def to_config(self, args: Qwen3_5MoEArgs) -> dict[str, object]:
        return super().to_config(args) | {_SHARED: args.moe.num_shared_experts * args.moe.hidden_dim}

    def read(self, given: Mapping[str, object]) -> Arguments:
        values = super().read(given)
        moe = values["moe"]
        count, rest = divmod(moe["num_shared_experts"], moe["hidden_dim"])
        if rest:
            rule = f"must be a multiple of moe_intermediate_size {moe['hidden_dim']}"
            entry_of(given, _SHARED).refuse(rule)
        return values | {"moe": moe | {"num_shared_experts": count}}


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoEHub(Qwen3_5Hub, GatedMoEHub):
    """Qwen3.5's format with experts: published folders stack them, and transformers writes them one by one."""

    def of_folder(self, names: Iterable[str]) -> DecoderHub:
        is_stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
        return replace(self, rules={**self.rules, **GATE_UP_RULES}) if is_stacked else self


def _projections(sizes: DeltaSizes) -> Rules:
    """Returns Qwen3.5's rules: q, k and v are one tensor."""
    own = {"wg": "z", "wb": "b", "wa": "a"}
    qkv = zip(("wq", "wk", "wv"), _thirds(same(f"{_LINEAR}.in_proj_qkv.weight"), sizes), strict=True)
    return {**dict(qkv), **{ours: same(f"{_LINEAR}.in_proj_{theirs}.weight") for ours, theirs in own.items()}}


def _next_projections(sizes: DeltaSizes) -> Rules:
    """Returns Qwen3-Next's rules: the rows of all matrices are in two tensors, by head of keys."""
    heads = sizes.value_heads // sizes.key_heads
    qkvz = {"wq": sizes.key, "wk": sizes.key, "wv": heads * sizes.value, "wg": heads * sizes.value}
    return {**_grouped("qkvz", qkvz), **_grouped("ba", {"wb": heads, "wa": heads})}


def _thirds(rule: Rule, sizes: DeltaSizes) -> list[Rule]:
    """Returns the rules of q, k and v, which are the rows of one tensor."""
    keys, values = sizes.key_heads * sizes.key, sizes.value_heads * sizes.value
    return [rows(rule, first=first, total=2 * keys + values) for first in (0, keys, 2 * keys)]


def _grouped(name: str, count: Mapping[str, int]) -> Rules:
    """Returns the rules of matrices that have so many rows of each head of keys, one after another."""
    source, total = f"{_LINEAR}.in_proj_{name}.weight", sum(count.values())
    firsts = accumulate(count.values(), initial=0)
    return {
        ours: of_heads(source, size=size, first=first, total=total)
        for (ours, size), first in zip(count.items(), firsts, strict=False)
    }


def _full_rules(head_dim: int) -> Rules:
    """Returns the rules of matrices of full attention, whose names those of linear attention have too."""
    plain = {"wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    queries = {
        ours: of_heads(f"{_FULL}.q_proj.weight", size=head_dim, first=first, total=2 * head_dim)
        for ours, first in (("wq", 0), ("wg", head_dim))
    }
    return queries | {ours: same(f"{_FULL}.{theirs}.weight") for ours, theirs in plain.items()}


_OF_TEXT = {"hidden_act": "silu", "attention_bias": False}
_DEFAULTS = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False, "head_dim": 256,
    "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_QWEN3_5: Arguments = {
    "wrapper_keys": frozenset({"image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id"}),
    "image_tensors": ("model.visual.",),
    "is_partly_rotary": True,
    "projections": _projections,
    "without_effect": frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
}
_ONLY = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
HUB = Qwen3_5Hub(
    family="qwen3_5",
    architecture="Qwen3_5ForCausalLM",
    wrapper="qwen3_5",
    fixed={"model_type": "qwen3_5_text", **_OF_TEXT},
    only=_ONLY,
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    keys=HYBRID_KEYS,
    rules=_RULES,
    **_QWEN3_5,
)

# Every layer has experts.
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
_MOE: Arguments = {
    "defaults": {**_DEFAULTS, "num_key_value_heads": 2},
    "keys": {ours: theirs for ours, theirs in HYBRID_KEYS.items() if ours != "hidden_dim"},
    "moe": ROUTER,
    "moe_keys": {
        "num_experts": "num_experts", "top_k": "num_experts_per_tok", "hidden_dim": "moe_intermediate_size",
        "num_shared_experts": _SHARED,
    },
    "rules": {
        **_RULES, **EXPERT_RULES, **swiglu_rules("layers.*.feed_forward.shared_experts", f"{_MLP}.shared_expert"),
        "layers.*.feed_forward.shared_gate.weight": same(f"{_MLP}.shared_expert_gate.weight"),
    },
}  # fmt: skip
MOE_HUB = Qwen3_5MoEHub(
    family="qwen3_5_moe",
    architecture="Qwen3_5MoeForCausalLM",
    wrapper="qwen3_5_moe",
    fixed={"model_type": "qwen3_5_moe_text", **_OF_TEXT},
    only={**_ONLY, **_EVERY_LAYER},
    **_QWEN3_5,
    **_MOE,
)
NEXT_HUB = GatedMoEHub(
    family="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    projections=_next_projections,
    is_partly_rotary=True,
    fixed={"model_type": "qwen3_next", **_OF_TEXT, **_EVERY_LAYER},
    only={"use_sliding_window": False},
    without_effect=frozenset({"intermediate_size"}),  # of layers without experts
    **_MOE,
)
