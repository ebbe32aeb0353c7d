"""The parity matrix: combinations of axes and features, each with the number of ranks it needs.

`QUICK` names the cases that the test suite runs; `scripts/parity.py` runs all.
"""

from collections.abc import Sequence
from itertools import combinations, product

Case = tuple[int, dict[str, object]]
"""World size and options."""
DEGREES = {
    "replicate": "parallelism__data_parallel_replicate_degree",
    "shard": "parallelism__data_parallel_shard_degree",
    "tensor": "parallelism__tensor_parallel_degree",
    "pipeline": "parallelism__pipeline_parallel_degree",
    "context": "parallelism__context_parallel_degree",
}
# Batches of 4 rows, split into 4 micro-batches: as many as any schedule here requires on 2 ranks.
PIPELINE = {"model__args__n_layers": 4}
FEATURES: dict[str, dict[str, object]] = {
    "masked": {},
    "unmasked": {"training__document_masking": False},
    "full ac": {"activation_checkpoint__mode": "full"},
    "tied": {"model__args__tied_embeddings": True},
}
# Heads that are not dim / n_heads; None removes an option of all cases that the family does not have.
QWEN3 = {
    "model__name": "qwen3", "model__args__head_dim": 32, "model__args__hidden_dim": 172,
    "model__args__multiple_of": None,
}  # fmt: skip
EXPERT = "parallelism__expert_parallel_degree"
MOE = QWEN3 | {
    "model__name": "qwen3_moe", "model__args__moe__num_experts": 8, "model__args__moe__top_k": 2,
    "model__args__moe__hidden_dim": 64,
}  # fmt: skip
# A dense layer and one with experts, whose bias changes as fast as it can without changing every token's experts.
LATENT = {
    "model__name": "deepseek_v3", "model__args__n_kv_heads": None, "model__args__multiple_of": None,
    "model__args__hidden_dim": 96, "model__args__q_lora_rank": 24, "model__args__kv_lora_rank": 16,
    "model__args__qk_nope_head_dim": 16, "model__args__qk_rope_head_dim": 8, "model__args__v_head_dim": 16,
    "model__args__moe__hidden_dim": 64, "model__args__moe__bias_update_rate": 0.01,
}  # fmt: skip
# Fewer keys than most documents have.
SPARSE = LATENT | {
    "model__name": "deepseek_v32", "model__args__index_n_heads": 4, "model__args__index_head_dim": 16,
    "model__args__index_topk": 9,
}  # fmt: skip
WARM_UP: dict[str, object] = {"model__args__indexer_stage": "warm-up"}
# Two depths, of which the documents of a few tokens have fewer targets.
PREDICTION = LATENT | {"model__args__mtp_depth": 2}
PADDED = {"data__packing": "best_fit"}
# A window shorter than most documents, and stretched rotary positions in the full layer only.
OLMO3 = {
    "model__name": "olmo3", "model__args__hidden_dim": 176, "model__args__multiple_of": None,
    "model__args__layer_types": "['window', 'full']", "model__args__window": 13,
    "model__args__rope_scaling": "{rope_type = 'yarn', factor = 4.0, original_max_seq_len = 32}",
}  # fmt: skip
GPT_OSS = {
    "model__name": "gpt_oss", "model__args__head_dim": 32, "model__args__multiple_of": None,
    "model__args__window": 13, "model__args__moe__hidden_dim": 64,
    "model__args__rope_scaling": "{rope_type = 'yarn', factor = 4.0, original_max_seq_len = 32, truncate = false}",
}  # fmt: skip
LLAMA4 = {
    "model__name": "llama4", "model__args__head_dim": 32, "model__args__hidden_dim": 96,
    "model__args__multiple_of": None, "model__args__chunk": 13, "model__args__full_every": 2,
    "model__args__query_scale_floor": 8, "model__args__moe__hidden_dim": 64,
}  # fmt: skip
# Rows of three chunks of linear attention, the last one ragged, and two heads of values for each of keys.
QWEN3_5 = {
    "model__name": "qwen3_5", "model__args__head_dim": 32, "model__args__hidden_dim": 96,
    "model__args__multiple_of": None, "model__args__layer_types": "['linear', 'full']",
    "model__args__linear_key_heads": 2, "model__args__linear_value_heads": 4, "model__args__linear_key_dim": 16,
    "model__args__linear_value_dim": 24, "model__args__rotary_dim": 8, "training__seq_len": 160,
}  # fmt: skip
# A shared expert with a gate besides those that a router chooses.
QWEN3_NEXT = QWEN3_5 | {
    "model__name": "qwen3_next", "model__args__hidden_dim": None, "model__args__moe__num_experts": 8,
    "model__args__moe__top_k": 2, "model__args__moe__hidden_dim": 64,
}  # fmt: skip
# A dense layer with a decay of each dimension of keys, and one of latent attention without positions with experts.
KIMI_LINEAR = {
    "model__name": "kimi_linear", "model__args__n_kv_heads": None, "model__args__multiple_of": None,
    "model__args__hidden_dim": 96, "model__args__layer_types": "['linear', 'full']",
    "model__args__linear_key_heads": 2, "model__args__linear_value_heads": 2, "model__args__linear_key_dim": 16,
    "model__args__linear_value_dim": 16, "model__args__kv_lora_rank": 16, "model__args__qk_nope_head_dim": 16,
    "model__args__qk_rope_head_dim": 8, "model__args__v_head_dim": 16, "model__args__moe__hidden_dim": 64,
    "model__args__moe__bias_update_rate": 0.01, "training__seq_len": 160,
}  # fmt: skip
# States that may change their sign, and norms before or after attention.
OLMO_HYBRID = {
    "model__name": "olmo_hybrid", "model__args__multiple_of": None, "model__args__hidden_dim": 96,
    "model__args__layer_types": "['linear', 'full']", "model__args__linear_key_heads": 2,
    "model__args__linear_value_heads": 2, "model__args__linear_key_dim": 16, "model__args__linear_value_dim": 24,
    "training__seq_len": 160,
}  # fmt: skip
PATTERNS = {"olmo3": OLMO3, "gpt_oss": GPT_OSS, "llama4": LLAMA4}
"""Families whose layers have several kinds, by the name of their cases."""
_COMPOSED: dict[str, object] = {"model__args__multiple_of": None, "model__args__hidden_dim": 172}
_PARTLY: dict[str, object] = {
    "model__args__head_dim": 32, "model__args__rotary_dim": 16, "model__args__moe__hidden_dim": 64,
    "model__args__moe__bias_update_rate": 0.01,
}  # fmt: skip
_GROWING: dict[str, object] = {
    "model__args__rope_scaling": "{rope_type = 'yarn', factor = 4.0, original_max_seq_len = 8}",
}
# Adam would divide rounding by rounding in parameters that start at zero and have hardly a gradient.
_FROM_ZERO: dict[str, object] = {"optimizer__eps": 1e-5}
COMPOSED: dict[str, dict[str, object]] = {
    "qwen2": {"model__name": "qwen2", **_COMPOSED, **_FROM_ZERO},
    "smollm3": {"model__name": "smollm3", **_COMPOSED, "model__args__no_rope_every": 2},
    "granite": {"model__name": "granite", **_COMPOSED, "model__args__tied_embeddings": False},
    # A window shorter than most documents.
    "gemma3": {
        "model__name": "gemma3", **_COMPOSED, **_FROM_ZERO, "model__args__tied_embeddings": False,
        "model__args__head_dim": 32, "model__args__layer_types": "['window', 'full']", "model__args__window": 13,
    },
    # A size with which the gradient of no scalar is near zero by chance.
    "apertus": {"model__name": "apertus", **_COMPOSED, "model__args__hidden_dim": 192},
    "gpt2": {
        "model__name": "gpt2", "model__args__multiple_of": None, "model__args__n_kv_heads": None,
        "model__args__tied_embeddings": False, **_FROM_ZERO,
    },
    "glm4_moe": {"model__name": "glm4_moe", **_COMPOSED, **_PARTLY, **_FROM_ZERO},
    "minimax_m2": {"model__name": "minimax_m2", **_COMPOSED, **_PARTLY, "model__args__hidden_dim": None},
    # Documents longer than the length from which queries grow.
    "ministral3": {"model__name": "ministral3", **_COMPOSED, "model__args__head_dim": 32, **_GROWING},
    "mistral4": {
        **{name: value for name, value in LATENT.items() if not name.endswith("bias_update_rate")},
        "model__name": "mistral4", "model__args__n_dense_layers": 1, **_GROWING,
    },
}  # fmt: skip
"""Families that are composed of parts of others and have one of their own, by the name of their cases."""
EXPERT_AXES = (
    ("shard",), ("tensor",), ("context",), ("replicate", "shard"), ("shard", "tensor"), ("shard", "context"),
    ("tensor", "context"), ("shard", "pipeline"), ("replicate", "tensor"), ("replicate", "context"),
    ("tensor", "pipeline"), ("context", "pipeline"), ("shard", "tensor", "context"), ("shard", "tensor", "pipeline"),
    ("shard", "context", "pipeline"), ("tensor", "context", "pipeline"), ("replicate", "shard", "tensor"),
)  # fmt: skip
COMPILED: dict[str, object] = {"compile__enable": True, "compile__backend": "aot_eager"}
SELECTIVE: dict[str, object] = {
    "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"
}  # fmt: skip
PAIRS: dict[str, object] = {"parallelism__fsdp_blocks_per_group": 2}
EXPERT_FEATURES: dict[str, dict[str, object]] = {
    "full ac": FEATURES["full ac"],
    "selective ac": SELECTIVE,
    "compiled": COMPILED,
    "compiled, full ac": COMPILED | FEATURES["full ac"],
    "compiled, selective ac": COMPILED | SELECTIVE,
    "accumulated": {"training__local_batch_size": 1},
    "offloaded": {"training__enable_cpu_offload": True},
    "prefetch 2": {"model__args__n_layers": 4, "parallelism__fsdp_prefetch_blocks": 2},
    "pairs of blocks": {"model__args__n_layers": 4, **PAIRS},
    "clipped": {"training__max_norm": 0.5},
    "shared": {"model__args__moe__num_shared_experts": 1},
    "groups": {
        "model__args__moe__score_func": "sigmoid", "model__args__moe__num_groups": 4, "model__args__moe__top_groups": 2
    },
}  # fmt: skip
# In fp32: bfloat16 makes another matrix of one that differs in its last bits.
MUON: dict[str, object] = {"optimizer__name": "Muon", "optimizer__args__dtype": "float32"}
Z_LOSS: dict[str, object] = {"training__z_loss": 0.01}
TEACHER: dict[str, object] = {
    "distillation__teacher_path": "teacher", "distillation__alpha": 0.7, "distillation__temperature": 2.0
}  # fmt: skip
"""A teacher that tests/support/parity.py writes into a folder of this name."""
STORED: dict[str, object] = {"distillation__store": "predictions", **TEACHER, "distillation__teacher_path": None}
QK_CLIP: dict[str, object] = {"optimizer__qk_clip": 0.05}
"""A threshold that the logits of some heads exceed."""
EMA: dict[str, object] = {"ema__enable": True, "ema__half_life": 0.5}
MUP: dict[str, object] = {"model__args__mup_base_dim": 32, "model__args__mup_base_head_dim": 8}
ROUNDED: dict[str, object] = {"optimizer__args__state_dtype": "bfloat16"}
"""Moments that are rounded at random, which a relative difference of 1e-7 seldom changes."""
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
METHODS = ("allgather", "alltoall", "ring")


