"""How a run's arguments and a folder's config.json may differ, and what engines read in that of an export."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from tests.support.runs import losses, options, train
from torchtitan_clone.commands import convert_from_hf
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Model
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER
from torchtitan_clone.hub.weights import open_initial_weights
from torchtitan_clone.models import MODELS
from torchtitan_clone.run.trained import find_trained
from torchtitan_clone.tools.trained_model import open_trained_model, read_model

CPU = torch.device("cpu")
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SCALED = '{rope_type = "llama3", factor = 8.0, original_max_seq_len = 32}'


@pytest.fixture(scope="module")
def exported(corpus, tmp_path_factory):
    """Returns the folder of an export in bfloat16."""
    folder = tmp_path_factory.mktemp("exported")
    changes = {"checkpoint__export_dtype": "bfloat16", "checkpoint__last_save_in_hf": True, "training__steps": 2}
    assert train(options(corpus, folder, **changes), log_folder=folder)[0] == 0
    return folder / "run" / "hf" / "step-2"


def altered(folder, copy, changes):
    """Returns a copy of a folder with other entries in config.json; None removes one."""
    shutil.copytree(folder, copy)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


THETA = {"rope_theta": 10000.0, "rope_parameters": None}


@pytest.mark.parametrize(
    ("folder", "flavor", "chosen", "message"),
    [
        (THETA, {}, {}, "rope_theta is 500000.0, but config.json asks for 10000.0; set model.args.rope_theta = 1"),
        (THETA, {}, {"rope_theta": 10000.0}, None),
        (THETA, {}, {"rope_theta": 500000.0}, "warning: model.args.rope_theta is 500000.0"),
        ({"rope_scaling": SCALING}, {}, {}, "model.args.rope_scaling is unset, but config.json asks for {rope_type"),
        ({"rope_scaling": SCALING}, {}, {"rope_scaling": SCALED}, None),
        ({"rope_scaling": SCALING}, {}, {"rope_scaling": '{rope_type = "default"}'}, "warning: model.args.rope"),
        # The scaling of the flavor: Llama 3.1's, and the folder is one of Llama 3.
        ({}, {"model__flavor": "8B"}, {}, 'asks for unset; set model.args.rope_scaling = {rope_type = "default"}'),
        ({}, {"model__flavor": "8B"}, {"rope_scaling": '{rope_type = "default"}'}, None),
        ({}, {"model__flavor": "8B"}, {"rope_scaling": "{factor = 8.0}"}, "warning: model.args.rope_scaling is {"),
    ],
)  # fmt: skip
def test_rotary_positions_differ_from_those_of_the_folder_only_if_the_user_says_so(
    corpus, tmp_path, exported, folder, flavor, chosen, message
):
    copy = altered(exported, tmp_path / "folder", folder)
    changes = {"checkpoint__initial_load_in_hf": True, "model__hf_assets_path": copy, "training__steps": 1, **flavor}
    changes["model__name"] = "llama3"  # else the folder decides
    if flavor:
        changes |= {f"model__args__{name}": value for name, value in (("vocab_size", 2048), ("hidden_dim", 192))}
        changes |= {"model__args__multiple_of": None, "model__args__max_seq_len": 8192}
    else:
        changes["checkpoint__last_save_in_hf"] = True
    argv = options(corpus, tmp_path, **changes, **{f"model__args__{name}": value for name, value in chosen.items()})
    code, output = train(argv, log_folder=tmp_path)
    refused = message is not None and not message.startswith("warning: ")
    assert code == (2 if refused else 0), output
    assert "Traceback" not in output
    if message is not None:
        assert message.removeprefix("warning: ") in output
    else:
        assert "but config.json asks for" not in output
    if not (refused or flavor):  # the export states what was trained
        config = AutoConfig.from_pretrained(tmp_path / "run" / "hf" / "step-1")
        assert config.rope_parameters["rope_theta"] == chosen.get("rope_theta", folder.get("rope_theta", 500000.0))
        has_scaling = chosen.get("rope_scaling", folder.get("rope_scaling") and SCALED) == SCALED
        assert config.rope_parameters["rope_type"] == ("llama3" if has_scaling else "default")


def test_the_error_of_a_flavor_with_a_scaling_can_be_pasted():
    args = {"rope_scaling": {"rope_type": "default"}}
    assert MODELS["llama3"].resolve_args(Model(flavor="8B")).rope_scaling is not None
    assert MODELS["llama3"].resolve_args(Model(flavor="8B", args=args)).rope_scaling is None


def test_a_tied_folder_with_an_output_weight_of_its_own_is_refused(exported, tmp_path):
    """transformers unties such a model with a warning; other programs keep it tied."""
    tied = altered(exported, tmp_path / "tied", {"tie_word_embeddings": True})
    with pytest.raises(ConfigError, match=r"tie_word_embeddings = true .* lm_head.weight differs from model.embed"):
        find_trained(tied)
    state = load_file(tied / "model.safetensors")
    equal = tmp_path / "equal"
    shutil.copytree(tied, equal)
    save_file(state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, equal / "model.safetensors")
    state["model.embed_tokens.weight"][-1, -1] += 1.0
    assert read_model(find_trained(equal), dtype=torch.float32, device=CPU).is_tied
    last = {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    last["lm_head.weight"][-1, -1] += 1.0
    save_file(state | last, equal / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tie_word_embeddings = true"):
        find_trained(equal)
    untied = altered(equal, tmp_path / "untied", {"tie_word_embeddings": False})
    assert not read_model(find_trained(untied), dtype=torch.float32, device=CPU).is_tied


@pytest.fixture(scope="module")
def without_prediction_layer(tmp_path_factory):
    """Returns DeepSeek V3 as transformers saves it: config.json has a prediction layer, and the weights have none."""
    folder = tmp_path_factory.mktemp("deepseek") / "model"
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=256, moe_intermediate_size=32, n_shared_experts=1, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    shutil.copytree(SHIPPED_FOLDER, folder, dirs_exist_ok=True)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    return folder


def test_a_prediction_layer_that_the_weights_lack_is_left_out_with_a_warning(
    corpus, tmp_path, without_prediction_layer, capsys
):
    spec = MODELS["deepseek_v3"]
    model = convert_from_hf.convert(without_prediction_layer, tmp_path / "seed", spec=spec, dtype=torch.float32)
    assert spec.resolve_args(model).mtp_depth == 0
    assert "num_nextn_predict_layers = 1, but the folder lacks the weights" in capsys.readouterr().err
    trained = open_trained_model(without_prediction_layer, dtype=torch.float32, device=CPU)
    tokens_BT = torch.arange(40)[None]
    with torch.no_grad():
        ours = trained.model(tokens_BT, positions_BT=tokens_BT)
        theirs = AutoModelForCausalLM.from_pretrained(without_prediction_layer, dtype=torch.float32)(tokens_BT).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    args = spec.resolve_args(replace(model, args={**model.args, "mtp_depth": 1}))
    with pytest.raises(ConfigError, match=r"set model.args.mtp_depth = 0"):
        open_initial_weights(
            without_prediction_layer, spec=spec, model_args=args, state=spec.state_on_meta(args), chosen=model.args
        )
    (tmp_path / "seed" / "model.toml").write_text(convert_from_hf.model_table(model))
    argv = options(
        corpus, tmp_path, job__config_file=tmp_path / "seed" / "model.toml", training__steps=1,
        checkpoint__initial_load_in_hf=True, checkpoint__initial_load_path=without_prediction_layer,
        **{f"model__args__{name}": None for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of")},
    )  # fmt: skip
    code, output = train(argv, log_folder=tmp_path)
    assert code == 0, output
    assert "num_nextn_predict_layers = 1, but the folder lacks the weights" in output
    assert losses(tmp_path)


def test_an_export_names_types_ids_and_positions_as_engines_read_them(exported):
    """transformers 5 and vLLM read dtype and rope_parameters; transformers 4 and llama.cpp the older names."""
    config = json.loads((exported / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert (config["rope_theta"], config["rope_scaling"]) == (500000.0, None)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    assert ids == {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    assert ids.items() <= json.loads((exported / "generation_config.json").read_text()).items()
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    assert (loaded.dtype, loaded.generation_config.eos_token_id) == (torch.bfloat16, 0)
