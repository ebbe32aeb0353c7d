"""OLMo hybrid's format on the Hugging Face hub: OlmoHybridForCausalLM."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torchtitan_clone.documents import DocumentError, shorten
from torchtitan_clone.hub.formats import DecoderHub
from torchtitan_clone.hub.hybrid import HYBRID_KEYS, HybridHub
from torchtitan_clone.hub.keys import ROPE_KEYS, Arguments, entry_of
from torchtitan_clone.hub.mapping import DECODER_RULES, QK_NORM_RULES, Rule, Rules, channels, same
from torchtitan_clone.models.delta_net import DeltaSizes
from torchtitan_clone.models.olmo_hybrid import OlmoHybridArgs
from torchtitan_clone.ops.tensor_slices import TensorSlice

_LAYER = "model.layers.*"
_LINEAR = f"{_LAYER}.linear_attn"
_OURS = "layers.*.attention"
_RULES: Rules = {
    **DECODER_RULES,
    **QK_NORM_RULES,
    **{f"{_OURS}.{name}_conv.weight": channels(f"{_LINEAR}.{name}_conv1d.weight") for name in "qkv"},
    f"{_OURS}.wa.weight": same(f"{_LINEAR}.a_proj.weight"),
    f"{_OURS}.wb.weight": same(f"{_LINEAR}.b_proj.weight"),
    f"{_OURS}.wg.weight": same(f"{_LINEAR}.g_proj.weight"),
    f"{_OURS}.decay.A_log": same(f"{_LINEAR}.A_log"),
    f"{_OURS}.decay.dt_bias": same(f"{_LINEAR}.dt_bias"),
    f"{_OURS}.norm.weight": same(f"{_LINEAR}.o_norm.weight"),
}
_POST_ATTENTION = "post_attention_layernorm"
_NAMES = {"attention_norm": "attention_layer_norm", "ffn_norm": "feedforward_layer_norm"} | {
    f"attention.w{name}": f"linear_attn.{name}_proj" for name in "qkvo"
}
"""Of layers with linear attention."""


@dataclass(frozen=True, kw_only=True)
class OlmoHybridHub(HybridHub):
    """OLMo hybrid's format, whose names differ by the type of a layer.

    transformers 5 joins the weights of convolutions, and writes equal thirds of them as those of q, k and v. It writes
    the norm after full attention by the name of the norm before a feed-forward.
    """

    is_rewritten: bool = False
    """Whether transformers wrote the folder."""

    def of_folder(self, names: Iterable[str]) -> DecoderHub:
        return replace(self, is_rewritten=not any(name.endswith(f".{_POST_ATTENTION}.weight") for name in names))

    def rules_of(self, args: OlmoHybridArgs) -> Rules:
        after_attention = _NAMES["ffn_norm"] if self.is_rewritten else _POST_ATTENTION
        of_full = {"attention_norm": after_attention, "ffn_norm": "post_feedforward_layernorm"}
        own = {
            f"layers.{layer}.{ours}.weight": same(f"{_LAYER}.{theirs}.weight")
            for layer in range(args.n_layers)
            for ours, theirs in (_NAMES if args.is_linear(layer) else of_full).items()
        }
        return {**self.rules, **own, **(_rewritten_convolutions(args.delta_sizes) if self.is_rewritten else {})}

    def arguments(self, args: OlmoHybridArgs) -> Arguments:
        return {name: value for name, value in super().arguments(args).items() if name not in ROPE_KEYS}

    def to_config(self, args: OlmoHybridArgs) -> dict[str, object]:
        others = {key: value for key, value in super().to_config(args).items() if key not in {*ROPE_KEYS, "head_dim"}}
        # By default transformers pads with a token of the releases' vocabulary.
        return {**others, "rope_parameters": {"rope_type": "default", "rope_theta": None}, "pad_token_id": None}

    def _rope(self, given: Mapping[str, object], *, head_dim: int) -> Arguments:
        """Returns no arguments: where rope_theta is absent, transformers rotates by 10000."""
        table = entry_of({"rope_parameters": {}, **given}, "rope_parameters").plain_entries()
        beside = {key: given[key] for key in ROPE_KEYS - {"rope_parameters"} if given.get(key)}
        if beside or table.get("rope_theta", 1.0) is not None:
            rule = f"rope_theta must be null there: {self.family} has no rotary positions, as the releases"
            raise DocumentError(f"config.json: rope_parameters = {shorten(repr(table))}: {rule}")
        return {}


def _rewritten_convolutions(sizes: DeltaSizes) -> Rules:
    """Returns the rules of convolutions as the rows of tensors of equal size, one after another."""
    keys, values = sizes.key_heads * sizes.key, sizes.value_heads * sizes.value
    firsts = {"q": 0, "k": keys, "v": 2 * keys}
    return {f"{_OURS}.{name}_conv.weight": _from_row(first, total=2 * keys + values) for name, first in firsts.items()}


def _from_row(first: int, *, total: int) -> Rule:
    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        size, parts = -(-total // 3), list[TensorSlice]()
        for name, begin in zip("qkv", range(0, total, size), strict=True):
            end = min(begin + size, total)
            start, stop = max(first, begin), min(first + shape[0], end)
            if start < stop:
                of, to = slice(start - begin, stop - begin), slice(start - first, stop - first)
                source = f"{_LINEAR}.{name}_conv1d.weight"
                parts.append(TensorSlice(source=source, shape=(end - begin, 1, *shape[1:]), of=(of, 0), to=(to,)))
        return parts

    return slices


HUB = OlmoHybridHub(
    family="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    fixed={"model_type": "olmo_hybrid", "hidden_act": "silu", "attention_bias": False},
    only={"full_attention_interval": 4},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 65536, "tie_word_embeddings": False,
        "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
    },
    # Of first values.
    without_effect=frozenset(
        {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
    ),
    keys={
        **{ours: theirs for ours, theirs in HYBRID_KEYS.items() if ours != "head_dim"},
        "negative_eigenvalues": "linear_allow_neg_eigval",
    },
    rules=_RULES,
)  # fmt: skip
