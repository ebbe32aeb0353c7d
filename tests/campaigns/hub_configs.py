"""Try configurations of published models against transformers: equal logits, or an error that names the key.

    python tests/campaigns/hub_configs.py                # the configurations of RELEASES, shrunk to tiny widths
    python tests/campaigns/hub_configs.py --mutations    # also each key of each family: absent, null, and other values
    python tests/campaigns/hub_configs.py --only llama

Each configuration has the keys of a release with small sizes. transformers draws weights and saves them; both
programs read the folder with that config.json, and their logits are compared. Outcomes: "equal"; "refused" by an
error that names the key; "theirs fails" where transformers cannot build or read the model, so that nothing can be
compared; "UNNAMED" for an error that names no key, and "DIFFERENT" for other logits, which both exit with 1.
"""

import argparse
import contextlib
import copy
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

from tests.hub.test_released_configs import TABLE, config_of
from tests.support import twins  # registers classes that transformers does not find
from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.keys import ONLY_VALUES, WITHOUT_EFFECT
from torchtitan_clone.run.trained import find_trained
from torchtitan_clone.tools.trained_model import read_model

Config = dict[str, Any]
LAYERS, TOKENS, VOCABULARY = 4, 48, 128
_WRONG = ("DIFFERENT", "UNNAMED")
WEIGHT_STD, TOLERANCE = 0.08, 2e-4
"""Of weights; and of the largest difference of two logits, in standard deviations of the logits."""


def llama(**keys: Any) -> Config:
    common = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "transformers_version": "4.40.0", "max_position_embeddings": 64,
    }  # fmt: skip
    return {**common, **keys}


def qwen3(**keys: Any) -> Config:
    return llama(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, attention_dropout=0.0,
        head_dim=16, num_key_value_heads=2, max_window_layers=28, rope_scaling=None, rope_theta=1000000,
        sliding_window=None, use_sliding_window=False, rms_norm_eps=1e-6, **keys,
    )  # fmt: skip


def qwen3_moe(**keys: Any) -> Config:
    return qwen3(
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=16, num_experts=8, output_router_logits=False,
        num_experts_per_tok=3, router_aux_loss_coef=0.001,
        **{"norm_topk_prob": True, **keys},
    ) | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}  # fmt: skip


def olmo(kind: str, **keys: Any) -> Config:
    name = f"Olm{kind.removeprefix('olm')}ForCausalLM"
    return llama(**{
        "architectures": [name], "model_type": kind, "attention_bias": False, "attention_dropout": 0.0,
        "pad_token_id": 3, "rope_theta": 500000, "rope_scaling": None, "rms_norm_eps": 1e-6, **keys,
    })  # fmt: skip


def deepseek(version: int, **keys: Any) -> Config:
    common = llama(
        architectures=[f"DeepseekV{version}ForCausalLM"], model_type=f"deepseek_v{version}", attention_bias=False,
        attention_dropout=0.0, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=16, moe_layer_freq=1, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=3, num_key_value_heads=4, rope_theta=10000, rms_norm_eps=1e-6,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekConfig"},
        rope_scaling={
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip
    if version == 3:
        of_version = {
            "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
        }  # fmt: skip
    else:
        of_version = {
            "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "n_shared_experts": 2, "aux_loss_alpha": 0.001, "seq_aux": True,
            "pretraining_tp": 1, "ep_size": 1,
        }  # fmt: skip
    return {**common, **of_version, **keys}


def llama4(**keys: Any) -> Config:
    return llama(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text", attention_bias=False, attention_chunk_size=16,
        attention_dropout=0.0, head_dim=8, intermediate_size_mlp=48, num_key_value_heads=2, num_experts_per_tok=1,
        num_local_experts=4, output_router_logits=False, pad_token_id=3, rope_theta=500000.0, floor_scale=8,
        router_aux_loss_coef=0.001, router_jitter_noise=0.0, for_llm_compressor=False, attn_scale=0.1,
        **{
            "attn_temperature_tuning": True, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layers": [],
            "rope_scaling": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}, **keys,
        },
    )  # fmt: skip


def gpt_oss(**keys: Any) -> Config:
    return llama(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", attention_bias=True, attention_dropout=0.0,
        experts_per_token=3, num_experts_per_tok=3, head_dim=16, initial_context_length=16, num_key_value_heads=2,
        num_local_experts=8, output_router_logits=False, pad_token_id=3, rope_theta=150000, router_aux_loss_coef=0.9,
        sliding_window=8, swiglu_limit=7.0,
        **{
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "rope_type": "yarn", "truncate": False,
            },
            **keys,
        },
    )  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OLD = {"pretraining_tp": 1, "rope_scaling": None, "pad_token_id": 0}