def axes_case(axes: Sequence[str], **features: object) -> Case:
    """Returns the case of a mesh with degree 2 on each of these axes."""
    changes: dict[str, object] = {DEGREES[axis]: 2 for axis in axes}
    changes.setdefault(DEGREES["shard"], 1)
    data = 2 ** len({"replicate", "shard"} & set(axes))
    changes["training__local_batch_size"] = min(4, 8 // data)
    if "pipeline" in axes:
        changes |= PIPELINE
    return 2 ** len(axes), changes | features


def expert_cases() -> dict[str, Case]:
    """Returns the cases of a mixture of experts by name."""
    cases: dict[str, Case] = {}
    for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes) or 'one rank'}, experts"] = axes_case(axes, **MOE)
    for axes in EXPERT_AXES:
        for degree in (2, 4):
            if degree <= 2 ** len(set(axes) - {"replicate", "pipeline"}):
                cases[f"{' x '.join(axes)}, experts over {degree}"] = axes_case(axes, **MOE, **{EXPERT: degree})
    for name, features in EXPERT_FEATURES.items():
        cases[f"shard, experts over 2, {name}"] = axes_case(("shard",), **MOE | features, **{EXPERT: 2})
    for name in ("compiled", "compiled, full ac", "shared"):
        cases[f"tensor, experts, {name}"] = axes_case(("tensor",), **MOE | EXPERT_FEATURES[name])
    # Of 6 experts, no shard of the tokens of a row starts with the first.
    forced = {**MOE, "debug__moe_force_load_balance": True, "model__args__moe__num_experts": 6, EXPERT: 2}
    for axes in (("shard", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes)}, experts over 2, forced"] = axes_case(axes, **forced)
    # One expert on each rank of the expert axis, whose rows FSDP shards further.
    few = {"model__args__moe__num_experts": 2, EXPERT: 2, "training__local_batch_size": 1}
    cases["shard x tensor, 2 experts over 2"] = axes_case(("shard", "tensor"), **MOE | few)
    return cases


