"""GPT-2 and its sizes, and the models of nanoGPT: learned positions, LayerNorm, GELU, and biases or none.

Source: Language Models are Unsupervised Multitask Learners, OpenAI, 2019.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import AttentionOptions, ComposedArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Heads, Hidden, Layers, Vocabulary, Width
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.plan import ColwiseGather, Styles, learned_position_styles
from torchtitan_clone.models.spec import ModelSpec, initial_std
from torchtitan_clone.ops.layers import GELUApproximation, GELUFeedForward, LayerNorm


@dataclass(frozen=True, kw_only=True)
class GPT2Args(DividedHeads, ComposedArgs):
    """Arguments of GPT-2; `max_seq_len` is the number of learned positions."""

    learns_positions: ClassVar[bool] = True
    dim: Width = 768
    n_layers: Layers = 12
    n_heads: Heads = 12
    hidden_dim: Hidden | None = None
    """Hidden size of the feed-forward; unset: 4 dim."""
    vocab_size: Vocabulary = 50257
    max_seq_len: Size = 1024
    tied_embeddings: bool = True
    bias: bool = True
    """Whether norms and linear layers have biases."""
    gelu_approximation: GELUApproximation = "tanh"
    """How GELU is computed: with tanh as in GPT-2, or exactly ("none") as in nanoGPT."""

    @property
    def ffn_hidden_dim(self) -> int:
        return self.hidden_dim or 4 * self.dim

    @property
    def norm_class(self) -> partial[LayerNorm]:  # pyright: ignore[reportIncompatibleVariableOverride], depends on `bias`
        return partial(LayerNorm, bias=self.bias)

    def layer_kinds(self) -> list[LayerKind]:
        return [LayerKind(positions=None)] * self.n_layers

    def attention_options(self) -> AttentionOptions:
        return {"bias": self.bias, "output_bias": self.bias}

    def build_feed_forward(self, layer: int) -> nn.Module:
        sizes = {"dim": self.dim, "hidden_dim": self.ffn_hidden_dim}
        return GELUFeedForward(**sizes, bias=self.bias, approximate=self.gelu_approximation)

    def styles(self) -> Styles:
        return super().styles() | learned_position_styles() | {"layers.*.feed_forward": ColwiseGather("w1")}

    def violations(self) -> list[str]:
        unused = ("n_kv_heads", "rope_theta", "rope_scaling")
        rule = "gpt2 has learned positions, and keys and values for each head; remove it"
        set_ones = [name for name in unused if getattr(self, name) != getattr(GPT2Args, name)]
        return super().violations() + [f"model.args.{name} = {getattr(self, name)}: {rule}" for name in set_ones]


def _initial_std(args: GPT2Args, name: str) -> float | None:
    if name.endswith((".wo.weight", ".w2.weight")):
        return 0.02 / (2 * args.n_layers) ** 0.5
    return initial_std(args, name) if "norm" in name or "bias" in name else 0.02


FLAVORS = {
    # The shipped tokenizer's vocabulary; learns on two CPU cores.
    "debugmodel": GPT2Args(dim=256, n_layers=6, n_heads=8, vocab_size=2048, max_seq_len=2048),
    "124M": GPT2Args(),
    "355M": GPT2Args(dim=1024, n_layers=24, n_heads=16),
    "774M": GPT2Args(dim=1280, n_layers=36, n_heads=20),
    "1.5B": GPT2Args(dim=1600, n_layers=48, n_heads=25),
}

SPEC = ModelSpec(
    name="gpt2",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.gpt2.hf:HUB",
    initial_std=_initial_std,
)
