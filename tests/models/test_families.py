"""Each family against transformers: logits, weights, config.json and published sizes.

What only one family has is tested in the file of its name.
"""

import math
from dataclasses import replace
from math import prod

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import (
    test_deepseek_v3,
    test_gpt_oss,
    test_kimi_linear,
    test_llama4,
    test_moe,
    test_olmo3,
    test_olmo_hybrid,
    test_qwen3_5,
)
from tests.models.twins import assert_config_round_trip, assert_logits_equal, assert_round_trip, assert_tensors_are
from tests.support.harness import run_ranks
from tests.support.runs import MODEL, losses, options
from tests.support.trainers import train_all
from tests.support.twins import TYPES, config_of
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.apertus import ApertusArgs
from torchtitan_clone.models.gemma3 import Gemma3Args
from torchtitan_clone.models.gpt2 import GPT2Args
from torchtitan_clone.models.granite import GraniteArgs
from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.mistral import Ministral3Args, MistralArgs
from torchtitan_clone.models.qwen2 import Qwen2Args
from torchtitan_clone.models.qwen3.model import Qwen3Args
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.smollm3 import SmolLM3Args
from torchtitan_clone.ops.tensor_slices import sources_of
from torchtitan_clone.torch_compat import persistent_buffers


def without(sizes, name):
    return {key: value for key, value in sizes.items() if key != name}