def prediction_cases() -> dict[str, Case]:
    """Returns the cases of multi-token prediction by name."""
    cases: dict[str, Case] = {}
    axes_of_cases = (
        (), *((axis,) for axis in DEGREES), ("replicate", "shard"), ("tensor", "context"), ("tensor", "pipeline"),
        ("context", "pipeline"), ("shard", "tensor", "pipeline"),
    )  # fmt: skip
    for axes in axes_of_cases:
        cases[f"{' x '.join(axes) or 'one rank'}, prediction"] = axes_case(axes, **PREDICTION)
    for axes in ((), ("shard",), ("pipeline",), ("tensor", "context")):
        cases[f"{' x '.join(axes) or 'one rank'}, prediction, padded"] = axes_case(axes, **PREDICTION, **PADDED)
    for axes in (("shard",), ("shard", "tensor"), ("shard", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes)}, prediction, experts over 2"] = axes_case(axes, **PREDICTION, **{EXPERT: 2})
    for name, features in (("full ac", FEATURES["full ac"]), ("selective ac", SELECTIVE), ("compiled", COMPILED)):
        for axis in ("shard", "tensor"):
            cases[f"{axis}, prediction, {name}"] = axes_case((axis,), **PREDICTION, **features)
    for name in ("unmasked", "tied"):
        cases[f"shard, prediction, {name}"] = axes_case(("shard",), **PREDICTION, **FEATURES[name])
    for method, name in product(METHODS, ("masked", "unmasked")):
        option = {"parallelism__context_parallel_rotate_method": method} | FEATURES[name]
        cases[f"context, prediction, {method} {name}"] = axes_case(("context",), **PREDICTION, **option)
    for schedule in SCHEDULES:
        option = {"parallelism__pipeline_parallel_schedule": schedule}
        cases[f"pipeline, prediction, {schedule}"] = axes_case(("pipeline",), **PREDICTION, **option)
    for name in ("accumulated", "prefetch 2", "offloaded"):
        cases[f"shard, prediction, {name}"] = axes_case(("shard",), **PREDICTION | EXPERT_FEATURES[name])
    return cases


