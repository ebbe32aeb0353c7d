"""What transformers makes of the exported files of a tokenizer: the ids that are trained, and what precedes a text."""

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.tokenizer import tokenizer_files

TRAINED = [f"def f{number}(x):\n\n    return x + {number * 12345}\n" for number in range(200)]
TEXT = "def f(x):\n\n    return x + 12345678\n"
START, END = "<s>", "</s>"
PATTERN = r"\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+| ?[^\s\p{L}\p{N}]+| ?\p{L}+"


def made_tokenizer():
    """Returns a byte-level tokenizer whose pattern is that of no class of transformers."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[START, END, "<pad>"], initial_alphabet=alphabet)
    made.train_from_iterator(TRAINED, trainer)
    return made


BEFORE = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
AROUND = processors.BertProcessing((END, 1), (START, 0))
BYTES = processors.ByteLevel(trim_offsets=True)


def stored(folder, *, post_processor=None, **config):
    """Writes a tokenizer; returns its folder."""
    made = made_tokenizer()
    if post_processor is not None:
        made.post_processor = post_processor
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END} | config))
    return str(folder)


def exported(folder, out, *, tokenizer):
    """Writes the exported files; returns what transformers makes of them."""
    out.mkdir()
    for name, content in tokenizer_files(tokenizer).items():
        (out / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize(
    "name",
    ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2TokenizerFast", "GPTNeoXTokenizerFast", "CohereTokenizerFast",
     "LlamaTokenizerFast", "GemmaTokenizerFast", "T5TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
     "MyTokenizer", None],
)  # fmt: skip
def test_users_of_an_export_get_the_ids_that_are_trained(tmp_path, name):
    config = {} if name is None else {"tokenizer_class": name}
    folder = stored(tmp_path / "t", **config, auto_map={"AutoTokenizer": ["my.MyTokenizer", None]})
    tokenizer = build_tokenizer(folder)
    used = exported(folder, tmp_path / "out", tokenizer=tokenizer)
    assert used(TEXT).input_ids == tokenizer.encode_batch([TEXT])[0]
    assert used.eos_token_id == tokenizer.eos_id
    assert "token_type_ids" not in used(TEXT)
    again = build_tokenizer(str(tmp_path / "out"))
    assert again.fingerprint == tokenizer.fingerprint


# Post-processor, config, data.add_bos, and what then precedes each text.
STARTS = {
    "none": (None, {}, None, None),
    "named, not put before texts": (None, {"bos_token": START}, None, None),
    "bytes": (BYTES, {"bos_token": START}, None, None),
    "template": (BEFORE, {"bos_token": START}, None, 0),
    "template without a name": (BEFORE, {}, None, 0),
    "template after bytes, as Llama 3": (processors.Sequence([BYTES, BEFORE]), {"bos_token": START}, None, 0),
    "both ends": (AROUND, {}, None, 0),
    "flag": (None, {"bos_token": START, "add_bos_token": True}, None, 0),
    "flag against the template": (BEFORE, {"bos_token": START, "add_bos_token": False}, None, None),
    "flag without a token": (None, {"add_bos_token": True}, None, None),
    "flag that is null": (BEFORE, {"bos_token": START, "add_bos_token": None}, None, 0),
    "option": (None, {"bos_token": {"content": START}}, True, 0),
    "option against the template": (BEFORE, {"bos_token": START}, False, None),
    "option against the flag": (None, {"bos_token": START, "add_bos_token": False}, True, 0),
    "option against both": (BEFORE, {"bos_token": START, "add_bos_token": True}, False, None),
    "option as the template": (BEFORE, {}, True, 0),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_precedes_a_text_is_the_same_in_training_and_in_the_export(tmp_path, name):
    post_processor, config, add_bos, expected = STARTS[name]
    folder = stored(tmp_path / "t", post_processor=post_processor, **config)
    tokenizer = build_tokenizer(folder, add_bos=add_bos)
    assert tokenizer.bos_id == expected
    start = "" if expected is None else "<s> (0) before and "
    assert tokenizer.describe() == f"400 ids; {start}</s> (1) after each text"
    (ids,) = tokenizer.encode_batch([TEXT])
    plain = made_tokenizer().encode(TEXT).ids
    assert ids == (plain if expected is None else [expected, *plain])
    assert tokenizer.encode_batch([TEXT], add_bos=False) == [plain]
    ((with_sizes, sizes),) = tokenizer.encode_with_sizes([TEXT])
    assert (with_sizes, sum(sizes)) == (ids, len(TEXT.encode()))
    used = exported(folder, tmp_path / "out", tokenizer=tokenizer)
    found = used(TEXT).input_ids
    assert found == ([*ids, 1] if post_processor is AROUND else ids)
    again = build_tokenizer(str(tmp_path / "out"))
    assert (again.bos_id, again.eos_id, again.encode_batch([TEXT])) == (expected, 1, [ids])
    is_same = tokenizer.fingerprint == build_tokenizer(folder, add_bos=False).fingerprint
    assert is_same == (expected is None)


def test_a_beginning_token_may_have_a_colon(tmp_path):
    """In a template that is given as text, what follows a colon is a type."""
    folder = stored(tmp_path / "t", bos_token="<|im:start|>")
    made = made_tokenizer()
    made.add_special_tokens(["<|im:start|>"])
    made.save(str(tmp_path / "t" / "tokenizer.json"))
    tokenizer = build_tokenizer(folder, add_bos=True)
    (ids,) = tokenizer.encode_batch([TEXT])
    assert ids == [400, *made.encode(TEXT).ids]
    assert exported(folder, tmp_path / "out", tokenizer=tokenizer)(TEXT).input_ids == ids


OTHERS = {
    "without the text": processors.TemplateProcessing(single=f"{START} {END}", special_tokens=[(START, 0), (END, 1)]),
    "two before": processors.TemplateProcessing(single=f"{START} <pad> $A", special_tokens=[(START, 0), ("<pad>", 2)]),
    "another after": processors.TemplateProcessing(single="$A <pad>", special_tokens=[("<pad>", 2)]),
    "twice": processors.TemplateProcessing(single="$A $A", special_tokens=[]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_post_processor_that_changes_texts_otherwise_is_refused(tmp_path, name):
    folder = stored(tmp_path / "t", post_processor=OTHERS[name], bos_token=START)
    with pytest.raises(
        ConfigError, match=r"hf_assets_path = .*its post-processor turns the ids \[.* of a text into \["
    ):
        build_tokenizer(folder)


@pytest.mark.parametrize("name", ["two before", "another after"])
def test_a_run_may_put_nothing_around_texts(tmp_path, name):
    folder = stored(tmp_path / "t", post_processor=OTHERS[name], bos_token=START)
    tokenizer = build_tokenizer(folder, add_bos=False)
    used = exported(folder, tmp_path / "out", tokenizer=tokenizer)
    assert used(TEXT).input_ids == tokenizer.encode_batch([TEXT])[0] == made_tokenizer().encode(TEXT).ids


def test_a_start_that_has_no_token_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data\.add_bos = true: tokenizer_config\.json .* names no bos_token that has"
    ):
        build_tokenizer(stored(tmp_path / "t", bos_token="<start>"), add_bos=True)


def test_an_end_token_without_an_id_has_that_of_the_run_in_the_export(tmp_path):
    """Other tokens without an id would get it from transformers, which adds them first."""
    others = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
    decoder = {
        str(128000 + number): {"content": token, "special": True} for number, token in enumerate(others.values())
    }
    folder = stored(tmp_path / "t", added_tokens_decoder=decoder, **others)
    tokenizer = build_tokenizer(folder)
    used = exported(folder, tmp_path / "out", tokenizer=tokenizer)
    assert (tokenizer.eos_id, used.eos_token_id, len(used)) == (400, 400, 401)
    assert used(TEXT).input_ids == tokenizer.encode_batch([TEXT])[0]


def test_another_tokenizer_in_the_folder_is_not_exported(tmp_path):
    folder = stored(tmp_path / "t")
    tokenizer = build_tokenizer(folder)
    content = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(OSError, match="not the one that was read at the start; put it back"):
        tokenizer_files(tokenizer)
