"""Hostile folders in the format of the Hugging Face hub: one clear error each, and nothing outside is opened.

Reads with torchtitan_clone/documents.py, torchtitan_clone/hub/folder.py, torchtitan_clone/hub/formats.py and
torchtitan_clone/data/tokenizer.py.
"""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from tests.support.harness import run_ranks
from tests.support.hostile_folders import write_header
from tests.support.runs import exit_codes, options
from torchtitan_clone.commands.convert_from_hf import convert
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Model
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER, build_tokenizer, tokenizer_files
from torchtitan_clone.hub.folder import CONFIG_FILE, INDEX_FILE, open_weight_folder
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import find_model

SPEC = find_model(Model())
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 2048,
    "intermediate_size": 96, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
FILES = ("one.safetensors", "two.safetensors")


def weights(folder):
    """Writes a small folder with two files and an index; an equal file is next to the folder."""
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG))
    save_file({"a": torch.arange(3)}, folder / FILES[0])
    save_file({"b": torch.arange(4.0)}, folder / FILES[1])
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict(zip("ab", FILES, strict=True))}))
    shutil.copy(folder / FILES[0], folder.parent / "outside.safetensors")
    return folder


def index(folder, **weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def link(folder, name, target):
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def pipe(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)


def header(folder, text, *, size=None, data=bytes(8)):
    write_header(folder / FILES[0], text, data, length=size)


def entry(*, dtype="F32", shape=(2,), span=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


FOLDERS = {
    "a path above": lambda f: index(f, a="../outside.safetensors"),
    "an absolute path": lambda f: index(f, a=str(f.parent / "outside.safetensors")),
    "a number for a name": lambda f: index(f, a=3),
    "no file of that name": lambda f: index(f, a="three.safetensors"),
    "a tensor of another file": lambda f: index(f, a=FILES[1], b=FILES[0]),
    "a tensor that no file has": lambda f: index(f, a=FILES[0], b=FILES[1], c=FILES[0]),
    "an index that is a list": lambda f: (f / INDEX_FILE).write_text("[]"),
    "an index that is deep": lambda f: (f / INDEX_FILE).write_text("[" * 200_000),
    "two files with one tensor": lambda f: ((f / INDEX_FILE).unlink(), shutil.copy(f / FILES[0], f / "c.safetensors")),
    "a link above": lambda f: link(f, FILES[0], "../outside.safetensors"),
    "a link to a device": lambda f: link(f, FILES[0], "/dev/zero"),
    "a link to itself": lambda f: link(f, FILES[0], FILES[0]),
    "config.json is a link": lambda f: link(f, CONFIG_FILE, "/etc/passwd"),
    "blobs of a folder that is no cache": lambda f: (
        (f.parents[1] / "blobs").mkdir(), shutil.move(f / FILES[0], f.parents[1] / "blobs" / "x"),
        (f / FILES[0]).symlink_to("../../blobs/x"),
    ),
    **{f"{name} is a pipe": lambda f, name=name: pipe(f, name) for name in (CONFIG_FILE, INDEX_FILE, *FILES)},
    "config.json with 1e400": lambda f: (f / CONFIG_FILE).write_text('{"hidden_size": NaN}'),
    "config.json with many digits": lambda f: (f / CONFIG_FILE).write_text('{"hidden_size": %s}' % ("9" * 5000)),
    "parts that overlap": lambda f: header(f, {"a": entry(), "b": entry(span=(4, 12))}, data=bytes(12)),
    "a hole between parts": lambda f: header(f, {"a": entry(), "b": entry(span=(12, 20))}, data=bytes(20)),
    "an unknown type": lambda f: header(f, {"a": entry(dtype="F33")}),
    "a shape of 2**70": lambda f: header(f, {"a": entry(shape=(2**70,))}),
    "an offset of 2**70": lambda f: header(f, {"a": entry(span=(0, 2**70))}),
    "a product above 2**64": lambda f: header(f, {"a": entry(shape=(2**62, 4))}),
    "a product above 2**64 with 0": lambda f: header(f, {"a": entry(shape=(2**62, 2**62, 0), span=(0, 0))}, data=b""),
    "a huge header": lambda f: header(f, "{}", size=2**63),
    "a header that begins with a mark": lambda f: header(f, "\ufeff" + json.dumps({"a": entry()})),
    "a header with half of a surrogate pair": lambda f: header(f, {"a": entry(), "__metadata__": {"b": "\ud800"}}),
    "a header with two tables of metadata": lambda f: header(
        f, '{"__metadata__": {}, "__metadata__": {}, "a": ' + json.dumps(entry()) + "}"
    ),
    "a deep header": lambda f: header(f, '{"a":' * 200_000),
}  # fmt: skip


@pytest.mark.parametrize("damage", FOLDERS.values(), ids=FOLDERS)
def test_a_hostile_folder_of_weights_is_one_error(tmp_path, damage):
    folder = weights(tmp_path / "model" / "revisions" / "1")
    assert sorted(open_weight_folder(folder).entries) == ["a", "b"]
    damage(folder)
    with pytest.raises(ConfigError) as error:
        open_weight_folder(folder)
    assert len(error.value.messages) == 1
    assert len(str(error.value)) < 1000


def test_the_links_of_the_hub_cache_are_followed(tmp_path):
    source = weights(tmp_path / "source")
    shutil.copytree(SHIPPED_FOLDER, source, dirs_exist_ok=True)
    blobs, snapshot = tmp_path / "models--org--name" / "blobs", tmp_path / "models--org--name" / "snapshots" / "4f5a"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.move(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    (tmp_path / "revision").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "revision"):
        found = open_weight_folder(folder)
        assert {name: tuple(entry.shape) for name, entry in found.entries.items()} == {"a": (3,), "b": (4,)}
        tokenizer = build_tokenizer(str(folder))
        assert tokenizer.fingerprint == build_tokenizer(None).fingerprint
        files = tokenizer_files(tokenizer)
        assert files["tokenizer.json"] == (SHIPPED_FOLDER / "tokenizer.json").read_bytes()
    # Only the blobs are open to it, not the rest of the cache.
    (snapshot.parent / "other").mkdir()
    shutil.copy(blobs / f"{0:064x}", snapshot.parent / "other" / CONFIG_FILE)
    link(snapshot, CONFIG_FILE, f"../other/{CONFIG_FILE}")
    with pytest.raises(ConfigError, match=r"config\.json: a link may lead only to .*copy the file into the folder"):
        open_weight_folder(snapshot)


SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
WRONG = {
    "hidden_size": ["64", -1, 0, 1.5, True, [64], {}, 2**70, 2**25],
    "num_hidden_layers": ["2", 10**9],
    "num_attention_heads": ["4", 0, [4]],
    "num_key_value_heads": ["2", 0, {"a": 1}],
    "vocab_size": [True, 1e6, 2**63],
    "intermediate_size": [[1], "x"],
    "rms_norm_eps": ["1e-5", -1, [1e-5], True],
    "max_position_embeddings": ["8192", -5, 2.5],
    "tie_word_embeddings": ["false", 0, 1],
    "rope_theta": ["500000", -1, []],
    "rope_scaling": [
        "llama3",
        [1],
        3,
        {"rope_type": 3},
        {"rope_type": "llama3", **dict.fromkeys(SCALING, "8")},
        {"type": ["x"]},
    ],
    "rope_parameters": ["default", [{}], {"rope_theta": "x"}],
    "head_dim": ["16", [], 2**70, 7],
    "model_type": [3, ["llama"], "x" * 10_000],
}


def test_wrong_types_in_config_json_are_errors_with_the_key():
    assert format_of(SPEC).from_config(CONFIG)["n_kv_heads"] == 2
    for key, values in WRONG.items():
        for value in (value for value in values if value is not None):
            with pytest.raises(ConfigError, match=rf"config\.json: {key}") as error:
                format_of(SPEC).from_config(CONFIG | {key: value})
            assert len(str(error.value)) < 500, (key, value)


def test_null_stands_for_the_default():
    null = dict.fromkeys(["rope_scaling", "head_dim", "tie_word_embeddings", "mlp_bias", "rope_theta"])
    bare = {key: value for key, value in CONFIG.items() if key not in null}
    assert format_of(SPEC).from_config(bare | null) == format_of(SPEC).from_config(bare)


def test_the_converter_refuses_a_model_that_cannot_be_built(tmp_path):
    folder = weights(tmp_path / "model")
    for change in ({"num_hidden_layers": 10**9}, {"hidden_size": "64"}, {"num_key_value_heads": 3}):
        (folder / CONFIG_FILE).write_text(json.dumps(CONFIG | change))
        with pytest.raises(ConfigError):
            convert(folder, tmp_path / "seed", spec=SPEC, dtype=torch.float32)
    assert not (tmp_path / "seed").exists()


# ------------------------------------------------------------------ tokenizers


def tokenizer(folder, vocabulary, *, config, special=("<end>",)):
    """Writes a word-level tokenizer; returns its folder."""
    folder.mkdir(exist_ok=True)
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    found.add_special_tokens(list(special))
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_model(folder, change):
    """Writes the package's tokenizer with a changed model."""
    shutil.copytree(SHIPPED_FOLDER, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content["model"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


EOS = {"eos_token": "<end>"}
TOKENIZERS = {
    "an empty vocabulary": lambda f: tokenizer(f, {}, config=EOS, special=()),
    "an id of 2**31": lambda f: with_model(f, lambda model: model["vocab"].update({"6": 2**31})),
    "a panic of the library": lambda f: with_model(f, lambda model: model.update(continuing_subword_prefix="x" * 99)),
    "a config that is a list": lambda f: (tokenizer(f, {"a": 0}, config=[]), f)[1],
    "a number as eos_token": lambda f: tokenizer(f, {"a": 0}, config={"eos_token": 3}),
    "a list as content": lambda f: tokenizer(f, {"a": 0}, config={"eos_token": {"content": []}}),
    "a list of added tokens": lambda f: tokenizer(f, {"a": 0}, config=EOS | {"added_tokens_decoder": []}),
    "an id of many digits": lambda f: tokenizer(
        f, {"a": 0}, config=EOS | {"added_tokens_decoder": {"9" * 5000: {"content": "<end>", "special": True}}}
    ),
    "a text among the ends": lambda f: (
        tokenizer(f, {"a": 0}, config=EOS),
        (f / "generation_config.json").write_text('{"eos_token_id": [0, "1"]}'),
        f,
    )[-1],
    "a text as the end": lambda f: (
        tokenizer(f, {"a": 0}, config=EOS),
        (f / "generation_config.json").write_text('{"eos_token_id": "1"}'),
        f,
    )[-1],
    "tokenizer.json is a pipe": lambda f: (tokenizer(f, {"a": 0}, config=EOS), pipe(f, "tokenizer.json"), f)[-1],
    "a link outside": lambda f: (tokenizer(f, {"a": 0}, config=EOS), link(f, "tokenizer_config.json", "../x"), f)[-1],
    "a template is a pipe": lambda f: (tokenizer(f, {"a": 0}, config=EOS), os.mkfifo(f / "chat_template.jinja"), f)[-1],
    "a deep file": lambda f: (tokenizer(f, {"a": 0}, config=EOS), (f / "tokenizer.json").write_text("[" * 10**6), f)[
        -1
    ],
}


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_one_error(tmp_path, make):
    (tmp_path / "x").write_text(json.dumps(EOS))
    folder = make(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"model\.hf_assets_path") as error:
        build_tokenizer(str(folder))
    assert len(str(error.value)) < 1000


def test_special_tokens_of_the_config_alone_are_added(tmp_path):
    decoder = {
        "2": {"content": "<end>", "special": True}, "1": {"content": "<start>", "special": True},
        "3": {"content": "<think>", "special": False}, "0": {"content": "a", "special": False},
    }  # fmt: skip
    config = EOS | {"added_tokens_decoder": decoder}
    found = build_tokenizer(str(tokenizer(tmp_path / "t", {"a": 0}, config=config, special=())))
    assert (found.eos_id, found.vocab_size) == (2, 3)
    assert found.decode([1, 2]) == "<start> <end>"
    plain = build_tokenizer(str(tokenizer(tmp_path / "t", {"a": 0}, config=EOS, special=("<start>", "<end>"))))
    assert found.encode_batch(["a<end>"]) == plain.encode_batch(["a<end>"])
    # A token that text never becomes does not make a vocabulary larger than the model's.
    known = EOS | {"added_tokens_decoder": {"2": {"content": "<pad>", "special": True}}}
    assert build_tokenizer(str(tokenizer(tmp_path / "t", {"a": 0}, config=known))).vocab_size == 2


# ------------------------------------------------------------------ a run


def test_runs_refuse_hostile_folders_before_they_start(corpus, tmp_path):
    cases = []
    hostile = ["a path above", "a link to a device", f"{CONFIG_FILE} is a pipe", "a deep header", "an unknown type"]
    for number, name in enumerate(hostile):
        FOLDERS[name](folder := weights(tmp_path / f"weights{number}"))
        cases.append({"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": folder})
    for name in ("an empty vocabulary", "an id of 2**31", "tokenizer.json is a pipe", "a number as eos_token"):
        cases.append({"model__hf_assets_path": TOKENIZERS[name](tmp_path / name.replace(" ", "_"))})
    argv = [options(corpus, tmp_path / "runs", **changes) for changes in cases]
    ((*results,),) = run_ranks(exit_codes, 1, argv, tmp_path / "log")
    for code, output in results:
        assert code == 2, output
        assert output.count("error: ") == 1
        assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()
