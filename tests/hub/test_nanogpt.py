"""Checkpoints of nanoGPT are converted and resume: hub/nanogpt.py, and scripts/convert_from_nanogpt.py."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.hub.test_torchtitan import ALIKE, SAVED, STEPS, assert_equal_losses, twin_run
from tests.support.checkpoint_states import read_tensors
from tests.support.harness import run_ranks
from tests.support.nanogpt_twin import OPTIMIZER, SIZES, train_and_save
from tests.support.runs import losses, options
from tests.support.trainers import train_all
from torchtitan_clone.commands import convert_from_nanogpt
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.documents import DocumentError
from torchtitan_clone.hub.nanogpt import open_nanogpt

PAGE = Path(__file__).parents[2] / "docs" / "checkpointing.md"
MODEL = {
    "model__name": "gpt2", "model__args__n_kv_heads": None, "model__args__multiple_of": None,
    "model__args__vocab_size": SIZES["vocab_size"], "model__args__max_seq_len": SIZES["block_size"],
    "model__args__gelu_approximation": "none",
}  # fmt: skip
UNSET = {name: None for name in MODEL if name.startswith("model__args__")}
LANGUAGES = ("toml", "text")
OURS = {**ALIKE, **MODEL, "optimizer__decay_all_parameters": False, "optimizer__lr": OPTIMIZER["lr"]}


def argv_of(corpus, folder, **changes):
    return options(corpus, folder, **{**OURS, **changes})


def convert(source, folder, *words):
    """Returns the exit code of the command."""
    return convert_from_nanogpt.main([str(source), str(folder), *words])


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """Returns files of a model with biases that was compiled and of one without, with the losses of all steps."""
    folder = tmp_path_factory.mktemp("nanogpt")
    found = {}
    for bias in (True, False):
        run = twin_run(corpus, folder / str(bias))
        found[bias] = Path(run.folder) / "ckpt.pt", train_and_save(run, bias=bias, is_compiled=bias)
    return found


def test_a_run_resumes_with_the_losses_that_nanogpt_has(corpus, tmp_path, saved):
    starts = []
    for bias, (file, _) in saved.items():
        argv = argv_of(corpus, tmp_path / str(bias), checkpoint__enable=False, model__args__bias=bias)
        assert convert(file, tmp_path / f"import-{bias}", *argv) == 0
        path = f"--checkpoint.initial_load_path={tmp_path}/import-{bias}"
        starts.append([*argv, path, "--checkpoint.initial_load_model_only=false"])
    run_ranks(train_all, 1, starts)
    for bias, (_, expected) in saved.items():
        found = losses(tmp_path / str(bias))
        assert [*found] == [*range(SAVED + 1, STEPS + 1)]
        assert_equal_losses([*found.values()], expected[SAVED:])
        progress = json.loads((tmp_path / f"import-{bias}" / f"step-{SAVED}" / "progress.json").read_text())
        assert progress == {"step": SAVED, "tokens_seen": SAVED * 8 * 64, "skipped_steps": 0, "data": {}}


def test_weights_alone_are_those_of_step_0(corpus, tmp_path, saved):
    file, _ = saved[True]
    assert convert(file, tmp_path, "--model_only", *argv_of(corpus, tmp_path)) == 0
    found, theirs = read_tensors(tmp_path / "step-0"), torch.load(file)["model"]
    assert all(name.startswith("model/") for name in found)
    assert torch.equal(found["model/tok_embeddings.weight"], theirs["_orig_mod.lm_head.weight"])
    keys = theirs["_orig_mod.transformer.h.1.attn.c_attn.weight"].chunk(3)[1]
    assert torch.equal(found["model/layers.1.attention.wk.weight"], keys)


def test_the_documented_command_converts(saved, tmp_path, monkeypatch, capsys):
    """Runs it on the documented file, with a model of the size of the one that was saved."""
    section = PAGE.read_text().partition("\n## nanoGPT's checkpoints\n")[2].partition("\n## ")[0]
    settings, typed = (re.search(rf"^```{each}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1] for each in LANGUAGES)
    monkeypatch.chdir(tmp_path)
    Path("my_run.toml").write_text(settings)
    Path("out").symlink_to(saved[False][0].parent)
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": SIZES["vocab_size"], "max_seq_len": 64}
    python, script, *words = shlex.split(typed.splitlines()[0])
    assert (python, Path(script).name) == ("python", "convert_from_nanogpt.py")
    assert convert(*words, *(f"--model.args.{name}={size}" for name, size in sizes.items())) == 0
    printed = capsys.readouterr()
    assert "optimizer.lr = 0.0006, and the run that saved the checkpoint had 0.01" in printed.err
    assert f"wrote my_import/step-{SAVED}: " in printed.out


class Call:
    """Pickled, it calls a function where it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def of_groups(content):
    first, second = content["optimizer"]["param_groups"]
    return {"optimizer": {**content["optimizer"], "param_groups": [second, first]}}


