"""Runs whose model is that of a Hugging Face folder: hub/weights.py, and hub/vocabulary.py with another vocabulary."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_families import SMALL
from tests.support.harness import run_ranks
from tests.support.runs import losses, options, train
from tests.support.trainers import full_copies, open_trainer
from tests.support.twins import config_of, twin_of
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER
from torchtitan_clone.hub.vocabulary import ResizedRows
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.run.preflight import resolve
from torchtitan_clone.run.prepared import find_initial_weights

ROWS = 2100
ARGS = replace(SMALL["qwen2"], n_layers=2, vocab_size=ROWS)
SIZES = dict.fromkeys(f"model__args__{name}" for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of"))
"""Options that the runs of tests have, and these have not."""
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"


def save_folder(path, *, args=ARGS, family="qwen2", dtype=torch.float32, shard="1GB"):
    """Saves transformers' model with random weights, and returns them by our names, in float32."""
    torch.manual_seed(0)
    model = MODELS[family].build(args).to(dtype).float()
    twin_of(MODELS[family], model, args).to(dtype).save_pretrained(path, max_shard_size=shard)
    return {name: tensor.detach() for name, tensor in named_state(model).items()}


def starting(corpus, folder, path, **changes):
    """Returns the command line of a run that starts from a folder, and names no model."""
    return options(
        corpus, folder, **{**SIZES, "checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": path},
        **changes,
    )  # fmt: skip


def read(argv):
    """Returns the plan of such a run, and the weights that it starts with."""
    plan = resolve(load_config(argv), world_size=1, device_type="cpu")
    weights = find_initial_weights(plan)
    state = {name: torch.empty(tensor.shape) for name, tensor in plan.model_tensors.items()}
    weights.fill(state)
    return plan, state, weights.warnings


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({}, {}),
        ({"tied_embeddings": True}, {}),
        ({}, {"shard": "100KB"}),
        ({"tied_embeddings": True}, {"dtype": torch.bfloat16, "shard": "100KB"}),
    ],
    ids=["one file", "tied", "sharded", "bfloat16"],
)
def test_the_folder_decides_family_sizes_and_weights(corpus, tmp_path, changes, saved):
    args = replace(ARGS, **changes)
    expected = save_folder(tmp_path / "model", args=args, **saved)
    plan, state, warnings = read(starting(corpus, tmp_path, tmp_path / "model"))
    assert (plan.spec.name, plan.model_args) == ("qwen2", args)
    assert_equal(state, expected)
    assert not warnings


def test_8_bit_weights_of_a_folder_are_read(corpus, tmp_path):
    """As Kimi K2 and MiniMax-M2 are released: blocks of 128 x 128 with a scale each."""
    args = replace(SMALL["kimi_k2"], vocab_size=ROWS)
    expected = save_folder(tmp_path / "model", args=args, family="kimi_k2")
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if ".experts." in name]:
        state[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
        state[name] = (state[name] * 2).to(torch.float8_e4m3fn)
    save_file(state, file)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    plan, found, _ = read(starting(corpus, tmp_path, tmp_path / "model"))
    assert (plan.spec.name, plan.model_args) == ("kimi_k2", args)
    for name, weight in expected.items():
        rounded = (weight * 2).to(torch.float8_e4m3fn).float() / 2 if ".experts." in name else weight
        assert torch.equal(found[name], rounded), name


def test_the_text_model_of_a_folder_with_images_is_read(corpus, tmp_path):
    args = replace(SMALL["gemma3"], vocab_size=ROWS)
    expected = save_folder(tmp_path / "model", args=args, family="gemma3")
    file, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    images = {"vision_tower.weight": torch.ones(2), "multi_modal_projector.weight": torch.ones(2)}
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(file).items()} | images, file)
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": json.loads(config.read_text())}))
    plan, found, warnings = read(starting(corpus, tmp_path, tmp_path / "model"))
    assert (plan.spec.name, plan.model_args) == ("gemma3", args)
    assert_equal(found, expected)
    assert warnings == ("leaves out the 2 tensors of vision_tower.* and multi_modal_projector.*, which encode images",)


