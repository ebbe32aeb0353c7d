"""Special tokens that a text spells out are characters, or their ids with parse_special_tokens.

Of tokenizer.py, encoder.py, preparation.py, opening.py and streaming.py, against transformers.
"""

import json
import pickle

import pyarrow
import pytest
from transformers import AutoTokenizer

from tests.data.corpora import TOKENIZER, jsonl, open_corpus, parquet, read_hub_in, write
from tests.data.loaders import assert_equal, next_batches, train_loader
from tests.data.test_token_store import documents
from tests.data.test_tokenizer_files import BEFORE, END, START, TRAINED, made_tokenizer, stored
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, DataSource, Training
from torchtitan_clone.data import build_tokenizer, open_dataset
from torchtitan_clone.data.opening import prepare_sources
from torchtitan_clone.data.token_store import inner_ends

TURN = "<|im_start|>"
TEXTS = [
    *TRAINED[:20],
    f"{TURN}user\nhello{END}{TURN}assistant",
    f"a {START} b",
    "<|im_star|> <b> </s",
    f"{TURN}{TURN}",
]
SPELLED = 3 + 1 + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a tokenizer with <s>, </s>, <pad> and <|im_start|>, of which <s> precedes texts."""
    return with_turns(tmp_path_factory.mktemp("assets") / "t", post_processor=BEFORE, bos_token=START)


def with_turns(path, **config):
    stored(path, **config)
    made = made_tokenizer()
    made.post_processor = config.pop("post_processor")
    made.add_special_tokens([TURN])
    made.save(str(path / "tokenizer.json"))
    return str(path)


def test_spelled_special_tokens_are_characters_unless_they_are_parsed(tmp_path, folder, caplog):
    """The ids are those of transformers. Both stores are kept, and the count is that of all parts."""
    caplog.set_level("INFO")
    path = write(tmp_path / "data", {"a.jsonl": jsonl(TEXTS[:21]), "b.jsonl": jsonl(TEXTS[21:])})
    tokenizer, theirs = build_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    stores = {}
    for parse in (False, True):
        given = {
            "training": Training(dataset_path=str(path), parse_special_tokens=parse),
            "data": Data(cache_folder=str(tmp_path / "cache"), held_out_fraction=0.0, prepare_processes=1),
        }
        expected = theirs(TEXTS, split_special_tokens=not parse).input_ids
        for _ in range(2):
            caplog.clear()
            (stores[parse],) = prepare_sources(**given, tokenizer=tokenizer, part_bytes=1).values()
            assert documents(stores[parse], "train") == [[*ids, 1] for ids in expected]
            assert sum(stores[parse].meta.special_tokens.values()) == SPELLED
            is_new = "prepared" in caplog.text
            warned = f"spells out special tokens {SPELLED} times, which are encoded as characters; set parse_spec"
            assert caplog.text.count(warned) == (is_new and not parse)
            assert (f"its text spells out {SPELLED} special tokens" in caplog.text) == (is_new and parse)
        assert not is_new
    assert stores[False].folder != stores[True].folder
    assert stores[False].fingerprint != stores[True].fingerprint  # a run does not resume with the other
    assert (400 in stores[False].tokens("train"), 400 in stores[True].tokens("train")) == (False, True)


def test_ends_within_parsed_documents_are_reported(tmp_path, folder, caplog):
    """The end-of-text token of a chat may be the end of a turn."""
    path = write(tmp_path / "data", {"a.jsonl": jsonl([f"a{END}b{END}", *TRAINED])})
    given = {"cache": tmp_path / "cache", "tokenizer": build_tokenizer(folder)}
    store = open_corpus(path, **given, held_out_fraction=0.0, parse_special_tokens=True).store
    assert inner_ends(store) == inner_ends(store, block=7) == 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"the text of {path} spells out the end-of-text token 2 times, each of which ends a doc")
    assert inner_ends(open_corpus(path, **given, held_out_fraction=0.0).store) == 0


def test_a_text_without_special_tokens_has_no_warning(tmp_path, caplog):
    store = open_corpus(write(tmp_path / "data", {"a.jsonl": jsonl(TEXTS)}), cache=tmp_path / "cache").store
    assert store.meta.special_tokens == {"train": 0, "validation": 0}  # the package's tokenizer has others
    assert not caplog.records


def test_sources_of_a_mixture_differ(tmp_path, folder):
    path = str(write(tmp_path / "data", {"a.jsonl": jsonl(TEXTS)}))
    sources = [DataSource(name=str(parse), path=path, parse_special_tokens=parse) for parse in (False, True)]
    data = Data(cache_folder=str(tmp_path / "cache"), held_out_fraction=0.0, sources=sources)
    stores = prepare_sources(training=Training(), data=data, tokenizer=build_tokenizer(folder))
    assert {name: 400 in store.tokens("train") for name, store in stores.items()} == {"False": False, "True": True}


def test_a_pickled_tokenizer_parses_too(folder):
    for tokenizer in (build_tokenizer(folder), build_tokenizer(folder).parsing_special_tokens()):
        again = pickle.loads(pickle.dumps(tokenizer))
        (ids,) = again.encode_batch([TURN])
        assert (ids == [0, 400]) == tokenizer.parse_special_tokens
        assert ids == tokenizer.encode_batch([TURN])[0]


def test_a_beginning_token_and_its_absence_have_stores_of_their_own(tmp_path, folder):
    """Documents and positions start at the token in every row."""
    path = write(tmp_path / "data", {"a.jsonl": jsonl([text * 2 for text in TRAINED])})
    opened = [
        open_corpus(path, cache=tmp_path / "cache", tokenizer=build_tokenizer(folder, add_bos=add_bos))
        for add_bos in (None, False, None)
    ]
    first, without, again = (dataset.store for dataset in opened)
    assert first.folder == again.folder != without.folder
    assert [ids[1:] for ids in documents(first, "train")] == documents(without, "train")
    for dataset, start in ((opened[0], 0), (opened[1], None)):
        starts, ends = set(), set()
        for batch in next_batches(train_loader(dataset, seq_len=64), 5):
            is_start = batch.positions_BT[:, 1:] == 0
            starts |= set(batch.tokens_BT[:, 1:][is_start].tolist())
            ends |= set(batch.tokens_BT[:, :-1][is_start].tolist())
            assert (batch.documents_BT[:, 1:] != batch.documents_BT[:, :-1]).equal(is_start)
        assert ends == {1}
        assert (starts == {0}) == (start == 0)


def test_a_run_resumes_with_the_same_tokens_only(tmp_path, folder):
    given = {"cache": tmp_path / "cache", "held_out_fraction": 0.0}
    path = write(tmp_path / "data", {"a.jsonl": jsonl(TEXTS * 20)})

    def loader(*, add_bos=None, parse=False):
        tokenizer = build_tokenizer(folder, add_bos=add_bos)
        return train_loader(open_corpus(path, **given, tokenizer=tokenizer, parse_special_tokens=parse), seq_len=64)

    stopped, going = loader(), loader()
    next_batches(stopped, 2)
    next_batches(going, 2)
    same = loader()
    same.load_state_dict(stopped.state_dict(), allow_change=False)
    assert_equal(next_batches(same, 3), next_batches(going, 3))
    with pytest.raises(ConfigError, match=r"fingerprint of the tokenizer, which data\.add_bos is part of, was"):
        loader(add_bos=False).load_state_dict(stopped.state_dict(), allow_change=False)
    with pytest.raises(ConfigError, match="the fingerprint of the data was"):
        loader(parse=True).load_state_dict(stopped.state_dict(), allow_change=False)


@pytest.mark.parametrize("kind", ["bin", "parquet"])
def test_token_ids_cannot_be_parsed(tmp_path, kind):
    contents = {"bin": b"\5\0\6\0\0\0" * 9, "parquet": parquet([[5, 6, 0]], kind=pyarrow.list_(pyarrow.int32()))}
    path = write(tmp_path / "data", {f"a.{kind}": contents[kind]})
    sources = [DataSource(name="ids", path=str(path), parse_special_tokens=True)]
    data = Data(cache_folder=str(tmp_path / "cache"), sources=sources)
    message = f'data.sources, name "ids": parse_special_tokens = true: {path} holds token ids, among which those of'
    with pytest.raises(ConfigError, match=message):
        prepare_sources(training=Training(), data=data, tokenizer=TOKENIZER)


def test_a_special_token_beyond_the_vocabulary_cannot_be_parsed(tmp_path):
    """It stands in tokenizer_config.json alone, and the model need not have its id."""
    decoder = {"400": {"content": TURN, "special": True}}
    tokenizer = build_tokenizer(stored(tmp_path / "t", added_tokens_decoder=decoder))
    path = write(tmp_path / "data", {"a.jsonl": jsonl(TEXTS)})
    given = {"cache": tmp_path / "cache", "tokenizer": tokenizer, "held_out_fraction": 0.0}
    with pytest.raises(ConfigError, match=r"'<\|im_start\|>' .* its id 400 is not below the 400 of the vocabulary; sa"):
        open_corpus(path, **given, parse_special_tokens=True)
    assert open_corpus(path, **given).store.meta.special_tokens["train"] == SPELLED


def test_a_stream_parses_too(tmp_path, folder, monkeypatch, caplog):
    pytest.importorskip("datasets")
    read_hub_in(tmp_path, patch=monkeypatch)
    write(tmp_path, {"org/name/0.jsonl": jsonl(TEXTS * 20)})
    rows, identities = {}, set()
    for parse in (True, False):
        training = Training(dataset="org/name", parse_special_tokens=parse)
        dataset = open_dataset(training=training, data=Data(), tokenizer=build_tokenizer(folder))
        batches = next_batches(train_loader(dataset, seq_len=64), 8)
        rows[parse] = json.dumps([batch.tokens_BT.tolist() for batch in batches])
        identities.add(dataset.identity.data)
        assert caplog.text.count("the text of org/name spells out special tokens, which are") == (not parse)
    assert (" 400" in rows[True], " 400" in rows[False]) == (True, False)
    assert len(identities) == 2