def muon_cases() -> dict[str, Case]:
    """Returns the cases of matrices that are orthogonalized as a whole, by name."""
    cases: dict[str, Case] = {}
    axes_of_cases = (
        (), *((axis,) for axis in DEGREES), ("replicate", "shard"), ("shard", "tensor", "pipeline"),
        ("replicate", "shard", "tensor"), ("tensor", "context", "pipeline"), ("shard", "context", "tensor"),
    )  # fmt: skip
    for axes in axes_of_cases:
        cases[f"{' x '.join(axes) or 'one rank'}, muon"] = axes_case(axes, **MUON)
    for axes in (("shard",), ("tensor",), ("shard", "tensor"), ("replicate", "shard"), ("shard", "pipeline")):
        cases[f"{' x '.join(axes)}, experts over 2, muon"] = axes_case(axes, **MUON, **MOE, **{EXPERT: 2})
    for name in ("offloaded", "accumulated", "clipped"):
        cases[f"shard, muon, {name}"] = axes_case(("shard",), **MUON, **EXPERT_FEATURES[name])
    cases["shard x tensor, latent, muon"] = axes_case(("shard", "tensor"), **LATENT, **MUON)
    three: dict[str, object] = {"training__global_batch_size": 6, "training__local_batch_size": 1}
    cases["shard 3, muon"] = (3, three | MUON)
    cases["shard 6, experts over 2, muon"] = (6, {**MOE, **three, **MUON, EXPERT: 2})
    return cases


def qk_clip_cases() -> dict[str, Case]:
    """Returns the cases of clipped queries and keys by name."""
    cases: dict[str, Case] = {}
    for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes) or 'one rank'}, qk-clip"] = axes_case(axes, **QK_CLIP)
    for name, features in (("full ac", FEATURES["full ac"]), ("selective ac", SELECTIVE), ("compiled", COMPILED)):
        cases[f"tensor, qk-clip, {name}"] = axes_case(("tensor",), **QK_CLIP, **features)
    cases["shard, qk-clip, compiled, full ac"] = axes_case(
        ("shard",), **QK_CLIP, **EXPERT_FEATURES["compiled, full ac"]
    )
    for name in ("offloaded", "accumulated"):
        cases[f"shard, qk-clip, {name}"] = axes_case(("shard",), **QK_CLIP, **EXPERT_FEATURES[name])
    for axes in (("shard", "tensor"), ("pipeline",), ("context",)):
        cases[f"{' x '.join(axes)}, latent, qk-clip"] = axes_case(axes, **LATENT, **QK_CLIP)
    cases["tensor, latent, no query latent, qk-clip"] = axes_case(
        ("tensor",), **{**LATENT, **QK_CLIP, "model__args__q_lora_rank": 0}
    )
    for method in METHODS:
        option = {"parallelism__context_parallel_rotate_method": method}
        cases[f"context, gpt_oss, qk-clip, {method}"] = axes_case(("context",), **GPT_OSS, **QK_CLIP, **option)
    cases["shard, experts over 2, gpt_oss, qk-clip"] = axes_case(("shard",), **GPT_OSS, **QK_CLIP, **{EXPERT: 2})
    cases["pipeline, qk-clip, ZBVZeroBubble"] = axes_case(
        ("pipeline",), **QK_CLIP, parallelism__pipeline_parallel_schedule="ZBVZeroBubble"
    )
    cases["tensor, muon, qk-clip"] = axes_case(("tensor",), **MUON, **QK_CLIP)
    cases["shard 3, qk-clip"] = (3, {"training__global_batch_size": 6, "training__local_batch_size": 1} | QK_CLIP)
    return cases


