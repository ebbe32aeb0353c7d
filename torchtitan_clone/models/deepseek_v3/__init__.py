"""DeepSeek V3, V3.2 and V2, Kimi K2, GLM-5, and their sizes."""

from dataclasses import replace

from torchtitan_clone.models.composed import build, tensor_plan
from torchtitan_clone.models.deepseek_v3.model import (
    V2_ROUTER,
    V3_ROUTER,
    DeepSeekV3Args,
    SparseDeepSeekArgs,
    build_sparse,
)
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.spec import ModelSpec


def _yarn(mscale: float) -> RopeScaling:
    return RopeScaling(rope_type="yarn", factor=40.0, original_max_seq_len=4096, mscale=mscale, mscale_all_dim=mscale)


FLAVORS = {
    # The shipped tokenizer's vocabulary, and values smaller than keys; learns on two CPU cores.
    "debugmodel": DeepSeekV3Args(
        dim=256, n_layers=6, n_heads=8, hidden_dim=768, n_dense_layers=1, q_lora_rank=96, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, vocab_size=2048, max_seq_len=8192,
        moe=replace(
            V3_ROUTER, num_experts=8, top_k=2, hidden_dim=256, num_shared_experts=1, num_groups=4, top_groups=2,
            score_scale=2.5,
        ),
    ),
    # V2-Lite.
    "16B": DeepSeekV3Args(
        dim=2048, n_layers=27, n_heads=16, hidden_dim=10944, n_dense_layers=1, q_lora_rank=0, vocab_size=102400,
        rope_scaling=_yarn(0.707),
        moe=replace(V2_ROUTER, num_experts=64, top_k=6, hidden_dim=1408, num_shared_experts=2),
    ),
    # V2.
    "236B": DeepSeekV3Args(
        dim=5120, n_layers=60, hidden_dim=12288, n_dense_layers=1, vocab_size=102400, rope_scaling=_yarn(0.707),
        moe=replace(
            V2_ROUTER, num_experts=160, top_k=6, hidden_dim=1536, num_shared_experts=2, num_groups=8, top_groups=3,
            score_scale=16.0,
        ),
    ),
    "671B": DeepSeekV3Args(
        rope_scaling=_yarn(1.0),
        moe=replace(
            V3_ROUTER, num_experts=256, top_k=8, hidden_dim=2048, num_shared_experts=1, num_groups=8, top_groups=4,
            score_scale=2.5,
        ),
    ),
}  # fmt: skip

SPEC = ModelSpec(
    name="deepseek_v3",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.deepseek_v3.hf:HUB",
)

# Source: arXiv 2507.20534.
KIMI_K2_FLAVORS = {
    # More experts, of which one group, and fewer heads than DeepSeek V3's; learns on two CPU cores.
    "debugmodel": DeepSeekV3Args(
        dim=256, n_layers=6, n_heads=4, hidden_dim=768, n_dense_layers=1, q_lora_rank=96, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, vocab_size=2048, max_seq_len=8192, rope_theta=50000.0,
        moe=replace(V3_ROUTER, num_experts=12, top_k=2, hidden_dim=256, num_shared_experts=1, score_scale=2.827),
    ),
    "1T": DeepSeekV3Args(
        n_heads=64, n_dense_layers=1, vocab_size=163840, rope_theta=50000.0, max_seq_len=131072,
        rope_scaling=RopeScaling(
            rope_type="yarn", factor=32.0, original_max_seq_len=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0
        ),
        moe=replace(V3_ROUTER, num_experts=384, top_k=8, hidden_dim=2048, num_shared_experts=1, score_scale=2.827),
    ),
}  # fmt: skip

KIMI_K2_SPEC = ModelSpec(
    name="kimi_k2",
    flavors=KIMI_K2_FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.deepseek_v3.hf:KIMI_K2_HUB",
)

# V3's sizes with an indexer. Source: arXiv 2512.02556.
V3_2_FLAVORS = {
    "debugmodel": SparseDeepSeekArgs(**vars(FLAVORS["debugmodel"]), index_n_heads=4, index_head_dim=32, index_topk=64),
    "671B": SparseDeepSeekArgs(rope_scaling=_yarn(1.0), moe=FLAVORS["671B"].moe),
}
V3_2_SPEC = ModelSpec(
    name="deepseek_v32",
    flavors=V3_2_FLAVORS,
    build=build_sparse,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.deepseek_v3.hf:V3_2_HUB",
)

GLM5_FLAVORS = {
    # One group of experts, and values as large as keys; learns on two CPU cores.
    "debugmodel": SparseDeepSeekArgs(
        dim=256, n_layers=6, n_heads=4, hidden_dim=768, n_dense_layers=1, q_lora_rank=96, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48, vocab_size=2048, max_seq_len=8192, rope_theta=1e6,
        norm_eps=1e-5, index_n_heads=4, index_head_dim=32, index_topk=64,
        moe=replace(V3_ROUTER, num_experts=8, top_k=2, hidden_dim=256, num_shared_experts=1, score_scale=2.5),
    ),
    "744B-A40B": SparseDeepSeekArgs(
        dim=6144, n_layers=78, n_heads=64, hidden_dim=12288, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256,
        vocab_size=154880, max_seq_len=202752, rope_theta=1e6, norm_eps=1e-5, index_n_heads=32,
        moe=replace(V3_ROUTER, num_experts=256, top_k=8, hidden_dim=2048, num_shared_experts=1, score_scale=2.5),
    ),
}  # fmt: skip
GLM5_SPEC = ModelSpec(
    name="glm_moe_dsa",
    flavors=GLM5_FLAVORS,
    build=build_sparse,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.deepseek_v3.hf:GLM5_HUB",
)
