"""Repositories of the Hugging Face hub by their names, in a cache that huggingface_hub made: config/downloads.py."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.chats import many_chats, template, write_tokenizer
from tests.run.test_from_folder import SIZES
from tests.support.harness import run_ranks
from tests.support.hub_server import COMMIT, hub_of
from tests.support.runs import options
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.downloads import find_downloaded
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.opening import describe_source
from torchtitan_clone.tools import serving
from torchtitan_clone.train import main


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Returns $HF_HOME with a model and a dataset, which has a README, and of another dataset only one of two files."""
    folder = tmp_path_factory.mktemp("hub")
    model, chats = folder / "model", folder / "chats"
    chats.mkdir()
    write_tokenizer(model, chat_template=template("chatml", is_marked=False))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=172,
        vocab_size=422, max_position_embeddings=512, initializer_range=0.1, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    (model / "original").mkdir()
    (model / "original" / "weights.pth").write_text("not needed")
    rows = "".join(json.dumps({"messages": chat}) + "\n" for chat in many_chats(40))
    (chats / "train.jsonl").write_text(rows)
    (chats / "README.md").write_text("# Chats")
    home = tmp_path_factory.mktemp("home")
    repositories = {"models/org/llama": model, "datasets/org/chats": chats, "datasets/org/partial": chats}
    with hub_of(repositories) as address:
        given = {"endpoint": address, "cache_dir": home / "hub"}
        snapshot_download("org/llama", **given, ignore_patterns=["original/*"])
        snapshot_download("org/chats", **given, repo_type="dataset")
        snapshot_download("org/partial", **given, repo_type="dataset", allow_patterns=["README.md"])
    shutil.rmtree(folder)
    return home


@pytest.fixture
def cache(home, monkeypatch):
    """Returns the cache, which this process uses, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return home / "hub"


def train_with(argv, cache):
    """Trains with this cache; returns the exit code."""
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(cache), True
    return main(argv)


def test_a_run_names_tokenizer_weights_and_chats_as_on_the_hub(tmp_path, home, cache):
    """Its export is what engines make of it, and ends texts at the ends of turns."""
    changes = {
        **SIZES, "model__hf_assets_path": "org/llama", "checkpoint__initial_load_in_hf": True,
        "training__dataset_path": f"org/chats@{COMMIT}", "training__format": "chat", "training__steps": 2,
        "data__cache_folder": tmp_path / "cache", "data__prepare_processes": 1, "checkpoint__last_save_in_hf": True,
        "checkpoint__export_dtype": "bfloat16",
    }  # fmt: skip
    argv = options(tmp_path, tmp_path, **changes)
    assert run_ranks(train_with, 1, argv, cache) == [0]
    assert "org/llama" in (tmp_path / "run" / "config.toml").read_text()
    assert str(home) not in (tmp_path / "run" / "config.toml").read_text()
    folder = tmp_path / "run" / "hf" / "step-2"
    assert (folder / "tokenizer.json").read_bytes() == (
        find_downloaded("org/llama", repository="tokenizer") / "tokenizer.json"
    ).read_bytes()
    tokenizer = build_tokenizer(str(folder))
    assert [tokenizer.decode([each]) for each in tokenizer.end_ids] == ["</s>", "<|im_end|>"]
    checks = list(serving.check_folder(folder, prompts=["import self", "größe"], max_new_tokens=8))
    assert [check.describe() for check in checks] == [
        "files: ok", "keys of rotary positions: ok", "tokenizer: ok", "transformers: ok",
    ]  # fmt: skip


def test_what_is_not_in_the_cache_is_an_error_that_names_the_download(cache):
    assert find_downloaded("org/llama", repository="model").name == COMMIT
    for name, command in {"org/other": "org/other", "org/llama@v1": "org/llama"}.items():
        files = "tokenizer.json tokenizer_config.json" + (" --revision v1" if "@" in name else "")
        with pytest.raises(
            ConfigError, match=rf'"{name}": there is no such folder.*\(`hf download {command} {files}`\)'
        ):
            build_tokenizer(name)
    with pytest.raises(ConfigError, match=r"\(`hf download org/llama --repo-type dataset`\), or stream it"):
        describe_source(Training(dataset_path="org/llama"))  # a model is no dataset


def test_a_part_of_a_dataset_is_not_taken_for_all_of_it(cache):
    with pytest.raises(
        ConfigError, match=r"only a part of it; complete it \(`hf download org/partial --repo-type dataset`\)"
    ):
        describe_source(Training(dataset_path="org/partial"))
    folder = next((cache / "datasets--org--partial" / "snapshots").iterdir())
    assert describe_source(Training(dataset_path=str(folder))).endswith(f", 1 files in {folder}")  # the README


def test_a_folder_of_that_name_goes_first(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "llama").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"the folder has no tokenizer.json"):
        build_tokenizer("org/llama")