def z_loss_cases() -> dict[str, Case]:
    """Returns the cases of z-loss on the output, by name."""
    cases: dict[str, Case] = {}
    for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes) or 'one rank'}, z-loss"] = axes_case(axes, **Z_LOSS)
    for axes in (("tensor",), ("pipeline",)):
        cases[f"{axes[0]}, prediction, z-loss"] = axes_case(axes, **PREDICTION, **Z_LOSS)
    cases["shard, accumulated, z-loss"] = axes_case(("shard",), **EXPERT_FEATURES["accumulated"], **Z_LOSS)
    return cases


def distilled_cases() -> dict[str, Case]:
    """Returns the cases of students by name."""
    cases: dict[str, Case] = {}
    axes_of_cases = (
        *(axes for count in range(3) for axes in combinations(("replicate", "shard", "tensor", "context"), count)),
        ("replicate", "shard", "tensor"), ("shard", "tensor", "context"), ("pipeline",),
        *((axis, "pipeline") for axis in ("replicate", "shard", "tensor", "context")), ("shard", "tensor", "pipeline"),
    )  # fmt: skip
    for axes in axes_of_cases:
        cases[f"{' x '.join(axes) or 'one rank'}, distilled"] = axes_case(axes, **TEACHER)
    features = {
        "accumulated": EXPERT_FEATURES["accumulated"], "compiled": COMPILED, "offloaded": EXPERT_FEATURES["offloaded"],
        "full ac": FEATURES["full ac"], "unmasked": FEATURES["unmasked"], "padded": PADDED, "muon": MUON,
        "experts over 2": {**MOE, EXPERT: 2}, "qwen3": QWEN3,
    }  # fmt: skip
    for name, feature in features.items():
        cases[f"shard, distilled, {name}"] = axes_case(("shard",), **TEACHER, **feature)
    for name in ("compiled", "padded", "qwen3"):
        cases[f"tensor, distilled, {name}"] = axes_case(("tensor",), **TEACHER, **features[name])
    for axis in ("tensor", "pipeline"):
        cases[f"{axis}, distilled, prediction"] = axes_case((axis,), **TEACHER, **PREDICTION)
    cases["pipeline, distilled, accumulated"] = axes_case(("pipeline",), **TEACHER, training__local_batch_size=2)
    cases["shard x pipeline, distilled, experts over 2"] = axes_case(
        ("shard", "pipeline"), **TEACHER, **features["experts over 2"]
    )
    for schedule in SCHEDULES:
        option = {"parallelism__pipeline_parallel_schedule": schedule}
        cases[f"pipeline, distilled, {schedule}"] = axes_case(("pipeline",), **TEACHER, **option)
    for method in METHODS:
        option = {"parallelism__context_parallel_rotate_method": method}
        cases[f"context, distilled, {method}"] = axes_case(("context",), **TEACHER, **option)
    pairs = (("shard", "tensor"), ("tensor", "context"), ("tensor", "pipeline"))
    for axes in ((), *((axis,) for axis in DEGREES), *pairs):
        cases[f"{' x '.join(axes) or 'one rank'}, stored"] = axes_case(axes, **STORED)
    for name in ("accumulated", "compiled"):
        cases[f"shard, stored, {name}"] = axes_case(("shard",), **STORED, **features[name])
    packed = {**STORED, **PADDED, "distillation__store": "packed_predictions"}
    cases["shard, stored, padded"] = axes_case(("shard",), **packed)
    cases["tensor, stored, compiled"] = axes_case(("tensor",), **STORED, **COMPILED)
    cases["shard 3, distilled"] = (3, {"training__global_batch_size": 6, "training__local_batch_size": 1} | TEACHER)
    return cases


def optimizer_cases() -> dict[str, Case]:
    """Returns the cases of averages of weights, of muP and of moments in bfloat16, by name."""
    cases: dict[str, Case] = {}
    features = {"ema": EMA, "muP": MUP, "bf16 state": ROUNDED}
    three: dict[str, object] = {"training__global_batch_size": 6, "training__local_batch_size": 1}
    for name, feature in features.items():
        for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline")):
            cases[f"{' x '.join(axes) or 'one rank'}, {name}"] = axes_case(axes, **feature)
        cases[f"shard 3, {name}"] = (3, three | feature)
        cases[f"shard, {name}, offloaded"] = axes_case(("shard",), **feature, **EXPERT_FEATURES["offloaded"])
        cases[f"shard, experts over 2, {name}"] = axes_case(("shard",), **feature, **MOE, **{EXPERT: 2})
    return cases