SIZES = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 97}
SIZES |= {"max_seq_len": 256}
LATENT = {**SIZES, "n_kv_heads": None, "n_layers": 3}
DEBUGMODELS = {
    name: MODELS[name].flavors["debugmodel"]
    for name in ("kimi_k2", "glm4_moe", "minimax_m2", "mistral4", "deepseek_v32", "glm_moe_dsa")
}
KIMI_K2, GLM4, MINIMAX, MISTRAL4, V3_2, GLM5 = DEBUGMODELS.values()
LINEAR = RopeScaling(rope_type="linear", factor=8.0)
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_seq_len=32, mscale=1.0, mscale_all_dim=1.0)
PARTLY = {"head_dim": 32, "rotary_dim": 16}
# With few heads an indexer gives many keys a score of zero, of which transformers takes any.
INDEX = {"index_n_heads": 16, "index_head_dim": 24, "index_topk": 16}
MISTRAL = MistralArgs(**SIZES, head_dim=32)
SMALL = {
    "qwen2": Qwen2Args(**SIZES),
    "mistral": MISTRAL,
    "ministral3": Ministral3Args(**SIZES, head_dim=32, rope_scaling=YARN),
    "mistral4": replace(MISTRAL4, **LATENT, rope_scaling=YARN, moe=replace(MISTRAL4.moe, hidden_dim=24)),
    "smollm3": SmolLM3Args(**SIZES),
    "granite": GraniteArgs(**SIZES, tied_embeddings=False, attention_multiplier=0.1, logits_scaling=3.0),
    "kimi_k2": replace(KIMI_K2, **LATENT, moe=replace(KIMI_K2.moe, hidden_dim=24)),
    "deepseek_v32": replace(V3_2, **LATENT, **INDEX, rope_scaling=YARN, moe=replace(V3_2.moe, hidden_dim=24)),
    "glm_moe_dsa": replace(GLM5, **LATENT, **INDEX, moe=replace(GLM5.moe, hidden_dim=24)),
    "glm4_moe": replace(GLM4, **SIZES, **PARTLY, moe=replace(GLM4.moe, hidden_dim=24)),
    "gemma3": Gemma3Args(**{**SIZES, "n_layers": 6}, head_dim=32, window=13, query_size=48, rope_scaling=LINEAR),
    "apertus": ApertusArgs(**SIZES, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32)),
    "minimax_m2": replace(MINIMAX, **without(SIZES, "hidden_dim"), **PARTLY, moe=replace(MINIMAX.moe, hidden_dim=24)),
    "gpt2": GPT2Args(**without(SIZES, "n_kv_heads")),
}
"""A small model of each family that is composed of parts of others, by its name."""
LLAMA3 = Llama3Args(**without(SIZES, "hidden_dim"), multiple_of=16, rope_theta=1e4)
QWEN3 = Qwen3Args(**SIZES, head_dim=32)
VARIANTS = {
    **{name: (name, args) for name, args in SMALL.items()},
    "mistral with windows": ("mistral", replace(MISTRAL, layer_types=["window"], window=13, tied_embeddings=True)),
    "ministral3 with windows, tied": (
        "ministral3",
        replace(SMALL["ministral3"], layer_types=["window"], window=13, tied_embeddings=True, query_scale=0.5),
    ),
    "mistral4 with groups, dense layers": (
        "mistral4",
        replace(
            SMALL["mistral4"],
            n_dense_layers=1,
            q_lora_rank=0,
            rope_scaling=replace(YARN, mscale=0.5),
            moe=replace(SMALL["mistral4"].moe, num_groups=4, top_groups=2, score_scale=1.5),
        ),
    ),
    "glm4_moe, no biases, all rotary": (
        "glm4_moe",
        replace(SMALL["glm4_moe"], attention_bias=False, qk_norm=False, rotary_dim=32),
    ),
    "gpt2, exact, not tied": ("gpt2", replace(SMALL["gpt2"], gelu_approximation="none", tied_embeddings=False)),
    "gemma3, all full, not scaled": (
        "gemma3",
        replace(SMALL["gemma3"], layer_types=["full"], rope_scaling=None, tied_embeddings=False),
    ),
    "smollm3, other pattern, tied": ("smollm3", replace(SMALL["smollm3"], no_rope_every=3, tied_embeddings=True)),
    "llama3": ("llama3", replace(LLAMA3, n_kv_heads=None)),
    "llama3, one key": ("llama3", replace(LLAMA3, n_kv_heads=1, tied_embeddings=True)),
    "llama3, scaled": ("llama3", replace(LLAMA3, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=64))),
    "qwen3": ("qwen3", QWEN3),
    "qwen3, multi-head": ("qwen3", replace(QWEN3, n_kv_heads=4, rope_theta=1e4, norm_eps=1e-5)),
    "qwen3, one key, tied": ("qwen3", replace(QWEN3, n_kv_heads=1, tied_embeddings=True)),
    "qwen3_moe": ("qwen3_moe", test_moe.ARGS),
    **{f"deepseek_v3, {name}": ("deepseek_v3", args) for name, args in test_deepseek_v3.VARIANTS.items()},
    **{f"gpt_oss, {name}": ("gpt_oss", args) for name, args in test_gpt_oss.VARIANTS.items()},
    **{f"kimi_linear, {name}": ("kimi_linear", args) for name, args in test_kimi_linear.VARIANTS.items()},
    **{f"llama4, {name}": ("llama4", args) for name, args in test_llama4.VARIANTS.items()},
    **{f"olmo_hybrid, {name}": ("olmo_hybrid", args) for name, args in test_olmo_hybrid.VARIANTS.items()},
    **{name: (name.partition(",")[0], args) for name, args in test_qwen3_5.VARIANTS.items()},
    **test_olmo3.VARIANTS,
}
FAMILIES = dict.fromkeys(family for family, _ in VARIANTS.values())
SIZES_PUBLISHED = {
    ("qwen2", "0.5B"): 494_032_768, ("qwen2", "1.5B"): 1_543_714_304, ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512, ("qwen2", "14B"): 14_770_033_664, ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648, ("mistral", "7B-v0.1"): 7_241_732_096, ("mistral", "7B"): 7_248_023_552,
    ("mistral", "12B"): 12_247_782_400, ("mistral", "24B"): 23_572_403_200, ("mistral", "123B"): 122_610_069_504,
    ("ministral3", "3B"): 3_429_006_336, ("ministral3", "8B"): 8_489_553_920, ("ministral3", "14B"): 13_506_073_600,
    ("mistral4", "119B"): 118_972_826_624,
    ("smollm3", "3B"): 3_075_098_624, ("granite", "2B"): 2_533_531_648, ("granite", "8B"): 8_170_848_256,
    ("kimi_k2", "1T"): 1_026_408_232_448, ("glm4_moe", "106B-A12B"): 110_468_824_832,
    ("gemma3", "270M"): 268_098_176, ("gemma3", "1B"): 999_885_952, ("gemma3", "4B"): 3_880_263_168,
    ("gemma3", "12B"): 11_766_034_176, ("gemma3", "27B"): 27_009_346_304, ("apertus", "8B"): 8_053_338_240,
    ("apertus", "70B"): 70_599_864_640,
    ("gpt2", "124M"): 124_439_808, ("gpt2", "355M"): 354_823_168, ("gpt2", "774M"): 774_030_080,
    ("gpt2", "1.5B"): 1_557_611_200,
    ("deepseek_v32", "671B"): 671_877_944_064, ("glm_moe_dsa", "744B-A40B"): 743_911_218_432,
    ("glm4_moe", "355B-A32B"): 358_337_791_296, ("minimax_m2", "230B-A10B"): 228_689_764_864,
    ("llama3", "1B"): 1_235_814_400, ("llama3", "3B"): 3_212_749_824, ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496, ("llama3", "405B"): 405_853_388_800, ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976, ("qwen3", "4B"): 4_022_468_096, ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200, ("qwen3", "32B"): 32_762_123_264, ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560, ("gpt_oss", "20b"): 20_914_757_184,
    ("gpt_oss", "120b"): 116_829_156_672, ("olmo2", "7B"): 7_298_617_344, ("olmo2", "13B"): 13_716_198_400,
    ("olmo3", "7B"): 7_298_011_136, ("llama4", "17bx16e"): 107_769_861_120, ("llama4", "17bx128e"): 400_711_848_960,
    ("deepseek_v3", "16B"): 15_706_484_224, ("deepseek_v3", "236B"): 235_741_434_880,
    ("deepseek_v3", "671B"): 671_026_419_200,
}  # fmt: skip
"""Elements of the releases' tensors without scales: with biases of routers, and what GLM-4.5 repeats."""


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name):
    family, args = VARIANTS[name]
    assert_logits_equal(MODELS[family], args)


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_of_transformers_return_unchanged(name):
    family, args = VARIANTS[name]
    assert_round_trip(MODELS[family], args)


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_and_configs_are_those_of_transformers(name):
    family, args = VARIANTS[name]
    spec = MODELS[family]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config_of(spec, args))
    if not args.num_experts and family != "olmo_hybrid":  # transformers stacks experts, and joins convolutions
        assert_tensors_are(spec, args, dict(theirs.named_parameters()) | dict(persistent_buffers(theirs)))
    assert_config_round_trip(spec, args)