def without_state(content):
    return {"optimizer": {**content["optimizer"], "state": {}}}


REFUSED = {
    "another family": ({"model__name": "qwen2", **UNSET}, {}, 'nanoGPT trains models of the family "gpt2"'),
    "other heads": ({"model__args__n_heads": 2}, {}, "n_heads = 2, and the model of .*ckpt.pt has 4; set it to that"),
    "another GELU": ({"model__args__gelu_approximation": "tanh"}, {}, "gelu_approximation = .tanh., and .* has 'none'"),
    "biases": ({"model__args__bias": True}, {}, r"missing in the checkpoint: transformer\.ln_f\.bias|missing .*\.bias"),
    "fewer positions": ({"model__args__max_seq_len": 32}, {}, r"transformer.wpe.weight \[64, 64\] -> \[32, 64\]"),
    "another optimizer": ({"optimizer__name": "Muon"}, {}, "missing in the checkpoint: .*momentum"),
    "a fork": ({}, lambda c: {"model_args": {**c["model_args"], "use_relu": True}}, "model_args has use_relu, which"),
    "other groups": ({}, of_groups, "other groups than all matrices and all vectors of the model"),
    "no moments": ({}, without_state, "other groups than all matrices and all vectors of the model"),
    "no number of steps": ({}, lambda _: {"iter_num": None}, "lacks model, model_args, config, iter_num, or"),
    "a negative step": ({}, lambda _: {"iter_num": -1}, "iter_num = -1: must be an integer from 0"),
    "more than tensors": ({}, lambda _: {"model": {"x": Path("y")}}, "is not plain data: the pickle names pathlib"),
    "no tensor": ({}, lambda _: {"model": {"transformer.wte.weight": 3}}, "model: transformer.wte.weight is no tensor"),
    "an output of its own": (
        {}, lambda c: {"model": {**c["model"], "lm_head.weight": torch.ones(2112, 64)}}, "differs from the embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_match_is_refused_in_one_line(corpus, tmp_path, saved, kind):
    changes, entries, what = REFUSED[kind]
    content = torch.load(saved[False][0])
    torch.save({**content, **(entries(content) if entries else {})}, tmp_path / "ckpt.pt")
    config = load_config(argv_of(corpus, tmp_path, **{"model__args__bias": False, **changes}))
    with pytest.raises((ConfigError, DocumentError), match=what) as refused:
        open_nanogpt(tmp_path / "ckpt.pt", config=config)
    assert "\n" not in str(refused.value)


def test_no_code_runs_that_a_file_names(corpus, tmp_path, capsys):
    torch.save({"model": Call(os.mkdir, tmp_path / "x")}, tmp_path / "ckpt.pt")
    assert convert(tmp_path / "ckpt.pt", tmp_path / "import", *argv_of(corpus, tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("ckpt.pt: is not plain data: the pickle names posix.mkdir; nothing of it is executed")
    assert not (tmp_path / "x").exists()


def test_dropout_and_other_settings_are_warned_of(corpus, tmp_path, saved):
    content = torch.load(saved[False][0])
    torch.save({**content, "model_args": {**content["model_args"], "dropout": 0.2}}, tmp_path / "ckpt.pt")
    config = load_config(argv_of(corpus, tmp_path, model__args__bias=False, optimizer__weight_decay=0.3))
    assert open_nanogpt(tmp_path / "ckpt.pt", config=config).warnings == (
        "optimizer.weight_decay = 0.3, and the run that saved the checkpoint had 0.1",
        "the run that saved the checkpoint had dropout 0.2; there is none here",
    )