def composed_cases() -> dict[str, Case]:
    """Returns the cases of families that are composed of parts of others, by name."""
    cases: dict[str, Case] = {}
    for family, model in COMPOSED.items():
        for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
            cases[f"{' x '.join(axes) or 'one rank'}, {family}"] = axes_case(axes, **model)
        for name, feature in (("full ac", FEATURES["full ac"]), ("compiled", COMPILED)):
            cases[f"tensor, {family} {name}"] = axes_case(("tensor",), **model, **feature)
        if "model__args__moe__hidden_dim" in model:
            for axes in (("shard",), ("tensor",)):
                cases[f"{axes[0]}, {family} experts over 2"] = axes_case(axes, **model, **{EXPERT: 2})
    for family in ("ministral3", "mistral4"):
        cases[f"shard x tensor, {family}"] = axes_case(("shard", "tensor"), **COMPOSED[family])
    cases["shard x tensor, gpt2 tied"] = axes_case(("shard", "tensor"), **COMPOSED["gpt2"] | FEATURES["tied"])
    cases["tensor, glm4_moe predicting"] = axes_case(("tensor",), **COMPOSED["glm4_moe"], model__args__mtp_depth=1)
    return cases


def sparse_cases() -> dict[str, Case]:
    """Returns the cases of attention to the keys that an indexer selects, by name."""
    cases: dict[str, Case] = {}
    for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes) or 'one rank'}, deepseek_v32"] = axes_case(axes, **SPARSE)
    for axes in (("shard",), ("tensor",), ("shard", "context")):
        cases[f"{' x '.join(axes)}, deepseek_v32 experts over 2"] = axes_case(axes, **SPARSE, **{EXPERT: 2})
    for axes in ((), ("replicate",), ("shard",), ("tensor",), ("context",), ("shard", "tensor")):
        cases[f"{' x '.join(axes) or 'one rank'}, deepseek_v32 warm-up"] = axes_case(axes, **SPARSE, **WARM_UP)
    features = {"full ac": FEATURES["full ac"], "selective ac": SELECTIVE, "compiled": COMPILED}
    for axis, (name, feature) in product(("tensor", "context"), features.items()):
        cases[f"{axis}, deepseek_v32 {name}"] = axes_case((axis,), **SPARSE, **feature)
    for axis in ("tensor", "context"):
        cases[f"{axis}, deepseek_v32 unmasked"] = axes_case((axis,), **SPARSE, **FEATURES["unmasked"])
    cases["shard, deepseek_v32 padded"] = axes_case(("shard",), **SPARSE, **PADDED)
    cases["shard, deepseek_v32 accumulated"] = axes_case(("shard",), **SPARSE | EXPERT_FEATURES["accumulated"])
    cases["tensor, glm_moe_dsa"] = axes_case(("tensor",), **SPARSE | {"model__name": "glm_moe_dsa"})
    return cases


def hybrid_cases() -> dict[str, Case]:
    """Returns the cases of models with linear attention by name."""
    cases: dict[str, Case] = {}
    axes_of_cases = (
        *(axes for count in range(3) for axes in combinations(DEGREES, count)), ("shard", "tensor", "pipeline"),
        ("replicate", "shard", "tensor"), ("shard", "tensor", "context"), ("tensor", "pipeline", "context"),
    )  # fmt: skip
    for axes in axes_of_cases:
        cases[f"{' x '.join(axes) or 'one rank'}, qwen3_5"] = axes_case(axes, **QWEN3_5)
    features = {**FEATURES, "selective ac": SELECTIVE, "compiled": COMPILED, "muon": MUON}
    for axis, (name, feature) in product(("shard", "tensor", "context"), features.items()):
        cases[f"{axis}, qwen3_5 {name}"] = axes_case((axis,), **QWEN3_5, **feature)
    for name in ("accumulated", "offloaded", "clipped"):
        cases[f"shard, qwen3_5 {name}"] = axes_case(("shard",), **QWEN3_5 | EXPERT_FEATURES[name])
    for schedule in SCHEDULES:
        option = {"parallelism__pipeline_parallel_schedule": schedule}
        cases[f"pipeline, qwen3_5 {schedule}"] = axes_case(("pipeline",), **QWEN3_5, **option)
    for method, name in product(METHODS, ("masked", "unmasked")):
        option = {"parallelism__context_parallel_rotate_method": method} | FEATURES[name]
        cases[f"context, qwen3_5 {method} {name}"] = axes_case(("context",), **QWEN3_5, **option)
        four = {**QWEN3_5, **option, DEGREES["context"]: 4, DEGREES["shard"]: 1, "model__args__n_kv_heads": 4}
        cases[f"context 4, qwen3_5 {method} {name}"] = (4, four)
    apart = {**QWEN3_5, "model__args__layer_types": "['linear', 'linear', 'full', 'full']"}
    cases["pipeline, qwen3_5 linear stage"] = axes_case(("pipeline",), **apart)
    for family, model in (("qwen3_next", QWEN3_NEXT), ("kimi_linear", KIMI_LINEAR)):
        for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline")):
            cases[f"{' x '.join(axes) or 'one rank'}, {family}"] = axes_case(axes, **model)
        for axes in (("shard",), ("tensor",), ("tensor", "context"), ("shard", "tensor", "pipeline")):
            cases[f"{' x '.join(axes)}, {family} experts over 2"] = axes_case(axes, **model, **{EXPERT: 2})
    for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline")):
        cases[f"{' x '.join(axes) or 'one rank'}, olmo_hybrid"] = axes_case(axes, **OLMO_HYBRID)
    for method in METHODS:
        option = {"parallelism__context_parallel_rotate_method": method}
        cases[f"context, kimi_linear {method}"] = axes_case(("context",), **KIMI_LINEAR, **option)
    for name, feature in (("compiled", COMPILED), ("full ac", FEATURES["full ac"]), ("muon", MUON)):
        cases[f"tensor, kimi_linear {name}"] = axes_case(("tensor",), **KIMI_LINEAR, **feature)
    return cases


