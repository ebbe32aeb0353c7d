"""Qwen3, dense and with a mixture of experts, and its sizes."""

from torchtitan_clone.interfaces import TensorPlan
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.plan import decoder_styles, moe_styles, qk_norm_styles
from torchtitan_clone.models.qwen3.model import Qwen3Args, Qwen3MoEArgs, build
from torchtitan_clone.models.spec import ModelSpec


def tensor_plan(args: Qwen3Args) -> TensorPlan:
    """Returns the plan of a decoder with norms of queries and keys."""
    is_moe = isinstance(args, Qwen3MoEArgs)
    styles = moe_styles(args.moe) if is_moe else decoder_styles()
    return TensorPlan(styles=styles | qk_norm_styles())


FLAVORS = {
    # The shipped tokenizer's vocabulary, and heads that are not dim / n_heads; learns on two CPU cores.
    "debugmodel": Qwen3Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=768, vocab_size=2048, max_seq_len=8192
    ),
    "0.6B": Qwen3Args(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tied_embeddings=True),
    "1.7B": Qwen3Args(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tied_embeddings=True),
    "4B": Qwen3Args(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, tied_embeddings=True),
    "8B": Qwen3Args(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
    "14B": Qwen3Args(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
    "32B": Qwen3Args(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
}

SPEC = ModelSpec(
    name="qwen3",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.qwen3.hf:HUB",
    related=("qwen3_moe",),
)

MOE_FLAVORS = {
    # 2 of 8 experts with 384 hidden features each: as many active parameters as the dense debug model.
    "debugmodel": Qwen3MoEArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=768, vocab_size=2048, max_seq_len=8192,
        moe=MoEArgs(num_experts=8, top_k=2, hidden_dim=384),
    ),
    # torchtitan's debug model.
    "debugmodel_moe": Qwen3MoEArgs(
        dim=256, n_layers=8, n_heads=16, n_kv_heads=8, hidden_dim=3072, vocab_size=2048, max_seq_len=4096,
        moe=MoEArgs(num_experts=64, top_k=8, hidden_dim=768),
    ),
    "30B-A3B": Qwen3MoEArgs(
        dim=2048, n_layers=48, n_heads=32, hidden_dim=6144, moe=MoEArgs(num_experts=128, top_k=8, hidden_dim=768)
    ),
    "235B-A22B": Qwen3MoEArgs(
        dim=4096, n_layers=94, n_heads=64, hidden_dim=12288, moe=MoEArgs(num_experts=128, top_k=8, hidden_dim=1536)
    ),
}  # fmt: skip

MOE_SPEC = ModelSpec(
    name="qwen3_moe",
    flavors=MOE_FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.qwen3.hf:MOE_HUB",
)
