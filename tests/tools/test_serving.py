"""What serving.py and scripts/serve_check.py find wrong with folders of the Hugging Face hub."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tests.tools.test_kv_cache import FAMILIES
from tests.tools.test_kv_cache import build as build_family
from torchtitan_clone.checkpoint.tensor_file import entry_for
from torchtitan_clone.commands import serve_check
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.hub.export import export_files, write_weights
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of

NAMES = ("llama3", "gemma3", "olmo3", "gpt_oss", "qwen3_5")
"""Families that differ in the rotary positions of their layers."""


def write_export(folder, *, family, dtype=torch.bfloat16, **changes):
    """Writes a model with random weights as a run exports it, in several files."""
    spec, tokenizer = MODELS[family], build_tokenizer(None)
    args = replace(FAMILIES[family], vocab_size=tokenizer.vocab_size, **changes)
    state = {name: tensor.detach().to(dtype) for name, tensor in named_state(build_family(family, args=args)).items()}
    sources = sources_of(format_of(spec).map_state(state, args=args))
    write_weights(
        folder,
        entries=[
            entry_for(name, dtype=state[ours].dtype, shape=part.shape) for name, ((ours, part), *_) in sources.items()
        ],
        read=lambda entry: assemble_source(sources[entry.name], read=state.__getitem__, dtype=entry.torch_dtype),
        files=export_files(spec=spec, model_args=args, tokenizer=tokenizer, dtype=dtype),
        file_bytes=1 << 17,
    )
    return folder


def lines(folder, capsys):
    """Returns the exit code of the script, and what it prints by what was compared."""
    code = serve_check.main([str(folder), "--max_new_tokens=8"])
    printed = capsys.readouterr().out.splitlines()
    return code, dict(line.split(": ", 1) for line in printed)


@pytest.mark.parametrize("family", NAMES)
def test_an_export_is_what_engines_make_of_it(tmp_path, family, capsys):
    found = lines(write_export(tmp_path / "hf", family=family), capsys)
    compared = ("files", "keys of rotary positions", "tokenizer", "transformers")
    assert found == (0, dict.fromkeys(compared, "ok"))


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """Returns an export with a scaling of its rotary positions."""
    folder = tmp_path_factory.mktemp("export") / "hf"
    scaling = RopeScaling(factor=8.0, original_max_seq_len=32)
    return write_export(folder, family="llama3", rope_scaling=scaling)


def changed(name, **values):
    """Returns a function that changes keys of a JSON file of a folder; None removes one."""

    def change(folder):
        content = {**json.loads((folder / name).read_text()), **values}
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


SCALING = {"rope_type": "linear", "factor": 2.0}
WRONG = {
    "the older keys differ": (
        *(changed("config.json", rope_scaling=SCALING), "keys of rotary positions"),
        "with the older keys, and {",
    ),
    "the newer key is missing": (
        *(changed("config.json", rope_parameters=None), "keys of rotary positions"),
        "config.json has no rope_parameters, which some engines read",
    ),
    "an engine computes something else": (
        *(changed("generation_config.json", suppress_tokens=list(range(1024))), "transformers"),
        "continues prompt 1 with ",
    ),
    "the end is unknown": (
        *(changed("generation_config.json", eos_token_id=7), "tokenizer"),
        "generation_config.json has eos_token_id = 7, without 0",
    ),
    "other ids": (
        changed("tokenizer_config.json", add_bos_token=True, bos_token="a", add_prefix_space=True),
        *("tokenizer", "other ids of the prompt 'import os\\\\n'"),
    ),
    "no chat template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[5].content }}"),
        *("tokenizer", "UndefinedError: "),
    ),
    "no settings": (
        lambda folder: (folder / "generation_config.json").unlink(),
        *("files", "generation_config.json is missing"),
    ),
    "a file too many": (
        lambda folder: shutil.copy(next(folder.glob("*.safetensors")), folder / "b.safetensors"),
        *("files", "model.safetensors.index.json names other files than the folder has"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_is_named(tmp_path, export, name, capsys):
    change, where, reason = WRONG[name]
    folder = shutil.copytree(export, tmp_path / "hf")
    change(folder)
    code, found = lines(folder, capsys)
    assert code == 1
    assert reason in found[where]
    assert "ok" in found.values()


def test_what_is_no_export_is_one_error(tmp_path, capsys):
    assert serve_check.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: the folder has no complete checkpoint")
