"""Apertus and its sizes: Llama with normalized queries and keys, and a learned activation. Source: arXiv 2509.14233."""

from dataclasses import dataclass

from torch import nn

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.interfaces import Constant
from torchtitan_clone.models.composed import AttentionOptions, DenseArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Heads, Hidden, RopeTheta, Vocabulary
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.models.plan import REPLICATED, ColwiseGather, Styles
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.spec import ModelSpec, initial_std
from torchtitan_clone.ops.xielu import ALPHA_N, ALPHA_P, XieluFeedForward

_SCALING = RopeScaling(factor=8.0, original_max_seq_len=8192)


@dataclass(frozen=True, kw_only=True)
class ApertusArgs(DividedHeads, DenseArgs):
    """Arguments of Apertus."""

    n_kv_heads: Heads | None = 8
    hidden_dim: Hidden = 21504
    vocab_size: Vocabulary = 131072
    rope_theta: RopeTheta = 12000000.0
    rope_scaling: RopeScaling | None = _SCALING
    max_seq_len: Size = 65536

    def attention_options(self) -> AttentionOptions:
        return {"qk_norm_eps": self.norm_eps}

    def build_feed_forward(self, layer: int) -> nn.Module:
        return XieluFeedForward(dim=self.dim, hidden_dim=self.hidden_dim)

    def styles(self) -> Styles:
        name = "layers.*.feed_forward"
        return super().styles() | {name: ColwiseGather("w1"), f"{name}.activation": REPLICATED}


def _initial_std(args: ApertusArgs, name: str) -> float | Constant | None:
    constants = {"alpha_p": Constant(ALPHA_P), "alpha_n": Constant(ALPHA_N)}
    return constants.get(name.split(".")[-1]) or initial_std(args, name)


FLAVORS = {
    # The shipped tokenizer's vocabulary; learns on two CPU cores.
    "debugmodel": ApertusArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=1152, vocab_size=2048, max_seq_len=8192,
        rope_scaling=None,
    ),
    "8B": ApertusArgs(),
    "70B": ApertusArgs(dim=8192, n_layers=80, n_heads=64, hidden_dim=43008),
}  # fmt: skip

SPEC = ModelSpec(
    name="apertus",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.apertus.hf:HUB",
    initial_std=_initial_std,
)
