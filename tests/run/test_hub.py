"""Runs that start from, and export, the format of the hub (hub/weights.py, hub/export.py), against transformers."""

import contextlib
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.support.checkpoint_states import log_lines
from tests.support.harness import run_ranks
from tests.support.runs import losses, options, train
from tests.support.trainers import full_copies, open_trainer
from torchtitan_clone.checkpoint.summary import describe_step
from torchtitan_clone.commands import convert_from_hf, convert_to_hf
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema_training import Model
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER
from torchtitan_clone.hub.folder import INDEX_FILE
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.weights import check_tokenizer
from torchtitan_clone.models import find_model
from torchtitan_clone.run.state import TrainingError

ROOT = Path(__file__).parents[2]
SPLITS = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "tensor": (2, {"parallelism__tensor_parallel_degree": 2}),
    "pipeline": (2, {"parallelism__pipeline_parallel_degree": 2}),
    "fsdp and tensor": (4, {"parallelism__tensor_parallel_degree": 2}),
}
QWEN3 = {
    "model__name": "qwen3",
    "model__args__multiple_of": None,
    "model__args__head_dim": 32,
    "model__args__hidden_dim": 100,
}
SCALING = "{factor = 8.0, original_max_seq_len = 32}"


def parameters_of_run(argv, trains):
    """Returns the global parameters that this rank has: after the last step, or before the first."""
    with open_trainer(argv) as trainer:
        if trains:
            trainer.train()
        spec = trainer.engine.plan.spec
        found = full_copies(trainer.engine.parameters.items())
        return {hub_name(spec, name): tensor for name, tensor in found.items()}


def hub_name(spec, name):
    """Returns the hub's name of a tensor that is the same there."""
    (part,) = format_of(spec).slices({name: ()}, args=None)[name]
    return part.source


def run_split(corpus, folder, split, *, trains, **changes):
    """Returns the values of parameters_of_run from all ranks."""
    world_size, parallelism = SPLITS[split]
    argv = options(corpus, folder, **parallelism, **changes)
    answers = run_ranks(parameters_of_run, world_size, argv, trains)
    return {name: tensor for answer in answers for name, tensor in answer.items()}


def export(corpus, folder, split, **changes):
    """Trains two steps and exports; the folder of the export, and the weights that were trained."""
    changes = {"training__steps": 2, "checkpoint__last_save_in_hf": True, **changes}
    trained = run_split(corpus, folder, split, trains=True, **changes)
    return folder / "run" / "hf" / "step-2", trained


