"""SmolLM3 and its size: Llama, of which every fourth layer has no rotary positions."""

from dataclasses import dataclass

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import DenseArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Epsilon, Layers, RopeTheta
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class SmolLM3Args(DividedHeads, DenseArgs):
    """Arguments of SmolLM3."""

    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 5000000.0
    max_seq_len: Size = 65536
    no_rope_every: Layers = 4
    """Every layer of this number has no rotary positions."""

    def has_rope(self, layer: int) -> bool:
        return (layer + 1) % self.no_rope_every != 0

    def layer_kinds(self) -> list[LayerKind]:
        rotary, plain = LayerKind(positions=self.rope_args()), LayerKind(positions=None)
        return [rotary if self.has_rope(layer) else plain for layer in range(self.n_layers)]


FLAVORS = {
    # The shipped tokenizer's vocabulary; learns on two CPU cores.
    "debugmodel": SmolLM3Args(
        dim=256, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048, max_seq_len=8192
    ),
    "3B": SmolLM3Args(dim=2048, n_layers=36, n_heads=16, n_kv_heads=4, tied_embeddings=True),
}

SPEC = ModelSpec(
    name="smollm3",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.smollm3.hf:HUB",
)
