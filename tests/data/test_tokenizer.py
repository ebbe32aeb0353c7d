"""The tokenizer of the package and its training; folders without a valid tokenizer are errors."""

import hashlib
import json
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.data.corpora import TOKENIZER, texts, write
from torchtitan_clone.commands import train_tokenizer
from torchtitan_clone.config import ConfigError
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER


def word_level(folder, vocabulary, *, config=None, special=("<end>",)):
    """Writes a tokenizer with a word-level vocabulary; returns the folder."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=min(vocabulary, key=vocabulary.get)))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_shipped_tokenizer_round_trips_text():
    tokenizer = build_tokenizer(None)
    assert tokenizer.vocab_size == 2048
    assert tokenizer.decode([tokenizer.eos_id]) == "<|end_of_text|>"
    assert tokenizer.fingerprint == hashlib.sha256((SHIPPED_FOLDER / "tokenizer.json").read_bytes()).hexdigest()
    for text in ["def f(x):\n\treturn  x", "größe 日本 🙂\r\n\0", " "]:
        assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


def test_a_text_cannot_contain_the_separator():
    tokenizer = build_tokenizer(None)
    text = "before<|end_of_text|>after"
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        (ids,) = one.encode_batch([text])
        assert one.eos_id not in ids
        assert one.decode(ids) == text


def test_training_a_tokenizer_is_deterministic():
    first, second = (train_tokenizer.train(texts(200), vocab_size=280) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 280
    assert first.token_to_id("<|end_of_text|>") == 0


def test_ids_may_have_gaps(tmp_path):
    tokenizer = build_tokenizer(word_level(tmp_path, {"a": 0, "b": 700}, config={"eos_token": "<end>"}))
    assert tokenizer.vocab_size == 701
    assert tokenizer.eos_id == 2


def test_an_eos_token_may_be_an_object(tmp_path):
    folder = word_level(tmp_path, {"a": 0}, config={"eos_token": {"content": "<end>", "special": True}})
    assert build_tokenizer(folder).eos_id == 1


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}, {"eos_token": ""}])
def test_a_missing_eos_token_is_an_error_with_the_choices(tmp_path, config):
    folder = word_level(tmp_path, {"a": 0}, config=config)
    with pytest.raises(ConfigError) as error:
        build_tokenizer(folder)
    expected = (folder, "has no eos_token", "to one of the special tokens: <end>.")
    assert all(fragment in str(error.value) for fragment in expected)


@pytest.mark.parametrize("declared", [None, "0", "9", "128001"])
def test_an_eos_token_without_an_id_gets_the_next_free_one(tmp_path, caplog, declared):
    """The ids that tokenizer_config.json gives may be those of a larger vocabulary, as in torchtitan's test assets."""
    decoder = {} if declared is None else {declared: {"content": "</s>", "special": True}}
    config = {"eos_token": "</s>", "added_tokens_decoder": decoder}
    tokenizer = build_tokenizer(word_level(tmp_path, {"a": 0}, config=config))
    assert (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.decode([2])) == (2, 3, "</s>")
    assert "the eos_token '</s>' of tokenizer_config.json has no id in tokenizer.json; it gets the next" in caplog.text
    assert tokenizer.encode_batch(["a"]) == [[0]]


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"hf_assets_path = .*has no tokenizer\.json; set it to"):
        build_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "{}", "\udcff"])
def test_an_invalid_tokenizer_file_is_an_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"hf_assets_path = .*is not a valid tokenizer .*download"):
        build_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"chat_template": "x\ud83d"}, "chat_template = "),
        ({"added_tokens_decoder": {"1": {"content": "\udfff", "special": True}}}, "added_tokens_decoder = "),
        ({"eos_token": "\udfff"}, "eos_token = "),
        ({"\ud83d": 1}, r"\ud83d = 1"),
    ],
)
def test_half_of_a_surrogate_pair_is_an_error(tmp_path, changes, place):
    folder = word_level(tmp_path, {"a": 0}, config={"eos_token": "<end>"} | changes)
    with pytest.raises(ConfigError) as error:
        build_tokenizer(folder)
    assert f"tokenizer_config.json: {place}" in str(error.value)
    assert "must be valid Unicode, without halves of surrogate pairs; correct the file" in str(error.value)


def test_byte_lengths_of_tokens_add_up_to_the_text():
    tokenizer = build_tokenizer(None)
    lengths = tokenizer.byte_lengths()
    text = "def größe(日本): return 'x' * 3\n\n\t🙂"
    assert sum(lengths[token] for token in tokenizer.encode_batch([text])[0]) == len(text.encode())
    assert lengths[tokenizer.eos_id] == 0


def test_special_tokens_above_the_vocabulary_have_no_length(tmp_path):
    added = {"1": {"content": "<end>", "special": True}, "2": {"content": "<mask>", "special": True}}
    folder = word_level(tmp_path, {"a": 0}, config={"eos_token": "<end>", "added_tokens_decoder": added})
    tokenizer = build_tokenizer(folder)
    assert tokenizer.backend.token_to_id("<mask>") == 2
    assert tokenizer.byte_lengths()[1:] == [0]