def imported(corpus, folder, split, path, **changes):
    """Returns the weights that a run starts with when it imports the folder."""
    changes = {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": path, **changes}
    return run_split(corpus, folder, split, trains=False, **changes)


def weights_in(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def our_logits(argv, state, tokens):
    model = load_config(argv).model
    spec = find_model(model)
    ours = spec.build(spec.resolve_args(model))
    for name, parameter in ours.named_parameters():
        parameter.data = state[hub_name(spec, name)]
    with torch.no_grad():
        return ours(tokens, positions_BT=torch.arange(tokens.shape[1]).expand_as(tokens))


@pytest.mark.parametrize(
    ("split", "changes"),
    [
        ("one", {"model__args__tied_embeddings": True}),
        ("fsdp", {"model__args__rope_scaling": SCALING, "model__args__hidden_dim": 100}),
        ("pipeline", {}),
        ("fsdp", {**QWEN3, "model__args__tied_embeddings": True}),
        # Rows of blocks that neither axis divides.
        pytest.param("fsdp and tensor", {"model__args__hidden_dim": 101}, marks=pytest.mark.many_ranks),
    ],
)
def test_an_export_is_the_run_in_transformers(corpus, tmp_path, split, changes):
    folder, trained = export(corpus, tmp_path, split, **changes)
    state = weights_in(folder)
    assert_equal(state, trained)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    config = AutoConfig.for_model(**json.loads((folder / "config.json").read_text()))
    in_memory = AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = in_memory.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if "model__args__tied_embeddings" in changes else [], [])
    tokens = torch.randint(0, 2048, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (loaded(tokens).logits - in_memory(tokens).logits).abs().max().item()
        assert difference == 0.0
        ours = our_logits(options(corpus, tmp_path, **changes), state, tokens)
        torch.testing.assert_close(loaded(tokens).logits, ours, rtol=1e-5, atol=1e-5)
    assert loaded.config._attn_implementation == "sdpa"
    assert loaded.dtype == torch.float32
    tokenizer, expected = AutoTokenizer.from_pretrained(folder), build_tokenizer(None)
    text = "def f(x):\n    return  x + 1  # naïve\n"
    assert tokenizer(text)["input_ids"] == expected.encode_batch([text])[0]
    assert (tokenizer.eos_token_id, loaded.generation_config.eos_token_id) == (expected.eos_id, expected.eos_id)
    assert loaded.generation_config.bos_token_id is None


def test_an_export_starts_runs_of_every_split(corpus, tmp_path):
    folder, trained = export(corpus, tmp_path / "fsdp", "fsdp")
    for split in ("one", "tensor", "pipeline"):
        assert_equal(imported(corpus, tmp_path / "again", split, folder), trained)


def test_a_foreign_llama_is_what_the_run_starts_with(corpus, tmp_path):
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=172,
        vocab_size=2100, rope_theta=10000.0, tie_word_embeddings=True, max_position_embeddings=512, rms_norm_eps=1e-6,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "llama", max_shard_size="100KB")
    # Old releases carry this too.
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(extra, tmp_path / "llama" / "extra.safetensors")
    index = json.loads((tmp_path / "llama" / INDEX_FILE).read_text())
    index["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
    (tmp_path / "llama" / INDEX_FILE).write_text(json.dumps(index))
    args = {
        "n_layers": 3, "n_kv_heads": 2, "hidden_dim": 172, "vocab_size": 2100, "rope_theta": 10000.0,
        "tied_embeddings": True, "norm_eps": 1e-6, "max_seq_len": 512,
    }  # fmt: skip
    changes = {f"model__args__{key}": value for key, value in args.items()}
    state = imported(corpus, tmp_path, "tensor", tmp_path / "llama", **changes)
    assert_equal(state, dict(theirs.named_parameters()))
    tokens = torch.randint(0, 2100, (2, 60), generator=torch.Generator().manual_seed(0))
    rebuilt = LlamaForCausalLM(config).eval()
    rebuilt.load_state_dict(state, strict=False)
    with torch.no_grad():
        assert (rebuilt(tokens).logits - theirs(tokens).logits).abs().max().item() == 0.0
        ours = our_logits(options(corpus, tmp_path, **changes), state, tokens)
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-5, atol=1e-5)


def test_exports_follow_their_own_schedule_and_type(corpus, tmp_path):
    changes = {"training__steps": 5, "checkpoint__hf_export_interval": 2, "checkpoint__export_dtype": "bfloat16"}
    code, output = train(options(corpus, tmp_path, **changes), log_folder=tmp_path)
    assert code == 0, output
    exports = tmp_path / "run" / "hf"
    assert sorted(p.name for p in exports.iterdir()) == ["step-2", "step-4"]
    assert {tensor.dtype for tensor in weights_in(exports / "step-4").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(exports / "step-4").dtype == torch.bfloat16
    assert len(losses(tmp_path)) == 5


def test_an_export_that_a_kill_prevented_is_made_at_the_next_start(corpus, tmp_path):
    changes = {"checkpoint__last_save_in_hf": True, "checkpoint__last_save_model_only": True}
    argv = options(corpus, tmp_path, **changes, training__steps=2)
    assert train(argv, log_folder=tmp_path)[0] == 0
    run = tmp_path / "run"
    expected = weights_in(run / "hf" / "step-2")
    (run / "checkpoint" / "finished.json").unlink()  # written last
    shutil.rmtree(run / "hf")
    code, output = train(argv, log_folder=tmp_path)
    assert code == 0, output
    assert "resumed after step 2" in output
    assert_equal(weights_in(run / "hf" / "step-2"), expected)
    assert "is complete: step 2" in train(argv, log_folder=tmp_path)[1]


def test_a_periodic_export_that_a_stop_prevented_is_made_later(corpus, tmp_path):
    def run(steps):
        argv = options(corpus, tmp_path, training__steps=steps, checkpoint__hf_export_interval=2)
        assert train(argv, world_size=2, log_folder=tmp_path)[0] == 0
        return sorted(path.name for path in exports.iterdir())

    exports = tmp_path / "run" / "hf"
    assert run(2) == ["step-2"]
    expected = weights_in(exports / "step-2")
    shutil.rmtree(exports / "step-2")
    (exports / "step-1.partial").mkdir()
    assert run(3) == ["step-2"]
    assert_equal(weights_in(exports / "step-2"), expected)
    (exports / "step-2" / "config.json").unlink()
    assert run(5) == ["step-2", "step-4"]
    assert not (exports / "step-2" / "config.json").exists()  # it was there


def export_without_tokenizer(argv, tokenizer):
    """Removes the tokenizer's file after the start and trains; the error and the log."""
    lines = log_lines()
    with open_trainer(argv) as trainer:
        dist.barrier()
        if dist.get_rank() == 0:
            tokenizer.unlink()
        with pytest.raises(TrainingError) as error:
            trainer.train()
    return str(error.value), "\n".join(lines)


def test_an_export_without_the_tokenizer_of_the_run_fails(corpus, tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(SHIPPED_FOLDER, folder)
    changes = {"model__hf_assets_path": folder, "checkpoint__last_save_in_hf": True, "training__steps": 2}
    argv = options(corpus, tmp_path, **changes)
    for error, log in run_ranks(export_without_tokenizer, 2, argv, folder / "tokenizer.json"):
        assert "its weights could not be exported" in error
        assert f'model.hf_assets_path = "{folder}": tokenizer.json is not there, or not the one' in log
    assert not (tmp_path / "run" / "hf").exists()


def test_a_run_trains_on_from_imported_weights(corpus, tmp_path):
    code, output = train(
        options(corpus, tmp_path / "first", training__steps=20, checkpoint__last_save_in_hf=True), log_folder=tmp_path
    )
    assert code == 0, output
    folder = tmp_path / "first" / "run" / "hf" / "step-20"
    changes = {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": folder, "optimizer__lr": 1e-9}
    argv = options(corpus, tmp_path / "second", **changes, training__steps=2)
    code, output = train(argv, log_folder=tmp_path)
    assert code == 0, output
    assert losses(tmp_path / "second")[1] < losses(tmp_path / "first")[1] - 0.5
    # Resumed, it continues from its own checkpoint and no longer needs the folder.
    folder.rename(folder.with_name("gone"))
    longer = options(corpus, tmp_path / "second", **changes, training__steps=3)
    code, output = train(longer, log_folder=tmp_path)
    assert code == 0, output
    assert "resumed after step 2" in output


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"model__args__n_layers": 3}, ["model.args.n_layers is 3", "set model.args.n_layers = 2"]),
        ({"model__args__n_heads": 8, "model__args__norm_eps": 1e-6}, ["n_heads = 4", "norm_eps = 1e-05"]),
        ({"model__args__tied_embeddings": True}, ["set model.args.tied_embeddings = false"]),
        ({"checkpoint__initial_load_path": "nowhere"}, ["nowhere: there is no such folder"]),
        (
            {"checkpoint__initial_load_path": "org/name"},
            ["org/name: there is no such folder; if", "hf download org/name"],
        ),
        (
            {"checkpoint__initial_load_path": "org/name", "checkpoint__initial_load_in_hf": False},
            ["hf download org/name", "and set checkpoint.initial_load_in_hf = true"],
        ),
        ({"checkpoint__initial_load_in_hf": False}, ["initial_load_in_hf"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_starts(corpus, tmp_path, exported, changes, fragments):
    changes = {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": exported, **changes}
    code, output = train(options(corpus, tmp_path / "runs", **changes), log_folder=tmp_path)
    assert code == 2
    assert all(fragment in output for fragment in fragments), output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()


def test_a_release_is_not_trained_with_the_bundled_tokenizer(corpus, tmp_path, exported):
    folder = tmp_path / "release"
    shutil.copytree(exported, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    first, second = list(ids)[-2:]
    ids[first], ids[second] = ids[second], ids[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    changes = {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": folder, "model__name": "llama3"}
    code, output = train(options(corpus, tmp_path / "runs", **changes), log_folder=tmp_path)
    assert (code, "Traceback" in output) == (2, False)
    assert "set model.hf_assets_path to this folder" in output, output
    for selected in (folder, SHIPPED_FOLDER):
        model = Model(hf_assets_path=str(selected))
        check_tokenizer(folder, model=model, tokenizer=build_tokenizer(str(selected)))


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda state: state.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda state: state.update(bias=torch.zeros(1)), "holds bias, which llama3 does not have"),
        (lambda state: state.update({"model.norm.weight": torch.ones(65)}), "has shape [65], and the model's has [64]"),
        (lambda state: state.update({"model.norm.weight": torch.ones(64).to(torch.int8)}), "has type I8"),
    ],
)
def test_other_tensors_are_refused_by_name(corpus, tmp_path, exported, change, fragment):
    state = weights_in(exported)
    change(state)
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text((exported / "config.json").read_text())
    changes = {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": folder}
    code, output = train(options(corpus, tmp_path / "runs", **changes), log_folder=tmp_path)
    assert (code, "Traceback" in output) == (2, False)
    assert fragment in output, output


def test_another_rotary_base_is_a_warning(corpus, tmp_path, exported):
    """Users change it on purpose for longer sequences."""
    changes = {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": exported}
    argv = options(corpus, tmp_path, **changes, model__args__rope_theta=1e6, training__steps=2)
    code, output = train(argv, log_folder=tmp_path)
    assert code == 0, output
    assert "model.args.rope_theta is 1000000.0, but config.json asks for 500000.0" in output


def convert(command, *arguments):
    """Runs a command in this process; returns its exit code."""
    return command.main([*map(str, arguments)])


def test_a_checkpoint_is_converted_to_what_the_run_exports(corpus, tmp_path, capsys):
    changes = {"model__args__tied_embeddings": True, "checkpoint__export_dtype": "bfloat16"}
    folder, _ = export(corpus, tmp_path, "fsdp", **changes)
    checkpoint = tmp_path / "run" / "checkpoint" / "step-2"
    assert convert(convert_to_hf, checkpoint, tmp_path / "converted", "--export_dtype=bfloat16") == 0
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "converted").iterdir()) == names
    for name in names:
        assert (tmp_path / "converted" / name).read_bytes() == (folder / name).read_bytes(), name
    with contextlib.chdir(tmp_path / "run"):
        for inside in (".", checkpoint, checkpoint.parent):
            assert convert(convert_to_hf, checkpoint, inside) == 2
            assert "would be replaced" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("kept")
    assert convert(convert_to_hf, checkpoint, tmp_path / "mine") == 2
    assert "mine/thesis.txt is no file of an export" in capsys.readouterr().err
    assert convert(convert_from_hf, tmp_path / "converted", checkpoint.parent) == 2
    assert "checkpoint has step-2, which is kept; give another folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert not [*checkpoint.parent.glob("step-0*")]
    with next(checkpoint.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert convert(convert_to_hf, checkpoint, tmp_path / "again") == 2
    assert "does not match its digest" in capsys.readouterr().err
    assert not [*tmp_path.glob("again*")]
    (tmp_path / "again").write_text("kept")
    assert convert(convert_to_hf, checkpoint, tmp_path / "again") == 2
    assert "again is a file; give a folder" in capsys.readouterr().err
    assert (tmp_path / "again").read_text() == "kept"


def test_a_folder_is_converted_to_a_checkpoint_that_runs_start_from(corpus, tmp_path, exported, capsys):
    assert convert(convert_from_hf, exported, tmp_path / "seed") == 0
    common = {"job__config_file": tmp_path / "seed" / "model.toml", "checkpoint__initial_load_path": tmp_path / "seed"}
    found = run_split(corpus, tmp_path, "tensor", trains=False, **common)
    assert_equal(found, weights_in(exported))
    code = convert(convert_from_hf, tmp_path / "nowhere", tmp_path / "other")
    assert (code, "no such folder" in capsys.readouterr().err) == (2, True)
    assert describe_step(tmp_path / "seed", step=None)[1] == "{}"  # no versions of a run


def test_a_conversion_that_fails_is_one_error_and_leaves_nothing(tmp_path, exported, capsys):
    assert convert(convert_from_hf, exported, tmp_path / "seed") == 0
    checkpoint = tmp_path / "seed" / "step-0"
    (tmp_path / "blocked" / "model.toml.partial").mkdir(parents=True)
    assert convert(convert_from_hf, exported, tmp_path / "blocked") == 2
    assert "model.toml.partial" in capsys.readouterr().err
    shutil.copytree(SHIPPED_FOLDER, tmp_path / "assets")
    (tmp_path / "assets" / "chat_template.jinja").touch()
    os.truncate(tmp_path / "assets" / "chat_template.jinja", 100 << 20)
    assets = f"--hf_assets_path={tmp_path / 'assets'}"
    assert convert(convert_to_hf, checkpoint, tmp_path / "back", assets) == 2
    assert capsys.readouterr().err.startswith("error: chat_template.jinja: has 104,857,600 bytes")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
        codes = (
            convert(convert_to_hf, checkpoint, tmp_path / "back"),
            convert(convert_from_hf, exported, tmp_path / "full"),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (codes, capsys.readouterr().err.count("File too large")) == ((2, 2), 2)
    assert not [*tmp_path.glob("back*"), *(tmp_path / "full").iterdir()]


def test_a_qwen3_is_converted_to_a_checkpoint_and_back(corpus, tmp_path, capsys):
    folder, trained = export(corpus, tmp_path, "fsdp", **QWEN3)
    assert convert(convert_from_hf, folder, tmp_path / "seed") == 2
    assert "model_type = 'qwen3', and llama3 supports only 'llama'" in capsys.readouterr().err
    assert convert(convert_from_hf, folder, tmp_path / "seed", "--model=qwen3") == 0
    assert convert(convert_to_hf, tmp_path / "seed" / "step-0", tmp_path / "back") == 0
    assert_equal(weights_in(tmp_path / "back"), trained)
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.fixture(scope="module")
def exported(corpus, tmp_path_factory):
    """Returns the folder of an export of one rank."""
    return export(corpus, tmp_path_factory.mktemp("exported"), "one")[0]