GQA = {"num_key_value_heads": 2}
RELEASES: dict[str, Config] = {
    "llama 1 7B": llama(max_sequence_length=64, pad_token_id=0, rms_norm_eps=1e-6),
    "llama 2 7B": llama(**OLD, num_key_value_heads=4),
    "llama 2 70B": llama(**OLD, **GQA),
    "llama code 7B": llama(pretraining_tp=1, num_key_value_heads=4, rope_theta=1000000, rope_scaling=None),
    "llama code 70B": llama(pretraining_tp=1, **GQA, rope_theta=10000, attention_bias=False, attention_dropout=0.0),
    "llama 3 8B": llama(**GQA, rope_theta=500000.0, attention_bias=False, rope_scaling=None, pretraining_tp=1),
    "llama 3.1 8B": llama(**GQA, rope_theta=5e5, rope_scaling=LLAMA3, mlp_bias=False, eos_token_id=[1, 2, 3]),
    "llama 3.2 1B": llama(
        **GQA, rope_theta=5e5, rope_scaling={**LLAMA3, "factor": 32.0}, tie_word_embeddings=True, head_dim=8
    ),
    "llama 3.3 70B": llama(**GQA, rope_theta=5e5, rope_scaling=LLAMA3, head_dim=8, dtype="bfloat16"),
    "llama 3 of transformers 5": llama(
        **GQA, rope_parameters={**LLAMA3, "rope_theta": 5e5}, pad_token_id=None, dtype="float32", head_dim=8
    ),
    "llama yi 6B": llama(**GQA, rope_theta=5000000.0, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=None),
    "llama tinyllama": llama(**GQA, pretraining_tp=1, rope_scaling=None, rope_theta=10000.0, attention_bias=False),
    "llama smollm": llama(
        **GQA, rope_interleaved=False, is_llama_config=True, tie_word_embeddings=True, rope_theta=100000
    ),
    "llama smollm, cleaned": llama(**GQA, tie_word_embeddings=True, rope_theta=100000),
    "llama deepseek 7B": llama(pretraining_tp=1, num_key_value_heads=4, rms_norm_eps=1e-6, rope_scaling=None),
    "llama deepseek coder": llama(rope_scaling={"factor": 4.0, "type": "linear"}, rope_theta=100000),
    "llama vicuna long": llama(rope_scaling={"factor": 8.0, "type": "dynamic"}),
    "llama yarn": llama(rope_scaling={**YARN, "type": "yarn", "finetuned": True, "rope_type": "yarn"}),
    "llama yarn, old": llama(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "llama yarn, attention factor": llama(rope_scaling={**YARN, "attention_factor": 1.5, "beta_fast": 16}),
    "llama two original lengths": llama(**GQA, rope_scaling=LLAMA3, original_max_position_embeddings=32),
    "llama one original length": llama(
        **GQA, rope_scaling={"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=32
    ),
    "llama mistral nemo like": llama(**GQA, head_dim=16, rope_theta=1000000.0),
    "llama mistral window": llama(**GQA, sliding_window=8, rope_theta=10000.0),
    "llama biases": llama(attention_bias=True, mlp_bias=True),
    "llama mlp bias": llama(mlp_bias=True),
    "llama head_dim null": llama(head_dim=None, num_key_value_heads=None),
    "llama gelu": llama(hidden_act="gelu"),
    "llama partial rotary": llama(partial_rotary_factor=0.5),
    "llama partial rotary inside": llama(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "llama mscale": llama(rope_scaling={**LLAMA3, "mscale_all_dim": 1.0}),
    "llama bidirectional": llama(is_causal=False),
    "llama softcapping": llama(final_logit_softcapping=30.0, attn_logit_softcapping=50.0),
    "llama multipliers": llama(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22),
    "llama cohere": llama(logit_scale=0.0625, model_type="cohere"),
    "llama dropout": llama(attention_dropout=0.1),
    "llama unsloth": llama(**GQA, unsloth_fixed=True, unsloth_version="2024.9", rope_scaling=LLAMA3, rope_theta=5e5),
    "llama gptq": llama(quantization_config={"quant_method": "gptq", "bits": 4}),
    "qwen2.5 7B": llama(**GQA, model_type="qwen2", use_sliding_window=False, sliding_window=131072, rope_theta=1e6),
    "mistral 7B": llama(model_type="mistral", sliding_window=8, **GQA),
    "qwen3 0.6B": qwen3(tie_word_embeddings=True),
    "qwen3 8B": qwen3(),
    "qwen3 8B, yarn": qwen3() | {"rope_scaling": YARN},
    "qwen3 32B, layer types": qwen3(layer_types=["full_attention"] * LAYERS),
    "qwen3 window": qwen3() | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3 biases": qwen3() | {"attention_bias": True},
    "qwen3_moe 30B-A3B": qwen3_moe(),
    "qwen3_moe 235B-A22B": qwen3_moe() | {"rope_theta": 5000000.0},
    "qwen3_moe not normalized": qwen3_moe(norm_topk_prob=False),
    "qwen3_moe dense layers": qwen3_moe() | {"mlp_only_layers": [0]},
    "qwen3_moe sparse step": qwen3_moe() | {"decoder_sparse_step": 2},
    "olmo2 7B": olmo("olmo2", num_key_value_heads=4),
    "olmo2 32B": olmo("olmo2", **GQA),
    "olmo2 clip": olmo("olmo2", clip_qkv=8.0),
    "olmo3 7B": olmo("olmo3", sliding_window=8, layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "olmo3 32B": olmo(
        "olmo3", **GQA, sliding_window=8,
        rope_scaling={**YARN, "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "olmo3 other theta": olmo("olmo3", sliding_window=8, rope_theta=10000),
    "olmo3 of transformers 5": olmo(
        "olmo3", sliding_window=8,
        rope_parameters={
            "full_attention": {**YARN, "rope_theta": 5e5, "attention_factor": 1.2, "truncate": True},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "deepseek V2": deepseek(2) | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "deepseek V2-Lite": deepseek(2) | {"q_lora_rank": None},
    "deepseek V3": deepseek(3),
    "deepseek V3, not scaled": deepseek(3) | {"rope_scaling": None},
    "deepseek moonlight": deepseek(3) | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_scaling": None},
    "deepseek V3, llama3 mscale": deepseek(3) | {"rope_scaling": {**LLAMA3, "mscale_all_dim": 1.0}},
    "deepseek V3, other theta": deepseek(3) | {"rope_theta": 50000.0, "rms_norm_eps": 1e-5},
    "llama4 scout": llama4(),
    "llama4 maverick": llama4(use_qk_norm=False, rope_scaling=None, interleave_moe_layer_step=2),
    "llama4 moe_layers": llama4(moe_layers=[0, 3]),
    "llama4 no tuning": llama4(attn_temperature_tuning=False, no_rope_layer_interval=2),
    "gpt_oss 20b": gpt_oss(),
    "gpt_oss full": gpt_oss(layer_types=["full_attention"] * LAYERS, rope_scaling=None),
    "gpt_oss experts": gpt_oss() | {"experts_per_token": 2},
}  # fmt: skip


_SMALL: Config = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "model_max_length": 64, "original_max_position_embeddings": 16, "sliding_window": 8, "rotary_dim": 8,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 3, "num_experts_per_token": 3, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "num_heads": 4, "full_attn_layers": [4], "kda_layers": [1, 2, 3], "n_embd": 32,
    "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "n_group": 2, "topk_group": 1, "index_topk": 16,
    "index_n_heads": 16, "index_head_dim": 24,  # of many keys with a score of zero transformers takes any
}  # fmt: skip


def shrunk(config: Config) -> Config:
    """Returns a configuration with small sizes, also in its tables."""
    small: Config = {}
    for key, value in config.items():
        if isinstance(value, dict):
            small[key] = shrunk(value)
        elif isinstance(value, list):
            small[key] = _SMALL.get(key, value[:LAYERS])
        elif value is not None:
            small[key] = 3 if key.endswith("_token_id") else _SMALL.get(key, value)
        else:
            small[key] = None
    if "kv_lora_rank" in small:  # each head has keys of its own
        small |= {"num_key_value_heads": small["num_attention_heads"], "head_dim": 32}
    return small


def of_family(family: str) -> Config:
    """Returns the first configuration of a family that resolves, of its text model, as if its weights were not fp8."""
    config = config_of(next(name for name, each in TABLE[family]["releases"].items() if "refused" not in each))
    return shrunk({key: value for key, value in config.get("text_config", config).items() if "quantization" not in key})


FAMILIES = {family: of_family(family) for family in TABLE if family not in twins.TYPES}
"""Configurations of families with releases in a table, except those that transformers has no class for."""
RELEASES |= {f"{family}, released": config for family, config in FAMILIES.items()}


def build_folder(folder: Path, config: Config) -> None:
    """Saves random weights of the configuration, with the configuration as it is given. Raises what transformers does.

    Layers that transformers would not build are left out; of an unknown model type weights of llama are saved.
    """
    config = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, **config}
    theirs = theirs_of(copy.deepcopy(config))  # transformers changes the tables in it
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def theirs_of(config: Config) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name and tensor.is_floating_point():
            with torch.no_grad():
                tensor.normal_(mean=float("norm" in name), std=WEIGHT_STD)
    return model


def read_theirs(folder: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(tokens_BT).logits


def read_ours(folder: Path, tokens_BT: torch.Tensor) -> torch.Tensor:
    model = read_model(find_trained(folder), dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        return model(tokens_BT, positions_BT=torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT))


def compare(folder: Path) -> tuple[str, str]:
    """Returns the outcome of a folder, and the error or the largest difference."""
    tokens_BT = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    try:
        ours = read_ours(folder, tokens_BT)
    except ConfigError as error:
        message = str(error).replace(f"{folder}", "").replace("\n", " ")
        return ("refused" if "config.json" in message else "UNNAMED"), message
    try:
        theirs = read_theirs(folder, tokens_BT)
    except Exception as error:  # noqa: BLE001, of any class of the library's dependencies
        return "theirs fails", f"{type(error).__name__}: {error}".replace("\n", " ")
    difference = ((ours - theirs).abs().max() / theirs.std()).item()
    return ("equal" if difference < TOLERANCE else "DIFFERENT"), f"{difference:.1e} of a standard deviation"


def outcome(config: Config) -> tuple[str, str]:
    """Returns the same for a configuration."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "model"
        try:
            build_folder(folder, config)
        except Exception as error:  # of any class of the library's dependencies
            if config.get("model_type") in transformers.CONFIG_MAPPING:
                return "theirs fails", f"{type(error).__name__}: {error}".replace("\n", " ")
            raise
        return compare(folder)


BASES = {
    "llama": RELEASES["llama 3.1 8B"], "qwen3": RELEASES["qwen3 8B, yarn"], "qwen3_moe": RELEASES["qwen3_moe 30B-A3B"],
    "olmo2": RELEASES["olmo2 32B"], "olmo3": RELEASES["olmo3 32B"], "deepseek_v2": RELEASES["deepseek V2"],
    "deepseek_v3": RELEASES["deepseek V3"], "llama4": RELEASES["llama4 scout"], "gpt_oss": RELEASES["gpt_oss 20b"],
    **FAMILIES,
}  # fmt: skip
ABSENT = object()
_ODD_KEYS = (
    "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier", "final_logit_softcapping",
    "layer_types", "logit_scale", "logits_scaling", "num_experts", "num_local_experts", "num_mtp_layers",
    "original_max_position_embeddings", "per_layer_config", "qk_layernorm", "query_pre_attn_scalar",
    "residual_multiplier", "rope_interleave", "rope_parameters", "scale_attn_by_inverse_layer_idx", "sliding_window",
    "use_bidirectional_attention", "use_qk_norm",
)  # fmt: skip


def mutations(base: Config) -> Iterator[tuple[str, Config]]:
    """Yields configurations that differ in one key: absent, null, of another type, and with other values."""
    scaling = base.get("rope_scaling") or base.get("rope_parameters") or {}
    for key in [*(key for key in base if key != "model_type"), *_ODD_KEYS, *ONLY_VALUES]:
        for value in (ABSENT, None, *_other_values(base.get(key))):
            changed = {name: each for name, each in base.items() if name != key}
            text = "absent" if value is ABSENT else repr(value)
            yield f"{key} = {text}", changed | ({} if value is ABSENT else {key: value})
    for key in [*scaling, "attention_factor", "truncate", "mscale", "mscale_all_dim", "type", "partial_rotary_factor"]:
        for value in (ABSENT, None, 0, 0.5, 2.0, True, "yarn"):
            changed = {name: each for name, each in scaling.items() if name != key}
            table = changed | ({} if value is ABSENT else {key: value})
            for place in ("rope_scaling", "rope_parameters"):
                others = {name: each for name, each in base.items() if name not in ("rope_scaling", "rope_parameters")}
                text = "absent" if value is ABSENT else repr(value)
                yield f"{place}: {key} = {text}", {**others, place: table}


def _other_values(value: object) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [0, 2 * value, 0.5]
    return [True, 1, [], "none", {}]


_NUMBERS = {"aux_loss_alpha", "initializer_range", "router_aux_loss_coef", "temperature", "top_p", "typical_p"}
_FLAGS = {
    "_attn_implementation_autoset", "do_sample", "is_decoder", "output_hidden_states", "output_router_logits",
    "output_scores", "remove_invalid_values", "return_dict", "return_dict_in_generate", "seq_aux", "tf_legacy_loss",
    "tie_encoder_decoder", "torchscript", "unsloth_fixed", "use_bfloat16", "use_cache",
}  # fmt: skip
_TEXTS = {
    "_name_or_path", "name_or_path", "_commit_hash", "finetuning_task", "prefix",
    "tokenizer_class", "unsloth_version",
}  # fmt: skip
_TYPED = {
    "transformers_version": "4.40.0",
    "architectures": ["NoSuchModel"], "auto_map": {"AutoConfig": "nothing.Config"}, "chunk_size_feed_forward": 3,
    "dtype": "float16", "torch_dtype": "float16", "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0},
    "problem_type": "regression", "attn_implementation": "eager", "_attn_implementation": "eager",
    "experts_implementation": "eager", "cache_implementation": "static", "bad_words_ids": [[5]],
    "begin_suppress_tokens": [5], "suppress_tokens": [5], "exponential_decay_length_penalty": [5, 1.5],
    "early_stopping": True, "num_return_sequences": 1, "num_beam_groups": 1, "diversity_penalty": 0.0,
}  # fmt: skip


def without_effect(base: Config) -> Iterator[tuple[str, Config]]:
    """Yields one configuration with odd values of all keys that are said to have no effect."""
    odd: Config = {
        **dict.fromkeys(WITHOUT_EFFECT, 5), **dict.fromkeys(_NUMBERS, 0.3), **dict.fromkeys(_FLAGS, True),
        **dict.fromkeys(_TEXTS, "odd"), **_TYPED,
    }  # fmt: skip
    yield "keys without effect", {**base, **{key: odd[key] for key in sorted(odd)}, "num_labels": 3}


def run(cases: Mapping[str, Config], *, quiet: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, config in cases.items():
        found, why = outcome(config)
        counts[found] += 1
        if found in _WRONG or not quiet:
            print(f"{found:12} {name}: {why[:170]}", flush=True)
    return counts


def main() -> int:
    """Runs the cases that the command line selects; returns 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", action="store_true", help="also change each key of each family")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    cases = dict(RELEASES)
    if options.mutations:
        for family, base in BASES.items():
            cases |= {f"{family}, {text}": config for text, config in mutations(base)}
            cases |= {f"{family}, {text}": config for text, config in without_effect(base)}
    cases = {name: config for name, config in cases.items() if options.only in name}
    silence()
    with warnings.catch_warnings(), contextlib.redirect_stderr(None if not options.mutations else sys.stderr):
        counts = run(cases, quiet=options.mutations)
    print(f"{len(cases)} configurations: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}")
    return 1 if any(counts[name] for name in _WRONG) else 0


def silence() -> None:
    """Keeps warnings of transformers about what the cases contain from the terminal."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
