"""What config.json of released checkpoints states is read, or refused by the key's name: tests of models/*/hf.py.

released_configs.json has the entries of releases, those of a family in `common`, with `parameters`, the elements of
their weights without scales, where these are known, with `flavor`, the one that they are, and with `refused`, the
words of the error.
"""

import json
import re
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.weights import family_of_config
from torchtitan_clone.models import MODELS
from torchtitan_clone.ops.tensor_slices import sources_of

TABLE = json.loads((Path(__file__).parent / "released_configs.json").read_text())
FAMILY_OF = {name: family for family, table in TABLE.items() for name in table["releases"]}
READ = [name for table in TABLE.values() for name, release in table["releases"].items() if "refused" not in release]
FAMILIES = (
    "qwen2", "mistral", "ministral3", "mistral4", "smollm3", "granite", "kimi_k2", "glm4_moe", "minimax_m2", "gemma3",
    "apertus", "qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid", "gpt2", "deepseek_v32",
    "glm_moe_dsa",
)  # fmt: skip
_OURS = ("flavor", "only_these", "parameters", "refused")


def config_of(name):
    """Returns config.json of a release."""
    table = TABLE[FAMILY_OF[name]]
    release = table["releases"][name]
    common = {} if "only_these" in release else table["common"]
    return {key: deepcopy(value) for key, value in (common | release).items() if key not in _OURS}


def resolve(config):
    """Returns family and arguments of a config.json."""
    spec = family_of_config(config)
    given = {key: value for key, value in format_of(spec).from_config(config).items() if value is not None}
    flavor = next(flavor for flavor in spec.flavors.values() if flavor.rope_scaling is None or "rope_scaling" in given)
    return spec, overlay(flavor, given, where="model.args")


@pytest.mark.parametrize("name", FAMILY_OF)
def test_a_release_resolves_or_is_refused_by_name(name):
    release = TABLE[FAMILY_OF[name]]["releases"][name]
    if refused := release.get("refused"):
        with pytest.raises(ConfigError, match=re.escape(refused)):
            resolve(config_of(name))
        return
    spec, args = resolve(config_of(name))
    assert spec.name == FAMILY_OF[name]
    assert args.violations() == []
    if flavor := release.get("flavor"):
        assert format_of(spec).arguments(args) == format_of(spec).arguments(spec.flavors[flavor])
        return
    sources = sources_of(format_of(spec).map_state(spec.state_on_meta(args), args=args))
    count = sum(prod(part.shape) for ((_, part), *_) in sources.values() if not part.is_optional)
    assert count == release.get("parameters", count)


@pytest.mark.parametrize(
    "name", [name for name in FAMILY_OF if "refused" not in TABLE[FAMILY_OF[name]]["releases"][name]]
)
def test_a_key_that_is_not_known_is_refused_in_each_release(name):
    config = config_of(name)
    text = config.get("text_config", config)
    text["norm_position"] = "after"
    with pytest.raises(ConfigError, match=r"norm_position = 'after': \w+ has no such key"):
        resolve(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None}, "rope_parameters has no llama_4_scaling_beta, which mistral4 needs"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has no llama_4_scaling_beta"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            'mistral4 supports only the type "yarn"',
        ),
        ({"qk_rope_head_dim": 32}, "partial_rotary_factor = 0.5: mistral4 rotates"),
        ({"head_dim": 64}, "head_dim = 64: must be qk_nope_head_dim + qk_rope_head_dim = 128"),
        ({"q_lora_rank": 0}, "q_lora_rank = 0: must be above 0, or null"),
        ({"rope_interleave": False}, "rope_interleave = False, and mistral4 supports only True"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': mistral4 has no such key"),
    ],
)
def test_what_mistral_4_lacks_is_refused_by_name(changes, message):
    config = config_of("mistralai/Mistral-Small-4-119B-2603")
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(config | {"text_config": config["text_config"] | changes})


def test_a_score_of_groups_that_the_format_lacks_is_not_exported():
    spec = MODELS["mistral4"]
    args = spec.flavors["debugmodel"]
    grouped = replace(args, moe=replace(args.moe, num_groups=4, top_groups=2))
    assert format_of(spec).find_format_errors(grouped) == []
    (error,) = format_of(spec).find_format_errors(replace(grouped, moe=replace(grouped.moe, group_score="best")))
    assert 'model.args.moe.group_score = "best": mistral4 has "sum of best two"' in error


def test_there_are_forty_releases_of_all_families():
    assert {*FAMILIES} <= TABLE.keys() <= MODELS.keys()
    assert len(READ) >= 40
