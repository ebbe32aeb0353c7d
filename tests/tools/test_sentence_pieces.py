"""Models of SentencePiece as tokenizer.json: ids of its own library, and what is refused, by the script too."""

import json
import sysconfig
from pathlib import Path

import pytest

from torchtitan_clone.commands import convert_tokenizer
from torchtitan_clone.config import ConfigError
from torchtitan_clone.data import build_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
LIBRARY = Path(sysconfig.get_path("stdlib"))
LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS = {
    "llama": LLAMA | {"split_digits": True},
    "gemma": LLAMA
    | {"add_dummy_prefix": False, "user_defined_symbols": ["<start_of_turn>", "\n\n", "\u2581\u2581", "  "]},
    "defaults": {},
    "cased": {"normalization_rule_name": "nmt_nfkc_cf", "byte_fallback": True, "pad_id": 3},
}
TEXTS = ["größe  日本\nﬁ", " a", "x = 1.25", "<s>a</s>", "", "\uff21\uff22\u3000c", "\n\n    return  self\n"]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Returns a function that trains a model on a module of the standard library, and returns its file."""

    def make(name, **options):
        file = tmp_path_factory.mktemp("model") / "tokenizer.model"
        prefix = str(file).removesuffix(".model")
        sizes = {"model_type": "bpe", "vocab_size": 700, "num_threads": 1, "minloglevel": 2, "hard_vocab_limit": False}
        text = str(LIBRARY / "argparse.py")
        sentencepiece.SentencePieceTrainer.train(input=text, model_prefix=prefix, **sizes | options)
        return file

    return make


def script(*words):
    """Runs the script on the first texts of the standard library."""
    return convert_tokenizer.main([*map(str, words), "--texts=15"])


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_its_own_library(tmp_path, train, name, capsys):
    file = train(name, **MODELS[name])
    folder = tmp_path / "release"
    assert script(file, folder) == 0
    assert capsys.readouterr().out.endswith(": the ids of 28 texts are those of SentencePiece\n")
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(file)), build_tokenizer(str(folder))
    assert ours.encode_batch(TEXTS) == theirs.encode(TEXTS)
    assert (ours.vocab_size, ours.eos_id, ours.bos_id) == (theirs.vocab_size(), theirs.eos_id(), None)
    ids = theirs.encode("    return self")
    assert ours.decode(ids) == theirs.decode(ids)


def test_the_settings_of_a_release_are_kept(tmp_path, train):
    file = train("llama", **MODELS["llama"])
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    )
    with pytest.raises(ConfigError, match=r"has no tokenizer.json; set it to a folder with"):
        build_tokenizer(str(tmp_path))
    file = file.rename(tmp_path / file.name)
    with pytest.raises(
        ConfigError, match=rf"convert tokenizer.model, .* `python scripts/convert_tokenizer.py {file} {tmp_path}`\.$"
    ):
        build_tokenizer(str(tmp_path))
    assert script(file, tmp_path) == 0
    assert build_tokenizer(str(tmp_path)).bos_id == 1


REFUSED = {
    "unigram": ({"model_type": "unigram"}, "only models of BPE have the same ids in tokenizer.json"),
    "word": ({"model_type": "word"}, "only models of BPE"),
    "suffix": ({"treat_whitespace_as_suffix": True}, "spaces are not at the start of its pieces"),
    "both": ({"user_defined_symbols": ["<|user|>"]}, "it puts a space before texts, which"),
    "tiktoken": (None, "no model of SentencePiece"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_and_nothing_is_written(tmp_path, train, name, capsys):
    options, reason = REFUSED[name]
    file = tmp_path / "tokenizer.model"
    if options is None:
        file.write_text("IQ== 0\nIg== 1\n")
    else:
        file = train(name, **options)
    assert script(file, tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: {reason}")
    assert not (tmp_path / "out").exists()
