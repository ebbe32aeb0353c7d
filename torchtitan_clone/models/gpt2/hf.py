"""GPT-2's format on the Hugging Face hub: keys of its own, and queries, keys and values in one transposed matrix."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torchtitan_clone.hub.formats import DecoderHub
from torchtitan_clone.hub.keys import ROPE_KEYS, Arguments, entry_of, read_arguments
from torchtitan_clone.hub.mapping import Rule, Rules, fused, same, transposed
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.gpt2 import GPT2Args

_PREFIX = "transformer."
_ACTIVATION = "activation_function"
_GELU = {"gelu_new": "tanh", "gelu": "none"}
_NORMS = {"norm": "ln_f", "layers.*.attention_norm": "h.*.ln_1", "layers.*.ffn_norm": "h.*.ln_2"}
_LINEAR = {"attention.wo": "attn.c_proj", "feed_forward.w1": "mlp.c_fc", "feed_forward.w2": "mlp.c_proj"}


def gpt2_rules(matrix: Callable[[str], Rule], *, output_dim: int, prefix: str = _PREFIX) -> Rules:
    """Returns the rules, given that of a matrix of the hub, whose dimension `output_dim` are output features."""
    attention = f"{prefix}h.*.attn.c_attn"
    rules = {
        "tok_embeddings.weight": same(f"{prefix}wte.weight"),
        "tok_embeddings.positions.weight": same(f"{prefix}wpe.weight"),
        "output.weight": same("lm_head.weight"),
    }
    for kind in ("weight", "bias"):
        rules |= {f"{ours}.{kind}": same(f"{prefix}{theirs}.{kind}") for ours, theirs in _NORMS.items()}
    for ours, theirs in _LINEAR.items():
        rules[f"layers.*.{ours}.weight"] = matrix(f"{prefix}h.*.{theirs}.weight")
        rules[f"layers.*.{ours}.bias"] = same(f"{prefix}h.*.{theirs}.bias")
    for index, name in enumerate(("wq", "wk", "wv")):
        rules[f"layers.*.attention.{name}.weight"] = fused(
            matrix(f"{attention}.weight"), dim=output_dim, index=index, count=3
        )
        rules[f"layers.*.attention.{name}.bias"] = fused(same(f"{attention}.bias"), dim=0, index=index, count=3)
    return rules


@dataclass(frozen=True, kw_only=True)
class GPT2Hub(DecoderHub):
    """GPT-2's format."""

    def of_folder(self, names: Iterable[str]) -> DecoderHub:
        """Returns the format; the first releases have the model without its output, whose names have no prefix."""
        is_bare = "wte.weight" in names
        return replace(self, rules=gpt2_rules(transposed, output_dim=1, prefix="")) if is_bare else self

    def is_leftover(self, name: str, *, args: ModelArgs) -> bool:
        """Returns whether a tensor is redundant: causal masks of old releases, or a tied output weight."""
        return name.endswith((".attn.bias", ".attn.masked_bias")) or super().is_leftover(name, args=args)

    def find_format_errors(self, args: ModelArgs) -> list[str]:
        rule = "gpt2 has biases in the Hugging Face format; set it to true, or neither import nor export weights in it"
        return [] if vars(args)["bias"] else [f"model.args.bias = false: {rule}"]

    def arguments(self, args: GPT2Args) -> Arguments:
        sizes = {name: getattr(args, name) for name in self.keys} | {"hidden_dim": args.ffn_hidden_dim}
        return sizes | {"gelu_approximation": args.gelu_approximation}

    def to_config(self, args: GPT2Args) -> dict[str, object]:
        sizes = {theirs: self.arguments(args)[ours] for ours, theirs in self.keys.items()}
        name = next(name for name, approximation in _GELU.items() if approximation == args.gelu_approximation)
        return {"architectures": [self.architecture], **self.fixed, **sizes, _ACTIVATION: name}

    def keys_read(self) -> set[str]:
        return super().keys_read() - ROPE_KEYS

    def read(self, given: Mapping[str, object]) -> Arguments:
        given = {**self.defaults, **given}
        values = read_arguments({name: key for name, key in self.keys.items() if key in given}, given)
        approximation = _GELU[entry_of(given, _ACTIVATION).choice(*_GELU)]
        return {"hidden_dim": 4 * values["dim"], **values, "gelu_approximation": approximation}


HUB = GPT2Hub(
    family="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={"model_type": "gpt2"},
    defaults={
        "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, _ACTIVATION: "gelu_new",
    },
    only={
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    },
    others=frozenset({_ACTIVATION}),
    # Of training, of classification, of the hub's first programs, and a former name of n_positions.
    without_effect=frozenset({
        "resid_pdrop", "embd_pdrop", "attn_pdrop", "gradient_checkpointing", "n_ctx", "n_special", "output_past",
        "predict_special_tokens", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
        "summary_type", "summary_use_proj",
    }),
    aliases={
        "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    keys={
        "dim": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "hidden_dim": "n_inner",
        "vocab_size": "vocab_size", "norm_eps": "layer_norm_epsilon", "max_seq_len": "n_positions",
        "tied_embeddings": "tie_word_embeddings",
    },
    rules=gpt2_rules(transposed, output_dim=1),
)  # fmt: skip
