"""OLMo 3, OLMo 2 and their sizes."""

from torchtitan_clone.interfaces import TensorPlan
from torchtitan_clone.models.olmo3.model import Olmo2Args, Olmo3Args, build
from torchtitan_clone.models.plan import decoder_styles, heads_norm_styles
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.spec import ModelSpec


def tensor_plan(_args: Olmo2Args) -> TensorPlan:
    """Returns the plan of a decoder with norms after its layers and over all heads."""
    return TensorPlan(styles=decoder_styles() | heads_norm_styles())


_YARN = RopeScaling(rope_type="yarn", factor=8.0, original_max_seq_len=8192)

FLAVORS = {
    # The shipped tokenizer's vocabulary, and windows shorter than rows; learns on two CPU cores.
    "debugmodel": Olmo3Args(
        dim=256, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048, max_seq_len=8192, window=128
    ),
    "7B": Olmo3Args(rope_scaling=_YARN),
    "32B": Olmo3Args(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648, rope_scaling=_YARN),
}

SPEC = ModelSpec(
    name="olmo3",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.olmo3.hf:HUB",
)

OLMO2_FLAVORS = {
    "debugmodel": Olmo2Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048, max_seq_len=8192
    ),
    "1B": Olmo2Args(dim=2048, n_layers=16, n_heads=16, hidden_dim=8192),
    "7B": Olmo2Args(),
    "13B": Olmo2Args(dim=5120, n_layers=40, n_heads=40, hidden_dim=13824),
    "32B": Olmo2Args(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648),
}

OLMO2_SPEC = ModelSpec(
    name="olmo2",
    flavors=OLMO2_FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.olmo3.hf:OLMO2_HUB",
)