@pytest.mark.parametrize(("name", "flavor"), [(name, flavor) for name in FAMILIES for flavor in MODELS[name].flavors])
def test_flavors_round_trip_through_configs(name, flavor):
    args = MODELS[name].flavors[flavor]
    assert args.violations() == []
    assert_config_round_trip(MODELS[name], args)


def test_published_sizes():
    flavors = {(name, flavor) for name in SMALL for flavor in MODELS[name].flavors if flavor != "debugmodel"}
    assert flavors <= {*SIZES_PUBLISHED}
    for name, flavor in SIZES_PUBLISHED:
        spec, args = MODELS[name], MODELS[name].flavors[flavor]
        args = replace(args, mtp_depth=1) if name == "glm4_moe" else args
        sources = sources_of(format_of(spec).map_state(spec.state_on_meta(args), args=args))
        assert sum(prod(part.shape) for ((_, part), *_) in sources.values()) == SIZES_PUBLISHED[name, flavor], flavor


def test_debug_flavors_train(corpus, tmp_path):
    """Two steps on two ranks, from the loss of a model that predicts nothing."""
    flavors = dict.fromkeys(f"model__args__{name}" for name in MODEL)
    runs = [options(corpus, tmp_path / name, model__name=name, training__steps=2, **flavors) for name in SMALL]
    for start in range(0, len(runs), 8):  # of whose ranks the harness limits the time
        run_ranks(train_all, 2, runs[start : start + 8])
    for name in SMALL:
        first, second = losses(tmp_path / name).values()
        assert second < first < math.log(2048) + 1, name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (replace(LLAMA3, n_kv_heads=3), "n_kv_heads 3 does not divide n_heads 4"),
        (replace(LLAMA3, n_heads=5), "dim 64 over n_heads 5"),
        (replace(LLAMA3, n_layers=0), "n_layers = 0"),
        (replace(QWEN3, head_dim=31), "head_dim = 31 must be even"),
        (replace(QWEN3, hidden_dim=0), "hidden_dim = 0"),
    ],
)
def test_bad_arguments_are_named(args, message):
    assert message in args.violations()[0]


def test_norms_of_queries_and_keys_start_at_one():
    stds = {name: MODELS["qwen3"].initial_std(QWEN3, name) for name in MODELS["qwen3"].state_on_meta(QWEN3)}
    assert stds["layers.0.attention.q_norm.weight"] is None
    assert stds["layers.0.attention.k_norm.weight"] is None
    assert stds["layers.0.attention.wq.weight"] == 0.02


def test_types_that_transformers_lacks_are_few():
    assert TYPES == {"kimi_k2": "deepseek_v3"}
