"""Tests of kimi_linear/model.py and kimi_linear/hf.py against transformers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.kimi_linear.model import ROUTER, KimiLinearArgs
from torchtitan_clone.models.spec import active_parameters
from torchtitan_clone.optim.groups import _is_matrix, _suits_matrix_optimizers
from torchtitan_clone.parallel.init_weights import init_weights

SPEC = MODELS["kimi_linear"]
HUB = format_of(SPEC)
ARGS = KimiLinearArgs(
    dim=64, n_layers=4, n_heads=4, hidden_dim=96, vocab_size=97, max_seq_len=256,
    layer_types=["linear", "linear", "full", "linear"], linear_key_heads=2, linear_value_heads=2, linear_key_dim=16,
    linear_value_dim=16, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    moe=replace(ROUTER, num_experts=8, top_k=3, hidden_dim=24, num_groups=2, score_scale=2.446),
)  # fmt: skip
VARIANTS = {
    "": ARGS,
    "two dense layers, other sizes": replace(
        ARGS, n_dense_layers=2, linear_conv=3, linear_key_dim=24, linear_value_dim=24
    ),
}


def test_published_sizes():
    args = SPEC.flavors["48B-A3B"]
    config = AutoConfig.for_model(**HUB.to_config(replace(args, n_layers=4, layer_types=args.layer_types[:4])))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    of_four = SPEC.state_on_meta(replace(args, n_layers=4, layer_types=args.layer_types[:4]))
    biases = 3 * 256  # buffers of transformers
    assert sum(x.numel() for x in of_four.values()) == theirs.num_parameters() + biases
    state = SPEC.state_on_meta(args)
    counts = [sum(x.numel() for x in tensors.values()) for tensors in (state, active_parameters(args, state))]
    assert counts == [pytest.approx(49.1e9, rel=0.002), pytest.approx(3.5e9, rel=0.01)]
    assert [layer for layer in range(27) if not args.is_linear(layer)] == [3, 7, 11, 15, 19, 23, 26]


def test_a_tied_output_is_not_exported():
    with pytest.raises(ConfigError, match="tied_embeddings = true: kimi_linear has an output of its own"):
        HUB.map_state({}, args=replace(ARGS, tied_embeddings=True))


LISTS = {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attn_config": LISTS | {"kda_layers": [1, 2, 3]}}, "must have each layer from 1 to 4 once"),
        ({"linear_attn_config": LISTS | {"kda_layers": [0, 1, 2, 4]}}, "kda_layers"),
        (
            {"linear_attn_config": LISTS | {"gate_lower_bound": -5.0}},
            "gate_lower_bound = -5.0: kimi_linear has no",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types .* differs from the lists of linear_attn_config"),
        ({"linear_head_dim": 32}, "linear_head_dim = 32: differs from head_dim 16"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "must be dense first, then sparse"),
        (
            {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2},
            "dense_replace = 1: differs from mlp_layer_types",
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True, and kimi_linear supports only False"),
        ({"q_lora_rank": 16}, "q_lora_rank = 16, and kimi_linear supports only None"),
        ({"mla_use_nope": False}, "mla_use_nope = False"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ({"head_dims": 2}, "head_dims = 2: kimi_linear has no such key"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    assert HUB.from_config(HUB.to_config(ARGS) | {"linear_attn_config": LISTS}) == HUB.arguments(ARGS)
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)


def test_layers_default_to_those_of_transformers():
    """Every fourth layer but the first, counted from 0, where no list says which."""
    config = HUB.to_config(replace(ARGS, n_layers=8, layer_types=["linear"]))
    del config["linear_attn_config"]
    assert HUB.from_config(config)["layer_types"] == ["linear"] * 4 + ["full"] + ["linear"] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_value_heads": 4}, "linear_value_heads = 4: must be linear_key_heads 2"),
        ({"linear_value_dim": 32}, "linear_value_dim = 32: must be linear_key_dim 16"),
        ({"n_kv_heads": 2}, "n_kv_heads = 2: latent attention has as many as n_heads"),
        ({"n_dense_layers": 4}, "n_dense_layers = 4: must be below n_layers 4"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    assert message in replace(ARGS, **changes).violations()[0]


def test_decays_and_convolutions_are_neither_decayed_nor_matrices():
    parameters = dict(SPEC.build(replace(ARGS, linear_key_heads=64, linear_value_heads=64)).named_parameters())
    decays = [name for name in parameters if ".decay." in name]
    convolutions = [name for name in parameters if "_conv." in name]
    assert (len(decays), len(convolutions)) == (6, 9)
    assert not any(_is_matrix(name, parameters[name]) for name in decays)
    assert not any(_suits_matrix_optimizers(name, parameters[name]) for name in decays + convolutions)
    init_weights(parameters, seed=0, std_of=partial(SPEC.initial_std, ARGS))
    A, steps = (parameters[f"layers.0.attention.decay.{name}"].detach() for name in ("A_log", "dt_bias"))
    assert A.exp().aminmax() == (pytest.approx(1.0, abs=0.5), pytest.approx(16.0, abs=1.0))
    assert F.softplus(steps).aminmax() == (pytest.approx(1e-3, rel=0.5), pytest.approx(1e-1, rel=0.5))


def test_a_packed_document_gets_the_logits_that_it_gets_alone():
    torch.manual_seed(0)
    model = SPEC.build(ARGS)
    tokens_BT, lengths = torch.randint(0, 97, (1, 150)), (37, 1, 2, 110)
    positions_BT = torch.cat([torch.arange(n) for n in lengths])[None]
    documents_BT = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    with torch.no_grad():
        packed = model(tokens_BT, positions_BT=positions_BT, documents_BT=documents_BT)
        parts = zip(packed.split(lengths, 1), tokens_BT.split(lengths, 1), positions_BT.split(lengths, 1), strict=True)
        for found, tokens, positions in parts:
            torch.testing.assert_close(found, model(tokens, positions_BT=positions), rtol=1e-5, atol=1e-5)
