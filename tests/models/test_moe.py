"""The mixture of experts against a loop over tokens, and Qwen3-MoE (qwen3/hf.py) against transformers."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from tests.models.twins import assert_logits_equal
from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.weights import open_initial_weights
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.moe import MoE, MoEArgs, Router
from torchtitan_clone.models.qwen3.model import Qwen3MoEArgs
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of

SPEC = MODELS["qwen3_moe"]
MOE = MoEArgs(num_experts=8, top_k=3, hidden_dim=24)
ARGS = Qwen3MoEArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96, vocab_size=97, moe=MOE
)  # fmt: skip
VARIANTS = {
    "softmax": MOE,
    "not normalized": replace(MOE, normalize_scores=False, score_scale=2.5),
    "sigmoid": replace(MOE, score_func="sigmoid"),
    "groups": replace(MOE, score_func="sigmoid", num_groups=4, top_groups=2),
    "shared experts": replace(MOE, num_shared_experts=2),
    "one expert": replace(MOE, top_k=1),
    "all experts": replace(MOE, top_k=8),
    "bias": replace(MOE, expert_bias=True),
    "bias in groups": replace(MOE, score_func="sigmoid", num_groups=4, top_groups=2, expert_bias=True),
}


def random_layer(args):
    torch.manual_seed(0)
    layer = MoE(args, dim=16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if args.expert_bias:
        layer.router.expert_bias.normal_(std=0.3)
    return layer


def by_token(layer, x_BTD, args):
    """Computes the layer one token and one expert at a time."""
    outputs = []
    for x_D in x_BTD.flatten(0, 1):
        logits_E = layer.router.weight @ x_D
        scores_E = logits_E.softmax(0) if args.score_func == "softmax" else logits_E.sigmoid()
        choice_E = scores_E.detach() + (layer.router.expert_bias if args.expert_bias else 0.0)
        groups = choice_E.view(args.num_groups, -1)
        best = groups.sort(descending=True).values[:, :2].sum(1).argsort(descending=True)[: args.top_groups].tolist()
        size = groups.shape[1]
        allowed = [expert for expert in range(args.num_experts) if expert // size in best]
        chosen = sorted(allowed, key=lambda expert: -choice_E[expert].item())[: args.top_k]
        total = sum(scores_E[expert] for expert in chosen) if args.normalize_scores else 1
        out_D = torch.zeros_like(x_D)
        for expert in chosen:
            w1, w2, w3 = layer.experts.w1[expert], layer.experts.w2[expert], layer.experts.w3[expert]
            out_D = out_D + w2 @ (F.silu(w1 @ x_D) * (w3 @ x_D)) * (scores_E[expert] / total * args.score_scale)
        outputs.append(out_D if layer.shared_experts is None else out_D + layer.shared_experts(x_D))
    return torch.stack(outputs).view_as(x_BTD)


@pytest.mark.parametrize("args", VARIANTS.values(), ids=VARIANTS)
def test_outputs_and_gradients_equal_those_of_single_tokens(args):
    assert args.violations(dim=16) == []
    layer = random_layer(args)
    x_BTD = torch.randn(2, 9, 16, requires_grad=True)
    grad_BTD = torch.randn(2, 9, 16)
    wanted = [x_BTD, *layer.parameters()]
    grads = torch.autograd.grad(layer(x_BTD), wanted, grad_BTD)
    expected_BTD = by_token(layer, x_BTD, args)
    torch.testing.assert_close(layer(x_BTD), expected_BTD, rtol=1e-5, atol=5e-6)
    for grad, expected in zip(grads, torch.autograd.grad(expected_BTD, wanted, grad_BTD), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_a_bias_is_state_in_float32_of_the_name_on_the_hub():
    args = replace(ARGS, moe=replace(MOE, expert_bias=True))
    name = "layers.1.feed_forward.router.expert_bias"
    added = SPEC.state_on_meta(args).keys() - SPEC.state_on_meta(ARGS).keys()
    assert added == {name, name.replace("1", "0")}
    (part,) = format_of(SPEC).slices({name: (8,)}, args=ARGS)[name]
    assert (part.source, part.shape) == ("model.layers.1.mlp.gate.e_score_correction_bias", (8,))
    with torch.device("meta"):
        model = SPEC.build(args).bfloat16()
    model.to_empty(device="cpu").init_buffers()
    bias_E = model.get_buffer(name)
    assert bias_E.dtype == torch.float32
    assert torch.equal(bias_E, torch.zeros(8))


def test_scores_are_computed_in_float32():
    router = Router(MOE, dim=16).bfloat16()
    torch.nn.init.normal_(router.weight)
    x_ND = torch.randn(5, 16).bfloat16()
    scores_NK, _, _ = router(x_ND[None])
    expected_NE = (x_ND[None].float() @ router.weight.float().T).softmax(-1)
    top_NK = expected_NE.topk(3).values
    assert scores_NK.dtype == torch.float32
    torch.testing.assert_close(scores_NK, top_NK / top_NK.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    "changes", [{}, {"normalize_scores": False}, {"top_k": 1}], ids=["", "not normalized", "top 1"]
)
def test_logits_equal_transformers(changes):
    assert_logits_equal(SPEC, replace(ARGS, moe=replace(MOE, **changes)))


def test_missing_experts_are_named(tmp_path):
    state = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in SPEC.state_on_meta(ARGS).items()}
    sources = sources_of(format_of(SPEC).map_state(state, args=ARGS))
    stored = {name: assemble_source(users, read=state.get, dtype=torch.float32) for name, users in sources.items()}
    lost = [f"layers.0.mlp.experts.{index}." for index in (1, 4, 5, 6)] + ["layers.1.mlp.experts.7.up_proj"]
    save_file(
        {name: tensor for name, tensor in stored.items() if not any(part in name for part in lost)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(format_of(SPEC).to_config(ARGS)))
    with pytest.raises(ConfigError) as error:
        open_initial_weights(tmp_path, spec=SPEC, model_args=ARGS, state=state)
    of_layers = [
        *[f"model.layers.0.mlp.experts.{{1, 4-6}}.{name}_proj.weight" for name in ("gate", "down", "up")],
        "model.layers.1.mlp.experts.7.up_proj.weight",
    ]
    assert str(error.value) == f"{tmp_path}: lacks {', '.join(of_layers)}"


def test_another_number_of_experts_is_named(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    args = replace(ARGS, moe=replace(MOE, num_experts=4))
    (tmp_path / "config.json").write_text(json.dumps(format_of(SPEC).to_config(args)))
    with pytest.raises(ConfigError) as error:
        open_initial_weights(tmp_path, spec=SPEC, model_args=ARGS, state=SPEC.state_on_meta(ARGS))
    rule = "model.args.moe.num_experts is 8, but config.json asks for 4; set model.args.moe.num_experts = 4"
    assert str(error.value) == f"{tmp_path}: {rule}"


def test_only_active_experts_count_as_flops():
    parameters = SPEC.state_on_meta(ARGS)
    flops = SPEC.flops_per_token(ARGS, parameters=parameters, seq_len=64, frozen_layers=0)
    all_args = replace(ARGS, moe=replace(MOE, top_k=8))
    all_flops = SPEC.flops_per_token(all_args, parameters=parameters, seq_len=64, frozen_layers=0)
    assert all_flops - flops == 6 * 2 * 5 * 3 * 64 * 24  # 2 layers, 5 idle experts of 3 matrices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k = 9: must be at most 8"),
        ({"top_k": 0}, "model.args.moe.top_k = 0: must be from 1 to 65,536"),
        ({"num_groups": 3}, "num_groups = 3: must divide num_experts"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups = 5: must be at most num_groups 4"),
        ({"num_groups": 8, "top_groups": 2}, "top_k = 3: must be at most 2"),
        ({"hidden_dim": 20}, "hidden_dim = 20: must be a multiple of 8"),
        ({"num_shared_experts": -1}, "num_shared_experts = -1"),
        ({"bias_update_rate": -0.1}, "bias_update_rate = -0.1"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    assert message in replace(ARGS, moe=replace(MOE, **changes)).violations()[0]


def test_heads_without_a_size_have_that_of_transformers():
    theirs = Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    config = theirs.to_dict()
    assert "head_dim" not in config
    assert format_of(SPEC).from_config(config)["head_dim"] == 16
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        format_of(SPEC).from_config({key: value for key, value in config.items() if key != "hidden_size"})


@pytest.mark.parametrize("score_func", ["sigmoid", "softmax"])
def test_experts_are_chosen_where_their_scores_are_all_one_or_zero(score_func):
    router = Router(MoEArgs(num_experts=4, top_k=2, hidden_dim=8, score_func=score_func), dim=4)
    with torch.no_grad():
        router.weight.copy_(torch.diag(torch.tensor([18.0, 30.0, 24.0, -2000.0])))
        for sign, expected in ((1.0, [1, 2]), (-200.0, [3, 0])):
            _, experts_BTK, _ = router(torch.full((1, 1, 4), sign))
            assert experts_BTK.flatten().tolist() == expected


def test_every_expert_has_tensors_of_its_own_on_the_hub():
    name = "layers.1.feed_forward.experts.w2"
    slices = format_of(SPEC).slices({name: (8, 64, 24)}, args=ARGS)[name]
    assert [part.source for part in slices] == [
        f"model.layers.1.mlp.experts.{index}.down_proj.weight" for index in range(8)
    ]
    assert {part.shape for part in slices} == {(64, 24)}


CHANGES = [
    {"num_shared_experts": 2}, {"score_func": "softmax"}, {"score_func": "sigmoid"}, {"normalize_scores": False},
    {"score_scale": 2.0}, {"score_inputs": True}, {"score_inputs": False}, {"num_groups": 2, "top_groups": 2},
    {"expert_bias": True}, {"biases": True}, {"swiglu_limit": 3.0}, {"router_z": 0.1, "batch_balance": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_model_returns_from_an_export_or_is_one_error(family, changes):
    spec = MODELS[family]
    standard = spec.flavors["debugmodel"]
    args = replace(standard, moe=replace(standard.moe, **changes))
    errors = args.violations()
    if not errors:
        try:
            assert format_of(spec).map_state(spec.state_on_meta(args), args=args)
        except ConfigError as error:
            errors = error.messages
    if errors:
        assert all(next(iter(changes)) in error for error in errors)
        return
    moe = format_of(spec).from_config(format_of(spec).to_config(args))["moe"]
    assert replace(standard.moe, **moe) == args.moe or "router_z" in changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None, "num_local_experts": None}, "num_experts is missing"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts": "8", "num_local_experts": "8"}, 'num_experts = "8": must be an integer'),
        ({"num_experts_per_tok": 10**30}, "num_experts_per_tok = 1000"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1: must be true or false"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    config = {key: value for key, value in (format_of(SPEC).to_config(ARGS) | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        format_of(SPEC).from_config(config)