def all_cases() -> dict[str, Case]:
    """Returns every case by name."""
    cases = expert_cases() | muon_cases() | z_loss_cases() | optimizer_cases() | composed_cases() | hybrid_cases()
    cases |= distilled_cases() | sparse_cases()
    for axes in (axes for count in range(4) for axes in combinations(DEGREES, count)):
        cases[" x ".join(axes) or "one rank"] = axes_case(axes)
    for axes in combinations(("shard", "tensor", "pipeline", "context"), 3):
        for name, feature in FEATURES.items():
            if not (name == "tied" and "pipeline" in axes):
                cases[f"{' x '.join(axes)}, {name}"] = axes_case(axes, **feature)
    cases["shard x tensor x pipeline x context"] = axes_case(("shard", "tensor", "pipeline", "context"))
    for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes) or 'one rank'}, qwen3"] = axes_case(axes, **QWEN3)
    for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
        cases[f"{' x '.join(axes) or 'one rank'}, latent"] = axes_case(axes, **LATENT)
    for axes in (("shard",), ("shard", "tensor")):
        cases[f"{' x '.join(axes)}, latent, experts over 2"] = axes_case(axes, **LATENT, **{EXPERT: 2})
    for axes in (("shard",), ("tensor",)):
        cases[f"{axes[0]}, latent compiled"] = axes_case(axes, **LATENT, **COMPILED)
    cases["tensor, latent, full ac"] = axes_case(("tensor",), **LATENT, **FEATURES["full ac"])
    cases["tensor, latent, no query latent"] = axes_case(("tensor",), **{**LATENT, "model__args__q_lora_rank": 0})
    for method in METHODS:
        option = {"parallelism__context_parallel_rotate_method": method}
        cases[f"context, latent, {method}"] = axes_case(("context",), **LATENT, **option)
    cases |= prediction_cases()
    cases |= qk_clip_cases()
    for family, model in PATTERNS.items():
        for axes in ((), *((axis,) for axis in DEGREES), ("shard", "tensor", "pipeline"), ("tensor", "context")):
            cases[f"{' x '.join(axes) or 'one rank'}, {family}"] = axes_case(axes, **model)
        for name, feature in (
            ("unmasked", FEATURES["unmasked"]),
            ("full ac", FEATURES["full ac"]),
            ("compiled", COMPILED),
        ):
            cases[f"tensor, {family} {name}"] = axes_case(("tensor",), **model, **feature)
        for method, name in product(METHODS, ("masked", "unmasked")):
            option = {"parallelism__context_parallel_rotate_method": method}
            cases[f"context, {family} {method} {name}"] = axes_case(("context",), **model, **option, **FEATURES[name])
    for axes in (("shard",), ("tensor",), ("context",), ("shard", "tensor")):
        cases[f"{' x '.join(axes)}, gpt_oss experts over 2"] = axes_case(axes, **GPT_OSS, **{EXPERT: 2})
        cases[f"{' x '.join(axes)}, llama4 experts over 2"] = axes_case(axes, **LLAMA4, **{EXPERT: 2})
    cases["tensor, qwen3 compiled"] = axes_case(("tensor",), **QWEN3, **COMPILED)
    cases["shard x tensor, qwen3 tied"] = axes_case(("shard", "tensor"), **QWEN3, **FEATURES["tied"])
    for schedule in SCHEDULES:
        option = {"parallelism__pipeline_parallel_schedule": schedule}
        cases[f"pipeline, {schedule}"] = axes_case(("pipeline",), **option)
        cases[f"shard x pipeline, {schedule}"] = axes_case(("shard", "pipeline"), **option)
        option |= {**MOE, EXPERT: 2}
        cases[f"shard x pipeline, experts over 2, {schedule}"] = axes_case(("shard", "pipeline"), **option)
    for method in METHODS:
        option = {"parallelism__context_parallel_rotate_method": method}
        for name in ("masked", "unmasked", "full ac"):
            cases[f"context, {method}, {name}"] = axes_case(("context",), **option, **FEATURES[name])
        cases[f"context, {method}, compiled"] = axes_case(("context",), **option, **COMPILED)
        cases[f"shard x context, {method}"] = axes_case(("shard", "context"), **option)
        cases[f"context, experts over 2, {method}"] = axes_case(("context",), **option, **MOE, **{EXPERT: 2})
    for axis in DEGREES:
        world_size, changes = axes_case((axis,))
        cases[f"{axis}, accumulated"] = (world_size, changes | {"training__local_batch_size": 2})
        cases[f"{axis}, compiled"] = (world_size, changes | COMPILED)
        if axis != "pipeline":
            cases[f"{axis}, tied"] = (world_size, changes | FEATURES["tied"])
    cases["tensor, vocabulary 2051"] = axes_case(("tensor",), model__args__vocab_size=2051)
    uneven = {"model__args__multiple_of": 1, "model__args__ffn_dim_multiplier": 1.01}
    cases["tensor, feed-forward 171"] = axes_case(("tensor",), **uneven)
    cases["pipeline, 5 layers"] = axes_case(("pipeline",), model__args__n_layers=5)
    cases["shard, prefetch 2"] = axes_case(("shard",), model__args__n_layers=4, parallelism__fsdp_prefetch_blocks=2)
    for axes in (("shard",), ("replicate", "shard"), ("shard", "pipeline"), ("shard", "tensor")):
        cases[f"{' x '.join(axes)}, pairs of blocks"] = axes_case(axes, model__args__n_layers=5, **PAIRS)
    cases["shard x tensor, clipped"] = axes_case(("shard", "tensor"), training__max_norm=0.5)
    three: dict[str, object] = {"training__global_batch_size": 6, "training__local_batch_size": 1}
    cases["shard 3"] = (3, three)
    # FSDP and the tensor axis shard the same rows, and neither divides them.
    vocabulary: dict[str, object] = {DEGREES["tensor"]: 2, "model__args__vocab_size": 2053}
    cases["shard 3 x tensor, vocabulary 2053"] = (6, three | vocabulary)
    # Three shards divide neither the four experts of a rank nor their features.
    cases["shard 6, experts over 2"] = (6, {**MOE, **three, EXPERT: 2})
    return cases