def test_a_run_trains_from_a_folder_and_repeats_from_its_config(corpus, tmp_path):
    """Its config.toml names the model: a run that is started from it needs the folder for the weights only."""
    folder = tmp_path / "model"
    save_folder(folder)
    shutil.copy(SHIPPED_FOLDER / "tokenizer_config.json", folder)
    tokenizer = json.loads((SHIPPED_FOLDER / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = [*ids][-2:]
    ids[first], ids[second] = ids[second], ids[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    argv = starting(corpus, tmp_path, folder, training__steps=2, checkpoint__interval=1, model__args__max_seq_len=128)
    code, output = train([*argv, "--dry-run"], log_folder=tmp_path)
    assert code == 0, output
    assert f"{folder}/config.json: qwen2 debugmodel, with {{" in output
    for line in ('name = "qwen2"', "vocab_size = 2100", "max_seq_len = 128", f'hf_assets_path = "{folder}"'):
        assert line in output
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    assert code == 0, output
    # Resumed by the same command or from what the run wrote, it needs the tokenizer only.
    shutil.copytree(folder, tmp_path / "copy")
    moved = f"--model.hf_assets_path={tmp_path}/copy"
    shutil.rmtree(folder)
    for again, steps in ((argv, 3), ([f"--job.config_file={tmp_path}/run/config.toml"], 4)):
        code, output = train([*again, moved, f"--training.steps={steps}"], world_size=2, log_folder=tmp_path)
        assert code == 0, output
    assert [*losses(tmp_path)] == [1, 2, 3, 4]


def test_a_flavor_is_found_by_its_sizes(corpus, tmp_path):
    (tmp_path / "model").mkdir()
    spec = MODELS["qwen2"]
    args = replace(spec.flavors["0.5B"], max_seq_len=1024)
    config_of(spec, args).save_pretrained(tmp_path / "model")
    save_file({"unused": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    plan = resolve(load_config(starting(corpus, tmp_path, tmp_path / "model")), world_size=1, device_type="cpu")
    assert (plan.config.model.flavor, plan.config.model.args) == ("0.5B", {"max_seq_len": 1024})


def drawn(count, *, rows=400, columns=8):
    """Returns a matrix whose columns are unlike each other, and so many rows drawn after it."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator)
    old = torch.randn(rows, columns, generator=generator) @ mixing + torch.arange(columns)
    resized = ResizedRows(old, name="lm_head.weight", rows=rows, columns=columns)
    return old, resized, resized[slice(0, rows + count), slice(0, columns)]


def test_new_rows_have_the_mean_and_covariance_of_the_old_ones():
    old, _, all_rows = drawn(20_000)
    assert torch.equal(all_rows[: len(old)], old)
    new = all_rows[len(old) :]
    assert (new.mean(0) - old.mean(0)).norm() < 0.05 * old.std(0).norm()
    expected = torch.cov(old.T)
    assert (torch.cov(new.T) - expected).norm() < 0.05 * expected.norm()
    assert torch.unique(new, dim=0).shape == new.shape


def test_a_part_of_the_rows_has_the_same_bits():
    _, resized, all_rows = drawn(50)
    assert torch.equal(resized[slice(390, 421), slice(2, 5)], all_rows[390:421, 2:5])
    assert torch.equal(resized[slice(430, 431), slice(0, 8)], all_rows[430:431])


def parameters_of_run(argv):
    with open_trainer(argv) as trainer:
        return full_copies(trainer.engine.parameters.items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [2060, 2304])
def test_another_vocabulary_is_the_same_on_every_mesh(corpus, tmp_path, rows, tied):
    old = save_folder(tmp_path / "model", args=replace(ARGS, tied_embeddings=tied))
    changes = {"checkpoint__resize_vocabulary": True, "model__args__vocab_size": rows}
    _, found, warnings = read(starting(corpus, tmp_path, tmp_path / "model", **changes))
    kept = min(rows, ROWS)
    for name in [EMBEDDING] if tied else [EMBEDDING, OUTPUT]:
        assert found[name].shape == (rows, ARGS.dim)
        assert torch.equal(found[name][:kept], old[name][:kept])
        assert 0.5 < found[name][-1].std() / old[name].std() < 2
    words = "40 are left out" if rows < ROWS else "204 more are drawn with their mean and covariance"
    assert len(warnings) == (1 if tied else 2)
    assert all(words in warning for warning in warnings)
    for degree in ("data_parallel_shard", "tensor_parallel"):
        one = {f"parallelism__{degree}_degree": 2}
        argv = starting(corpus, tmp_path / degree, tmp_path / "model", **changes, **one)
        for parameters in run_ranks(parameters_of_run, 2, argv):
            assert_equal(parameters, {name: found[name] for name in parameters})


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        ({}, {"model_type": "gptj"}, "model_type = 'gptj': no family has this type; known families: llama3"),
        ({}, {"norm_position": 1}, "norm_position = 1: qwen2 has no such key"),
        ({}, None, "there is no config.json in it"),
        ({"model__args__dim": 128}, {}, "model.args.dim is 128, but config.json asks for 64"),
        ({"model__args__vocab_size": 2304}, {}, "vocab_size = 2100, or checkpoint.resize_vocabulary = true"),
        ({"checkpoint__initial_load_path": "nowhere"}, {}, "nowhere: there is no such folder"),
        (
            {"checkpoint__initial_load_in_hf": "false", "checkpoint__resize_vocabulary": "true"},
            {}, "checkpoint.resize_vocabulary = true: only a Hugging Face folder is read",
        ),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_error(corpus, tmp_path, changes, damage, message):
    save_folder(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    if damage is None:
        config.unlink()
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | damage))
    argv = starting(corpus, tmp_path, tmp_path / "model")
    argv += [f"--{name.replace('__', '.')}={value}" for name, value in changes.items()]
    with pytest.raises(ConfigError) as error:
        read(argv)
    assert message in str(error.value)
    assert len(error.value.messages) == 1
