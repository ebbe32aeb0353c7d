"""Tests of llama4/model.py, llama4/plan.py and llama4/hf.py against transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4Config, Llama4ForConditionalGeneration

from torchtitan_clone.checkpoint.offline import Weights
from torchtitan_clone.commands.convert_from_hf import convert
from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.weights import model_of_folder, open_initial_weights
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of

SPEC = MODELS["llama4"]
HUB = format_of(SPEC)
ARGS = replace(
    SPEC.flavors["debugmodel"], dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=97, chunk=40,
    query_scale_floor=16, query_scale=0.5, moe=replace(SPEC.flavors["debugmodel"].moe, hidden_dim=24),
)  # fmt: skip
SCALING = replace(SPEC.flavors["17bx16e"].rope_scaling, original_max_seq_len=64)
VARIANTS = {
    "experts in every second layer": ARGS,
    "experts in every layer": replace(ARGS, moe_every=1, full_every=2, rope_scaling=SCALING),
    "no norm, two experts": replace(ARGS, qk_norm=False, moe=replace(ARGS.moe, top_k=2)),
    "no temperature": replace(ARGS, query_scale=0.0),
}


VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
    "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "patch_size": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Returns a model with images, and its folder as the releases have it: text and images in one."""
    torch.manual_seed(0)
    config = Llama4Config(text_config=HUB.to_config(ARGS), vision_config=VISION, image_token_index=92)
    theirs = Llama4ForConditionalGeneration(config).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.05)
    folder = tmp_path_factory.mktemp("published")
    theirs.save_pretrained(folder, max_shard_size="100KB")
    return theirs, folder


def test_the_text_model_of_a_published_folder_is_imported(published):
    theirs, folder = published
    args = SPEC.resolve_args(model_of_folder(open_weight_folder(folder), spec=SPEC))
    assert HUB.arguments(args) == HUB.arguments(ARGS)
    model = SPEC.build(args)
    state = {name: tensor.detach() for name, tensor in named_state(model).items()}
    weights = open_initial_weights(folder, spec=SPEC, model_args=args, state=state)
    (warning,) = weights.warnings
    assert re.fullmatch(r"leaves out the \d+ tensors of vision_model.* and multi_modal_projector.*images", warning)
    weights.fill(state)
    tokens_BT = torch.randint(0, 90, (2, 100))
    with torch.no_grad():
        ours = model(tokens_BT, positions_BT=torch.arange(100).expand(2, 100))
        torch.testing.assert_close(ours, theirs(tokens_BT).logits, rtol=1e-5, atol=1e-5)
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    sources = sources_of(format_of(SPEC).map_state(state, args=args, prefix="language_model."))
    assert set(stored) - set(sources) == {name for name in stored if name.startswith(("vision_", "multi_modal_"))}
    for name, users in sources.items():
        assert torch.equal(assemble_source(users, read=state.get, dtype=torch.float32), stored[name]), name


def test_a_published_folder_is_converted_to_a_checkpoint(published, tmp_path, capsys):
    theirs, folder = published
    convert(folder, tmp_path, spec=SPEC, dtype=torch.float32)
    assert re.search("^warning: leaves out the .* which encode images$", capsys.readouterr().err, re.MULTILINE)
    found = Weights(tmp_path / "step-0").read("layers.3.feed_forward.experts.w2")
    assert torch.equal(found, theirs.language_model.model.layers[3].feed_forward.experts.down_proj.transpose(1, 2))


EXPERTS = "language_model.model.layers.3.feed_forward.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(f"{EXPERTS}.down_proj"), rf"lacks {EXPERTS}\.down_proj$"),
        (
            lambda state: state.update({f"{EXPERTS}.gate_up_proj": state[f"{EXPERTS}.gate_up_proj"][:6].clone()}),
            rf"{EXPERTS}.gate_up_proj has shape \[6, 64, 48\], and the model's has \[8, 64, 48\]$",
        ),
        (lambda state: state.update(vision=torch.zeros(1)), "holds vision, which llama4 does not have"),
        (lambda state: state.update({"model.norm.weight": torch.zeros(64)}), "holds model.norm.weight, which"),
    ],
)
def test_other_tensors_of_a_published_folder_are_refused_by_name(published, tmp_path, change, message):
    _, folder = published
    state = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        open_initial_weights(tmp_path, spec=SPEC, model_args=ARGS, state=SPEC.state_on_meta(ARGS))


@pytest.mark.parametrize(("tuning", "scale"), [(4, 0.5), (0, 0.0), (True, 0.5), (False, 0.0)])
def test_releases_give_the_temperature_as_a_number_or_a_flag(published, tuning, scale):
    config = json.loads((published[1] / "config.json").read_text())
    config["text_config"]["attn_temperature_tuning"] = tuning
    assert HUB.from_config(config)["query_scale"] == scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layers": [0]}, "moe_layers = .0., and llama4 supports only .1, 3. here"),
        ({"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
        ({"model_type": "llama4"}, "llama4 supports only 'llama4_text'"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0"),
        ({"use_qk_norm": 1}, "use_qk_norm = 1: must be true or false"),
        ({"attn_scale": "x"}, "attn_scale"),
        ({"attn_temperature_tuning": "x"}, 'attn_temperature_tuning = "x": must be true or false'),
        ({"text_config": [1]}, "config.json: text_config = a list: must be a table"),
        ({"text_config": {}}, "beside text_config llama4 has no such key"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 0}, "chunk = 0: must be"),
        ({"moe_every": 5}, "moe_every = 5: must be at most n_layers 4"),
        ({"moe": replace(ARGS.moe, score_func="softmax")}, "score_func = 'softmax': must be 'sigmoid'"),
        ({"moe": replace(ARGS.moe, top_k=9)}, "top_k = 9: must be at most 8"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    (found,) = replace(ARGS, **changes).violations()
    assert re.search(message, found), found