def test_an_id_of_the_hub_names_the_command_that_downloads_it(tmp_path):
    command = r"hf download org/name tokenizer\.json tokenizer_config\.json"
    with pytest.raises(ConfigError, match=rf"no such folder; .* tokenizer of the Hugging Face hub, .*`{command}`"):
        build_tokenizer("org/name")
    for path in ("name", str(tmp_path / "name"), "org/name/more", "~/name"):
        with pytest.raises(ConfigError, match="no such folder; set it to that of a tokenizer") as error:
            build_tokenizer(path)
        assert "hf download" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--vocab_size=-1"], "--vocab_size=-1: must be from 257 (the bytes and <|end_of_text|>) to 16777216"),
        (["--vocab_size=256"], "--vocab_size=256: must be from 257"),
        (["--dataset_path=empty"], "error: empty: no text in a.txt of empty; set"),
        (["--folder=taken"], "error: "),
        (["--folder=blocked"], "error: "),
    ],
)
def test_training_that_cannot_give_a_tokenizer_is_one_error(tmp_path, python, words, complaint):
    write(tmp_path, {"text.txt": "a text", "empty/a.txt": "", "taken": "", "blocked/tokenizer.json/a": ""})
    command = [
        python,
        Path(__file__).parents[2] / "scripts" / "train_tokenizer.py",
        "--dataset_path=text.txt",
        "--folder=made",
        *words,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, complaint in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert not list(tmp_path.rglob("tokenizer_config.json"))


def test_added_tokens_that_are_text_have_its_bytes(tmp_path):
    backend = Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.add_tokens(["\u65e5\u672c\u8a9e"])
    tokenizer = replace(TOKENIZER, backend=backend, vocab_size=backend.get_vocab_size())
    text = "\u65e5\u672c\u8a9e and \u65e5\u672c\u8a9e"
    (ids,) = tokenizer.encode_batch([text])
    lengths = tokenizer.byte_lengths()
    assert sum(lengths[token] for token in ids) == len(text.encode())


TEXT = "The owner said: \u6f22\u5b57 and \U0001f389 cost 77 e\u0301uro.\n  \ufb01ne </s>"
TRAINED = [f"The street to {n} costs {n * n} euro, said the owner of the old house." for n in range(60)]


def word_piece():
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(TRAINED, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "</s>"]))
    return made


def unigram():
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        TRAINED, trainers.UnigramTrainer(vocab_size=100, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    )
    return made


def byte_fallback():
    """As Llama 2: a mark before the text, and bytes for characters that are not in the vocabulary."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = sorted({*"".join(TRAINED), "\u2581"} - {" "})
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", *bytes_, *characters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "</s>"])
    return made


def byte_level():
    """As Qwen, which composes characters, and with a space before the text."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(TRAINED, trainer)
    return made


MADE = {made.__name__: made for made in (word_piece, unigram, byte_fallback, byte_level)}


def stored(folder, made, config=None):
    """Writes a tokenizer; returns the folder."""
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"} | (config or {})))
    return str(folder)


@pytest.mark.parametrize("name", MADE)
def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path, name):
    tokenizer = build_tokenizer(stored(tmp_path, MADE[name]()))
    texts_ = [TEXT, "", "  ", "owner", *TRAINED[:3]]
    for text, (ids, sizes) in zip(texts_, tokenizer.encode_with_sizes(texts_), strict=True):
        assert [ids] == tokenizer.encode_batch([text])
        assert len(ids) == len(sizes)
        assert sum(sizes) == len(text.encode()) or not ids
        assert min(sizes, default=0) >= 0
    (_, sizes), (_, twice) = tokenizer.encode_with_sizes(["owner", "owner owner"])
    assert sum(twice[len(sizes) :]) in (5, 6)  # of the second word, with the space before it or without


@pytest.mark.parametrize("name", MADE)
def test_the_bytes_of_ids_alone_are_close_to_those_of_the_text(tmp_path, name):
    tokenizer = build_tokenizer(stored(tmp_path, MADE[name]()))
    lengths = tokenizer.byte_lengths()
    text = " ".join(TRAINED)
    found = sum(lengths[token] for token in tokenizer.encode_batch([text])[0])
    assert found == pytest.approx(len(text.encode()), rel=0.01)
    assert lengths[tokenizer.eos_id] == 0


def test_an_eos_token_that_is_in_the_vocabulary_only_has_no_bytes(tmp_path):
    """As in torchtitan's test assets, whose end of text is no added token."""
    made = Tokenizer.from_str(TOKENIZER.backend.to_str())
    content = json.loads(made.to_str())
    content["model"]["vocab"]["</s>"] = 2048
    tokenizer = build_tokenizer(stored(tmp_path, Tokenizer.from_str(json.dumps(content))))
    assert (tokenizer.eos_id, tokenizer.byte_lengths()[2048]) == (2048, 0)


def test_a_panic_of_the_library_is_an_error(tmp_path):
    content = json.loads(word_piece().to_str()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    tokenizer = build_tokenizer(stored(tmp_path, Tokenizer.from_str(json.dumps(content))))
    for encode in (tokenizer.encode_batch, tokenizer.encode_with_sizes):
        with pytest.raises(
            ConfigError, match=r"model\.hf_assets_path: chunk size must be non-zero; it must encode any"
        ):
            encode(["a text"])


@pytest.mark.parametrize("model", [{"dropout": 0.1}, {"dropout": 1.0}])
def test_random_ids_are_refused(tmp_path, model):
    made = byte_level()
    made.model.dropout = model["dropout"]
    with pytest.raises(ConfigError, match="draws the ids of a text at random"):
        build_tokenizer(stored(tmp_path, made))


def test_a_text_that_cannot_be_encoded_is_an_error(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ConfigError, match=r"model\.hf_assets_path: .*UNK.*must encode any text"):
        build_tokenizer(str(tmp_path)).encode_batch(["unknown"])
