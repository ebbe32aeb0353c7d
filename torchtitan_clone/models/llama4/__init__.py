"""Llama 4 (text) and its sizes."""

from dataclasses import replace

from torchtitan_clone.interfaces import TensorPlan
from torchtitan_clone.models.llama4.model import ROUTER, Llama4Args, build
from torchtitan_clone.models.plan import moe_styles
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.spec import ModelSpec


def tensor_plan(args: Llama4Args) -> TensorPlan:
    """Returns the plan of a decoder of which some layers have experts."""
    dense = [layer for layer in range(args.n_layers) if not args.has_experts(layer)]
    return TensorPlan(styles=moe_styles(args.moe, dense_layers=dense))


_SCALING = RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=8192)

FLAVORS = {
    # The shipped tokenizer's vocabulary, and chunks shorter than the sequences; learns on two CPU cores.
    "debugmodel": Llama4Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, hidden_dim=768, vocab_size=2048, max_seq_len=8192,
        chunk=128, full_every=3, moe_every=2, query_scale_floor=128,
        moe=replace(ROUTER, num_experts=8, top_k=1, hidden_dim=384),
    ),
    # Scout.
    "17bx16e": Llama4Args(
        max_seq_len=10485760, rope_scaling=_SCALING, moe=replace(ROUTER, num_experts=16, top_k=1, hidden_dim=8192)
    ),
    # Maverick.
    "17bx128e": Llama4Args(
        max_seq_len=1048576, qk_norm=False, moe_every=2,
        moe=replace(ROUTER, num_experts=128, top_k=1, hidden_dim=8192),
    ),
}  # fmt: skip

SPEC = ModelSpec(
    name="llama4",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.llama4.hf:HUB",
)
