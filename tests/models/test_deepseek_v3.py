"""Tests of mla.py, deepseek_v3/model.py, deepseek_v3/plan.py and deepseek_v3/hf.py against transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV3ForCausalLM, modeling_layers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.data.packing import pack
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.weights import model_of_folder, open_initial_weights
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.models.deepseek_v3.model import V2_ROUTER, DeepSeekV3Args
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of

SPEC = MODELS["deepseek_v3"]
HUB = format_of(SPEC)
MOE = replace(SPEC.flavors["debugmodel"].moe, hidden_dim=24)
ARGS = DeepSeekV3Args(
    dim=64, n_layers=3, n_heads=4, hidden_dim=96, n_dense_layers=1, q_lora_rank=24, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, vocab_size=97, moe=MOE,
)  # fmt: skip
V2_MOE = replace(V2_ROUTER, num_experts=8, top_k=3, hidden_dim=24, num_shared_experts=2, score_scale=1.5)
YARN = RopeScaling(rope_type="yarn", factor=40.0, original_max_seq_len=64, mscale=1.0, mscale_all_dim=1.0)
VARIANTS = {
    "V3": ARGS,
    "YaRN": replace(ARGS, rope_scaling=YARN),
    "YaRN with unequal mscale": replace(ARGS, rope_scaling=replace(YARN, mscale=0.707)),
    "no query latent": replace(ARGS, q_lora_rank=0),
    "values as large as keys": replace(ARGS, v_head_dim=24),
    "V2-Lite": replace(ARGS, q_lora_rank=0, moe=V2_MOE),
    "V2": replace(ARGS, moe=replace(V2_MOE, num_groups=4, top_groups=2)),
}


def test_published_size_with_multi_token_prediction():
    """The published layer has 11.5 billion parameters besides the shared ones, and the embedding twice more."""
    args = replace(SPEC.flavors["671B"], mtp_depth=1)
    assert args.violations() == []
    added = {name: tensor for name, tensor in SPEC.state_on_meta(args).items() if name.startswith("layers.61.")}
    before = {name: tensor for name, tensor in SPEC.state_on_meta(args).items() if name.startswith("layers.60.")}
    block = sum(tensor.numel() for tensor in before.values())
    assert sum(tensor.numel() for tensor in added.values()) == block + 3 * 7168 + 2 * 7168 * 7168
    assert 11.5e9 < block + 2 * 7168 * 7168 < 11.7e9
    sources = sources_of(
        format_of(SPEC).map_state(added | {"output.weight": torch.empty(129280, 7168, device="meta")}, args=args)
    )
    found = {name for name in sources if ".mlp." not in name and "self_attn" not in name}
    assert {name.removeprefix("model.layers.61.") for name in found} == {
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "shared_head.head.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight", "lm_head.weight",
    }  # fmt: skip


def test_flops_of_multi_token_prediction():
    """A depth adds its active parameters, the output projection once more, and its attention."""
    depths = {depth: replace(ARGS, mtp_depth=depth) for depth in (0, 2)}
    parameters = {
        depth: {name: tensor for name, tensor in SPEC.state_on_meta(args).items() if "expert_bias" not in name}
        for depth, args in depths.items()
    }
    flops = {
        depth: SPEC.flops_per_token(args, parameters=parameters[depth], seq_len=128, frozen_layers=0)
        for depth, args in depths.items()
    }
    added = sum(
        tensor.numel() // (4 if ".experts." in name else 1)
        for name, tensor in parameters[2].items()
        if name not in parameters[0]
    )
    assert flops[2] - flops[0] == 6 * (added + 2 * 97 * 64) + 6 * 2 * 4 * (24 + 12) * 128


def test_flops_count_active_experts_and_the_sizes_of_heads():
    """Counts 6 for each active parameter, and 6 x layers x heads x (keys + values) x tokens for attention."""
    parameters = SPEC.state_on_meta(ARGS)
    active = sum(
        tensor.numel() // 4 if ".experts." in name else tensor.numel()  # 2 of 8
        for name, tensor in parameters.items()
        if name != "tok_embeddings.weight" and not name.endswith("expert_bias")
    )
    parameters = {name: tensor for name, tensor in parameters.items() if not name.endswith("expert_bias")}
    flops = SPEC.flops_per_token(ARGS, parameters=parameters, seq_len=128, frozen_layers=0)
    assert flops == 6 * active + 6 * 3 * 4 * (24 + 12) * 128


@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_config_round_trips_through_transformers(flavor):
    args = replace(SPEC.flavors[flavor], mtp_depth=1)
    config = HUB.to_config(args)
    theirs = (DeepseekV2Config if config["model_type"] == "deepseek_v2" else DeepseekV3Config)(**config)
    assert theirs.n_routed_experts == args.moe.num_experts
    for each in (config, theirs.to_dict()):
        assert HUB.from_config(each) == HUB.arguments(args)
        values = {key: value for key, value in HUB.from_config(each).items() if value is not None}
        base = replace(args, dim=8, moe=replace(args.moe, num_experts=1, score_scale=1.0))
        assert replace(overlay(base, values, where="model.args"), n_kv_heads=None) == args


def hub_tensors(args):
    """Returns random tensors with the names and shapes that the hub has for a model."""
    random = torch.Generator().manual_seed(0)
    sources = sources_of(format_of(SPEC).map_state(SPEC.state_on_meta(args), args=args))
    return {name: torch.randn(part.shape, generator=random) for name, ((_, part), *_) in sources.items()}


def written(folder, tensors, args):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HUB.to_config(args)))
    return folder


def imported(folder, args):
    """Returns our tensors after importing a folder, and the warnings."""
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in SPEC.state_on_meta(args).items()}
    weights = open_initial_weights(folder, spec=SPEC, model_args=args, state=state)
    weights.fill(state)
    return state, weights.warnings


@pytest.mark.parametrize("args", [ARGS, VARIANTS["V2-Lite"]], ids=["V3", "V2-Lite"])
def test_weights_of_the_hub_come_back_bit_equal(tmp_path, args):
    tensors = hub_tensors(args)
    extra = {f"model.layers.{args.n_layers}.eh_proj.weight": torch.zeros(2, 2)}
    state, warnings = imported(written(tmp_path / "hub", tensors | extra, args), args)
    (warning,) = warnings
    assert warning.startswith(
        "leaves out the 1 tensors of model.layers.3 and later, which predict tokens after the next"
    )
    sources = sources_of(format_of(SPEC).map_state(state, args=args))
    for name, users in sources.items():
        assert torch.equal(assemble_source(users, read=state.__getitem__, dtype=torch.float32), tensors[name]), name
    # Pairs of neighbors in the 8 rotary rows of the shared key, which follow 16 of the latent.
    order = [*range(16), *range(16, 24, 2), *range(17, 24, 2)]
    theirs = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(state["layers.0.attention.wkv_a.weight"], theirs[order])


def predicting_model(args):
    """Returns a model with random norms, and the logits of each depth for two rows of random tokens."""
    torch.manual_seed(0)
    model = SPEC.build(args)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    logits = []

    def loss_fn(hidden_BTD, weight, _targets_BT, *, later=False):
        logits.append(F.linear(hidden_BTD, weight))
        return hidden_BTD.sum()

    rows = torch.randint(0, args.vocab_size, (2, 41)).numpy()
    batch = pack(rows, eos_id=-1, document_masking=False, mtp_depth=args.mtp_depth)
    with torch.no_grad():
        sums = model(
            batch.tokens_BT, positions_BT=batch.positions_BT, targets_BT=batch.targets_BT,
            mtp_targets_BKT=batch.mtp_targets_BKT, loss_fn=loss_fn,
        )  # fmt: skip
    assert sums.shape == (1 + args.mtp_depth,)
    return model, rows, logits


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no MtpModel")
def test_transformers_predicts_the_same_later_tokens(tmp_path, monkeypatch):
    """Exports a model; transformers reads the model, then its layers of multi-token prediction, and runs them."""
    args = replace(ARGS, mtp_depth=2, rope_scaling=YARN)
    model, rows, logits = predicting_model(args)
    state = {name: tensor.detach() for name, tensor in named_state(model).items()}
    sources = sources_of(format_of(SPEC).map_state(state, args=args))
    exported = {name: assemble_source(users, read=state.get, dtype=torch.float32) for name, users in sources.items()}
    exported = {name: tensor.clone() for name, tensor in exported.items()}
    save_file(exported, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(HUB.to_config(args)))
    # Written there for the published number of layers.
    ignored = [r"model\.layers\.3\..*", r"model\.layers\.4\..*"]
    monkeypatch.setattr(DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", ignored)
    main, loading = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    later = modeling_layers.MtpModel.from_pretrained(main).eval()
    rows_BS = torch.from_numpy(rows)
    with torch.no_grad():
        found = main(rows_BS[:, :-1], output_hidden_states=True)
        torch.testing.assert_close(logits[0], found.logits, rtol=1e-5, atol=1e-5)
        states_BTD = found.hidden_states[-1]
        for depth in (1, 2):
            tokens_BT = rows_BS[:, depth:]
            count = min(tokens_BT.shape[1], 40)
            positions_BT = torch.arange(depth, depth + count)[None]
            states_BTD = later.forward_layer(
                depth - 1, states_BTD[:, :count], positions_BT, None, input_ids=tokens_BT[:, :count]
            )
            theirs = main.lm_head(states_BTD)
            torch.testing.assert_close(logits[depth][:, :count], theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.1


def test_multi_token_prediction_of_the_hub(tmp_path):
    """Layers come back bit by bit or are left out; copies of shared tensors need not be there and do not count."""
    args = replace(ARGS, mtp_depth=2)
    tensors = hub_tensors(args)
    copies = [
        f"model.layers.{layer}.{name}.weight" for layer in (3, 4) for name in ("embed_tokens", "shared_head.head")
    ]
    assert set(copies) < set(tensors)
    shared = {name: torch.ones_like(tensors[name]) for name in copies}
    state, warnings = imported(written(tmp_path / "complete", tensors | shared, args), args)
    assert warnings == ()
    assert model_of_folder(open_weight_folder(tmp_path / "complete"), spec=SPEC).args["mtp_depth"] == 2
    assert torch.equal(state["tok_embeddings.weight"], tensors["model.embed_tokens.weight"])
    for name, users in sources_of(format_of(SPEC).map_state(state, args=args)).items():
        found = assemble_source(users, read=state.__getitem__, dtype=torch.float32)
        original = {"embed": "model.embed_tokens.weight", "share": "lm_head.weight"}
        expected = original[name.split(".")[3][:5]] if name in copies else name
        assert torch.equal(found, tensors[expected]), name
    without_copies = {name: tensor for name, tensor in tensors.items() if name not in copies}
    again, _ = imported(written(tmp_path / "no copies", without_copies, args), args)
    assert all(torch.equal(again[name], state[name]) for name in state)
    for depth, count in ((0, 2), (1, 1)):
        fewer = replace(args, mtp_depth=depth)
        found, (warning,) = imported(tmp_path / "complete", fewer)
        per_layer = len([name for name in tensors if name.startswith("model.layers.4.")])
        assert warning.startswith(f"leaves out the {count * per_layer} tensors of model.layers.{3 + depth} and later")
        assert all(torch.equal(found[name], state[name]) for name in found)
    lacking = {name: tensor for name, tensor in tensors.items() if "4.hnorm" not in name}
    with pytest.raises(ConfigError, match=r"lacks model.layers.4.hnorm.weight$"):
        imported(written(tmp_path / "lacking", lacking, args), args)
    with pytest.raises(
        ConfigError, match=r"mtp_depth is 3, but config\.json asks for 2; set model\.args\.mtp_depth = 2"
    ):
        imported(tmp_path / "complete", replace(args, mtp_depth=3))


def test_matrices_in_8_bits_are_multiplied_by_the_scales_of_their_blocks(tmp_path):
    """Sizes are no multiples of the blocks, and rows of the queries are read in parts."""
    args = replace(ARGS, dim=136, q_lora_rank=200, hidden_dim=272)
    exact, stored = hub_tensors(args), {}
    for name, tensor in hub_tensors(args).items():
        if not re.search(r"_proj|experts", name):
            stored[name] = tensor
            continue
        shape = tensor.shape
        scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
        stored[name], stored[f"{name}_scale_inv"] = tensor.to(torch.float8_e4m3fn), scales
        by_value = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
        exact[name] = stored[name].float() * by_value
    state, _ = imported(written(tmp_path / "hub", stored, args), args)
    for name, users in sources_of(format_of(SPEC).map_state(state, args=args)).items():
        assert torch.equal(assemble_source(users, read=state.__getitem__, dtype=torch.float32), exact[name]), name


def test_bad_folders_are_refused(tmp_path):
    tensors = hub_tensors(ARGS)
    experts = "model.layers.1.mlp.experts"
    missing = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{experts}.3.")}
    weight = f"{experts}.0.up_proj.weight"
    quantized = tensors | {weight: tensors[weight].to(torch.float8_e4m3fn)}
    scaled = quantized | {f"{weight}_scale_inv": torch.ones(24, 1)}
    more = tensors | {f"{experts}.8.up_proj.weight": tensors[weight].clone()}
    cases = [
        (missing, f"lacks {experts}.3.gate_proj.weight, {experts}.3.down_proj.weight, {experts}.3.up_proj.weight$"),
        (quantized, f"{weight} has type F8_E4M3; quantized weights cannot be trained on"),
        (scaled, r"_scale_inv has type F32 and shape \[24, 1\], and blocks of 128 x 128 have F32 and \[1, 1\]"),
        (more, f"holds {experts}.8.up_proj.weight, which deepseek_v3 does not have"),
    ]
    for number, (content, message) in enumerate(cases):
        with pytest.raises(ConfigError, match=message):
            imported(written(tmp_path / str(number), content, ARGS), ARGS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 2}, "n_kv_heads = 2: latent attention has as many as n_heads; unset it"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 must be even"),
        ({"v_head_dim": 25}, "v_head_dim = 25: must be at most qk_nope_head_dim [+] qk_rope_head_dim = 24"),
        ({"n_dense_layers": 3}, "n_dense_layers = 3: must be below n_layers 3"),
        ({"mtp_depth": -1}, "mtp_depth = -1: must be from 0 to 64"),
        ({"mtp_depth": 1, "mtp_loss_weight": 0.0}, "mtp_loss_weight = 0.0: must be above 0"),
        ({"rope_scaling": replace(YARN, mscale=0.0)}, "mscale_all_dim = 1.0: the format of the hub has it only with"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0: must be from 1"),
        ({"moe": replace(MOE, expert_bias=False)}, "expert_bias = False: must be True with score_func 'sigmoid'"),
        ({"moe": replace(MOE, num_shared_experts=0)}, "num_shared_experts = 0: must be at least 1"),
        ({"moe": replace(MOE, num_groups=3)}, "num_groups = 3: must divide num_experts"),
        ({"moe": replace(MOE, top_k=5)}, "top_k = 5: must be at most 4, the experts that a token may choose"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    (found,) = replace(ARGS, **changes).violations()
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "deepseek_v3 supports only 'deepseek_v3'"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"q_lora_rank": "24"}, 'q_lora_rank = "24": must be an integer'),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ({"num_nextn_predict_layers": "1"}, 'num_nextn_predict_layers = "1": must be an integer'),
        ({"num_nextn_predict_layers": 65}, "num_nextn_predict_layers = 65"),
        ({"routed_scaling_factor": "big"}, "routed_scaling_factor"),
        ({"n_routed_experts": 1e400}, "n_routed_experts"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)


def test_groups_that_a_config_leaves_out_are_those_of_transformers():
    v3, v2 = (HUB.to_config(args) for args in (ARGS, replace(ARGS, moe=V2_MOE)))
    del v3["n_group"], v3["topk_group"]
    groups = HUB.from_config({**v3, "n_routed_experts": 64})["moe"]
    defaults = DeepseekV3Config()
    assert (groups["num_groups"], groups["top_groups"]) == (defaults.n_group, defaults.topk_group)
    del v2["topk_method"]
    with pytest.raises(ConfigError, match=r"topk_method = 'greedy', and .* supports only 'group_limited_greedy'"):
        HUB.from_config({**v2, "n_group": 4, "topk_group": 2})