# Every axis and pair, one case for each feature, and a triple; test_pipeline.py and test_context.py cover schedules and
# exchange methods, test_gradients.py tied embeddings and vocabularies that the axis does not divide.
QUICK = (
    "one rank", "replicate", "shard, prefetch 2", "pipeline, 5 layers", "replicate x shard", "pipeline x context",
    "replicate x context", "shard x context, ring", "context, tied", "shard x tensor x pipeline, masked",
    "shard, accumulated", "tensor, compiled", "shard 3", "shard 3 x tensor, vocabulary 2053",
    "shard 6, experts over 2", "tensor, feed-forward 171",
    "tensor x context, prediction, padded",
    "shard x tensor, clipped", "pipeline, prediction", "context, qwen3",
    "tensor, prediction", "context, prediction, alltoall masked", "shard x tensor, llama4 experts over 2",
    "tensor, experts", "shard x pipeline, experts over 2", "tensor, olmo3", "tensor, gpt_oss full ac",
    "tensor, qwen2", "context, smollm3", "pipeline, granite", "tensor, gemma3", "tensor, apertus", "context, glm4_moe",
    "tensor, minimax_m2", "tensor, gpt2", "context, gpt2",
    "shard 3, muon", "replicate x shard, muon", "tensor, muon", "shard x tensor, experts over 2, muon",
    "tensor, prediction, z-loss", "pipeline, z-loss", "tensor, muP",
    "context, gpt_oss ring unmasked", "context, gpt_oss alltoall masked", "tensor x context, experts over 2, forced",
    "shard x tensor, qwen3_5", "tensor, qwen3_next experts over 2", "context, qwen3_5 full ac",
    "tensor, kimi_linear", "shard, distilled", "tensor, distilled", "context, distilled",
    "tensor, stored", "context, stored", "pipeline, distilled", "tensor, deepseek_v32",
    "context, deepseek_v32 warm-up",
)  # fmt: skip
