"""A source of chats: its token store, its rows with and without packing, mixtures with text, and what is refused.

Of marks.py, and of token_store.py, preparation.py, splits.py, packing.py and best_fit.py where they read marks.
"""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.chats import many_chats, template, turns, write_tokenizer
from tests.data.corpora import TOKENIZER, jsonl, open_corpus, texts, write
from tests.data.loaders import assert_equal, concatenate, next_batches, train_loader, validation_loader
from tests.data.mixtures import Run, open_mixture
from tests.data.test_chat import found
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, DataSource, Stage, Training
from torchtitan_clone.config.stages import find_data_errors
from torchtitan_clone.data import build_tokenizer, open_dataset
from torchtitan_clone.data.marks import CHAT, END, TARGET, ids_of, marks_of
from torchtitan_clone.data.opening import describe_source, prepare_sources
from torchtitan_clone.tools.duplicates import drop_duplicates

CHATML = template("chatml", is_marked=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a tokenizer whose turns end with the end-of-text token."""
    assets = tmp_path_factory.mktemp("assets") / "t"
    return write_tokenizer(assets, chat_template=CHATML, eos_token="<|im_end|>")


def rows_of(chats) -> bytes:
    """Returns lines {"messages": ...}."""
    return b"".join(json.dumps({"messages": chat}).encode() + b"\n" for chat in chats)


def opened(path, tmp_path, folder, **options):
    """Opens a source of chats."""
    tokenizer = build_tokenizer(folder)
    options = {"prepare_processes": 1, **options}
    return open_corpus(path, cache=tmp_path / "cache", tokenizer=tokenizer, format="chat", **options)


def documents(store, split):
    """Returns ids and targets of each chat of a store, by its offsets."""
    tokens = store.tokens(split)[:]
    assert (marks_of(tokens) & CHAT).all()
    ends = np.flatnonzero(marks_of(tokens) & END) + 1
    assert ends.tolist() == store.offsets(split)[1:].tolist()
    parts = np.split(tokens, ends[:-1])
    return [(ids_of(each).tolist(), (marks_of(each) & TARGET > 0).astype(int).tolist()) for each in parts]


def test_a_store_holds_what_is_rendered_with_its_targets(tmp_path, folder):
    """Of several parts, of lines and parquet; the splits have all chats, each once."""
    chats = [*many_chats(30), turns("only a question")]
    path = write(tmp_path / "data", {"a.jsonl": rows_of(chats[:10]) + b"\n"})
    table = [{"messages": chat, "id": 1, "tools": None} for chat in chats[10:]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path / "b.parquet")
    training = Training(dataset_path=str(path), format="chat")
    data = Data(cache_folder=str(tmp_path / "cache"), held_out_fraction=0.2, prepare_processes=1)
    given = {"training": training, "data": data, "tokenizer": build_tokenizer(folder)}
    (store,) = prepare_sources(**given, part_bytes=1).values()
    rendered = [each for chat in chats[:-1] for each in found(folder, {"messages": chat})]
    by_split = {split: documents(store, split) for split in ("train", "validation")}
    assert sorted(by_split["train"] + by_split["validation"]) == sorted(rendered)
    assert min(map(len, by_split.values())) > 1
    assert store.meta.targets == {split: sum(sum(each) for _, each in of_split) for split, of_split in by_split.items()}
    assert store.meta.without_targets == 1
    (whole,) = prepare_sources(**given).values()
    assert whole.folder == store.folder
    assert store.dtype == "uint16"


def test_texts_of_one_chat_are_in_one_split(tmp_path):
    qwen3 = write_tokenizer(tmp_path / "t", chat_template=template("qwen3", is_marked=False))
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(30))})
    store = opened(path, tmp_path, qwen3, held_out_fraction=0.3).store
    starts = [{tuple(ids[:18]) for ids, _ in documents(store, split)} for split in ("train", "validation")]
    assert sum(store.meta.documents.values()) == 10 * (1 + 2 + 3)
    assert min(map(len, starts)) > 3
    assert not starts[0] & starts[1]


def test_a_store_of_text_has_nothing_of_chats(tmp_path):
    store = open_corpus(write(tmp_path / "data", {"a.jsonl": jsonl(texts(9))}), cache=tmp_path / "cache").store
    assert [*json.loads((store.folder / "meta.json").read_text())] == [
        *("format", "source_fingerprint", "tokenizer_fingerprint", "vocab_size", "eos_id", "held_out_fraction"),
        *("source", "tokens", "documents", "bad_rows", "first_bad_rows", "text_bytes", "token_bytes", "special_tokens"),
    ]
    assert store.fingerprint == store.meta.source_fingerprint
    assert not [*store.folder.glob("*.marks")]


def test_what_determines_targets_is_in_the_fingerprint(tmp_path, folder):
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(9))})
    other = write_tokenizer(tmp_path / "t", chat_template=f" {CHATML}", eos_token="<|im_end|>")
    stores = [opened(path, tmp_path, folder, supervise=each).store for each in ("assistant", "last", "all")]
    stores.append(opened(path, tmp_path, other).store)
    stores += [
        opened(path, tmp_path, folder, **{f"supervise_{name}": False}).store for name in ("thinking", "tool_calls")
    ]
    assert len({store.fingerprint for store in stores}) == len({store.folder for store in stores}) == 6
    assert stores[0].fingerprint.startswith(f"{stores[0].meta.source_fingerprint} marks ")
    assert opened(path, tmp_path, folder).store.fingerprint == stores[0].fingerprint


def test_changed_marks_are_noticed(tmp_path, folder):
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(9))})
    store = opened(path, tmp_path, folder).store
    marks = store.folder / "train.marks"
    content = bytearray(marks.read_bytes())
    content[-2] ^= TARGET
    marks.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is corrupt .train.marks is not what was written.; delete"):
        opened(path, tmp_path, folder)


def targets_of(batches):
    """Returns how often each target occurs, with the tokens of its document before it that the row has."""
    seen = Counter()
    for batch in batches:
        rows = zip(batch.tokens_BT.tolist(), batch.targets_BT.tolist(), batch.positions_BT.tolist(), strict=True)
        for tokens, targets, positions in rows:
            for place, (target, position) in enumerate(zip(targets, positions, strict=True)):
                if target >= 0:
                    seen[*tokens[place - position : place + 1], target] += 1
    return seen


def expected_targets(chats):
    """Returns the same of ids and targets of chats; the first token of a chat is never a target."""
    return Counter(tuple(ids[: place + 1]) for ids, targets in chats for place in range(1, len(ids)) if targets[place])


@pytest.mark.parametrize("supervise", ["assistant", "all"])
def test_each_target_of_a_packed_chat_is_trained_once_an_epoch(tmp_path, folder, supervise):
    """Although the end-of-text token ends turns, what precedes a target is all of its chat before it."""
    chats = many_chats(40)
    path = write(tmp_path / "data", {"a.jsonl": rows_of(chats)})
    options = {"packing": "best_fit", "supervise": supervise}
    dataset = opened(path, tmp_path, folder, held_out_fraction=0.0, **options)
    rows = dataset.num_rows("train", seq_len=512)
    (batch,) = next_batches(train_loader(dataset, seq_len=512, global_batch_size=rows), 1)
    rendered = [each for chat in chats for each in found(folder, {"messages": chat}, supervise=supervise)]
    assert targets_of([batch]) == expected_targets(rendered)
    assert batch.num_targets == sum(expected_targets(rendered).values())
    assert rows < len(chats)  # several in a row


def test_windows_have_the_targets_of_chats(tmp_path, folder):
    """Without packing, a row begins anywhere in a chat; without document masking the targets are the same."""
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(20))})
    dataset = opened(path, tmp_path, folder, held_out_fraction=0.0)
    stored = dataset.store.tokens("train")[:]
    is_target = marks_of(stored) & TARGET > 0
    rows = dataset.num_rows("train", seq_len=32)
    for document_masking in (True, False):
        options = {"seq_len": 32, "global_batch_size": rows, "document_masking": document_masking}
        (batch,) = next_batches(train_loader(dataset, **options), 1)
        windows = {tuple(ids_of(stored[32 * n :][:33]).tolist()): is_target[32 * n + 1 :][:32] for n in range(rows)}
        for tokens, targets in zip(batch.tokens_BT.tolist(), batch.targets_BT.tolist(), strict=True):
            (window,) = [each for each in windows if list(each[:-1]) == tokens]
            assert targets == np.where(windows[window], window[1:], -100).tolist()


@pytest.mark.parametrize("long_chats", ["drop", "cut"])
def test_too_long_chats_are_left_out_or_cut_after_a_turn(tmp_path, folder, caplog, long_chats):
    caplog.set_level("INFO")
    chats = many_chats(40)
    path = write(tmp_path / "data", {"a.jsonl": rows_of(chats)})
    given = {"packing": "best_fit", "long_chats": long_chats, "held_out_fraction": 0.0}
    dataset = opened(path, tmp_path, folder, **given)
    rows = dataset.num_rows("train", seq_len=100)
    (batch,) = next_batches(train_loader(dataset, seq_len=100, global_batch_size=rows), 1)
    kept, cut = [], 0
    for chat in chats:
        lengths = range(len(chat), 0, -2 if long_chats == "cut" else -len(chat))
        by_length = [found(folder, {"messages": chat[:length]})[0] for length in lengths]
        fitting = [
            each for each in by_length if len(each[0]) - 1 <= 101
        ]  # the line end after the last turn is left out
        fitting = fitting[:1] if fitting[:1] != by_length[:1] or len(by_length[0][0]) <= 101 else fitting[1:2]
        cut += bool(fitting) and fitting[0] != by_length[0]
        kept += fitting
    too_long = sum(len(found(folder, {"messages": chat})[0][0]) > 101 for chat in chats)
    assert len(kept) < len(chats)
    assert (cut > 2) == (long_chats == "cut")
    assert targets_of([batch]) == expected_targets(kept)
    counted = f"{too_long} of 40 chats are longer than 101 tokens: {len(chats) - len(kept)} are left out, and {cut} cut"
    assert counted in caplog.text
    assert f"{100 * cut / 40:.2f} % of the documents are cut" in caplog.text


def test_if_no_chat_fits_the_error_says_so(tmp_path, folder):
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(9))})
    dataset = opened(path, tmp_path, folder, packing="best_fit", held_out_fraction=0.0)
    with pytest.raises(
        ConfigError, match=r"in 9 documents; add text, or raise training.seq_len: longer chats are left"
    ):
        train_loader(dataset, seq_len=4)


def test_duplicates_are_dropped_with_their_marks(tmp_path, folder):
    chats = many_chats(20)
    path = write(tmp_path / "data", {"a.jsonl": rows_of([*chats, *chats[:7]])})
    store = opened(path, tmp_path, folder, held_out_fraction=0.0).store
    (unique,) = drop_duplicates({"a": store}).values()
    assert documents(unique, "train") == documents(store, "train")[:20]


STAGES = [
    Stage(first_step=11, weights={"text": 0.1, "more": 0.2, "chats": 0.3, "last": 0.4}),
    Stage(first_step=21, seq_len=32, weights={"chats": 0.5, "text": 0.5}),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, folder):
    """Returns a mixture of two sources of text and two of chats in three stages."""
    path = tmp_path_factory.mktemp("mixture")
    write(path, {"text/a.jsonl": jsonl(texts(40, seed=1)), "more/a.jsonl": jsonl(texts(30, seed=2))})
    write(path, {"chats/a.jsonl": rows_of(many_chats(40)), "last/a.jsonl": rows_of(many_chats(30, seed=1))})
    chat = {"format": "chat"}
    changes = {"text": {}, "more": {}, "chats": chat, "last": chat | {"supervise": "last"}}
    entries = [DataSource(name=name, path=str(path / name), **each) for name, each in changes.items()]
    return open_mixture(path, entries=entries, stages=STAGES, tokenizer=build_tokenizer(folder))


def test_a_mixture_with_chats_is_the_same_on_any_ranks_and_after_a_resume(mixture):
    alone = [batch for (batch,) in Run(mixture).batches(30)]
    ranks = Run(mixture, num_ranks=2)
    two = [concatenate([[batch] for batch in of_ranks])[0] for of_ranks in ranks.batches(30)]
    assert_equal(alone, two)
    four = [
        concatenate([[batch] for batch in each])[0] for each in Run(mixture, num_ranks=4, num_workers=0).batches(30)
    ]
    assert_equal(alone, four)
    before = Run(mixture, num_ranks=2)
    for stop in range(1, 30):
        before.batches(1)
        num_ranks, count = (1, 2, 4)[stop % 3], min(3, 30 - stop)
        resumed = Run(mixture, num_ranks=num_ranks, state=before.state()).batches(count)
        assert_equal(alone[stop : stop + count], [concatenate([[batch] for batch in each])[0] for each in resumed])
    for size in (1, 2, 3, 8):
        for batch in alone[8:12]:
            parts = batch.microbatches(size)
            assert_equal([batch], concatenate([[part] for part in parts]))
    shares = {name: [] for name in mixture.sources}
    for batch in alone:
        for group, targets in zip(batch.groups_BT[:, 0].tolist(), batch.targets_BT, strict=True):
            shares[list(mixture.sources)[group]].append((targets >= 0).float().mean().item())
    means = {name: np.mean(each) for name, each in shares.items()}
    assert min(means["text"], means["more"]) > 0.9
    assert 0.05 < means["last"] < means["chats"] < 0.7


def test_held_out_chats_have_their_targets(tmp_path, folder):
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(30))})
    dataset = opened(path, tmp_path, folder, packing="best_fit", held_out_fraction=0.3)
    batches = list(validation_loader(dataset, seq_len=512))
    assert targets_of(batches) == expected_targets(documents(dataset.store, "validation"))


def test_a_bad_chat_is_reported_with_its_line(tmp_path, folder):
    bad = [{"messages": [{"content": "a"}]}, {"text": "a"}, {"messages": [{"role": "user"}]}]
    lines = rows_of(many_chats(2)) + b"".join(json.dumps(row).encode() + b"\n" for row in bad) + b"{\n"
    path = write(tmp_path / "data", {"a.jsonl": lines})
    first = r"data.max_bad_rows = 0: the data has 1 unreadable row.*a.jsonl:3: message 1 has no role"
    with pytest.raises(ConfigError, match=first):
        opened(path, tmp_path, folder)
    with pytest.raises(ConfigError, match=r"a.jsonl:4: neither the key.*a.jsonl:5: message 1, of the user, has no con"):
        opened(path, tmp_path, folder, max_bad_rows=2)
    store = opened(path, tmp_path, folder, max_bad_rows=4).store
    assert sum(store.meta.documents.values()) == 2
    assert store.meta.bad_rows == 4


def test_a_chat_of_parquet_that_is_not_utf8_is_a_bad_row(tmp_path, folder):
    content = pyarrow.array([b"a", b"\xff", b"b"]).view(pyarrow.string())
    turn = pyarrow.StructArray.from_arrays([pyarrow.array(["assistant"] * 3), content], names=["role", "content"])
    chats = pyarrow.ListArray.from_arrays([0, 1, 2, 3], turn)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": chats}), path)
    with pytest.raises(ConfigError, match=r"1 unreadable row.*a.parquet:2: not UTF-8"):
        opened(path, tmp_path, folder)
    assert opened(path, tmp_path, folder, max_bad_rows=1, held_out_fraction=0.0).store.meta.documents["train"] == 2


def test_special_tokens_that_messages_spell_out_are_counted(tmp_path, folder, caplog):
    chats = [turns("a<|im_end|>", "<|im_start|><|im_end|>"), *many_chats(9), turns("<\uff5cUser\uff5c> <|im_end", "b")]
    opened(write(tmp_path / "data", {"a.jsonl": rows_of(chats)}), tmp_path, folder)
    (warning,) = [each.message for each in caplog.records if "spell" in each.message]
    assert warning.endswith(
        "spell out special tokens 4 times, which are encoded as their ids, as those of the chat template"
    )
    caplog.clear()
    opened(write(tmp_path / "other", {"a.jsonl": rows_of(chats[1:-1])}), tmp_path, folder)
    assert not caplog.records


def test_a_special_token_without_an_id_in_the_vocabulary_is_refused(tmp_path):
    declared = {"450": {"content": "<|later|>", "special": True}}
    assets = write_tokenizer(tmp_path / "t", chat_template=CHATML, added_tokens_decoder=declared)
    made = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    next_id = 1 + max(token["id"] for token in made["added_tokens"])
    config = tmp_path / "t" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("450", str(next_id)))
    with pytest.raises(
        ConfigError, match=rf'training.format = "chat": .*<.later.>.* its id {next_id} is not below.*json\.$'
    ):
        opened(write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(2))}), tmp_path, assets)


def test_chats_without_any_target_are_refused(tmp_path, folder):
    path = write(tmp_path / "data", {"a.jsonl": rows_of([turns("a"), turns("b")])})
    with pytest.raises(ConfigError, match=r"training data .*: no chat has a turn to train on: an assistant's, or one"):
        opened(path, tmp_path, folder)
    unmarked = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
    empty = write_tokenizer(tmp_path / "t", chat_template=unmarked)
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(3))})
    with pytest.raises(
        ConfigError, match=r"or one that the chat template marks as generated; set training.dataset_path"
    ):
        opened(path, tmp_path, empty)


def test_what_holds_no_chats_is_refused(tmp_path, folder):
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(3)), "b.txt": "text"})
    with pytest.raises(ConfigError, match=r'training.format = "chat": .*b.txt has no rows, in lines of JSON or pa'):
        opened(path, tmp_path, folder)
    with pytest.raises(ConfigError, match="chats are rendered by the tokenizer's chat template, and it has none"):
        open_dataset(
            training=Training(dataset_path=str(path / "a.jsonl"), format="chat"),
            data=Data(cache_folder=str(tmp_path / "cache")),
            tokenizer=TOKENIZER,
        )
    options = {"supervise": "last", "supervise_thinking": False}
    described = describe_source(Training(dataset_path=str(path / "a.jsonl"), format="chat", **options))
    assert described.endswith('; chats, of which supervise = "last", supervise_thinking = false are targets')


def test_options_without_an_effect_are_errors():
    def errors(training=(), source=(), **data):
        sources = [DataSource(name="a", path="a", **dict(source))] if source else []
        return list(find_data_errors(Data(sources=sources, **data), training=Training(**dict(training))))

    assert errors({"supervise": "last"}) == [
        'training.supervise = "last": has no effect with format = "text"; remove it, or set format.'
    ]
    place = 'data.sources, name "a": '
    assert errors(source={"supervise_tool_calls": False}) == [
        f'{place}supervise_tool_calls = false: has no effect with format = "text"; remove it, or set format.'
    ]
    assert errors(source={"long_chats": "cut"}) == [
        f'{place}long_chats = "cut": has no effect with format = "text"; remove it, or set format.'
    ]
    assert errors({"format": "chat", "text_key": "x"}) == [
        'training.text_key = "x": has no effect with format = "chat"; remove it, or set format.'
    ]
    chat = {"format": "chat", "long_chats": "cut"}
    assert errors(source=chat)[0].startswith(f'{place}long_chats = "cut": data.packing = "concatenate" puts long chats')
    assert errors(source=chat, packing="best_fit") == []
    assert errors({"format": "chat"}, source={"format": "chat"}) == [
        "training.format: has no effect with data.sources; set format in each of its entries instead."
    ]


def test_high_bits_in_a_store_of_text_are_no_marks(tmp_path):
    """With more than 65,536 ids in the vocabulary, tokens of text have room for them."""
    dataset = open_corpus(write(tmp_path / "data", {"a.jsonl": jsonl(texts(20))}), cache=tmp_path / "cache")
    ids = np.array(dataset.store.tokens("train")).astype(np.uint32)
    ids[:] |= TARGET << 24
    (dataset.store.folder / "train.tokens").write_bytes(ids.tobytes())
    damaged = replace(dataset, store=replace(dataset.store, meta=replace(dataset.store.meta, vocab_size=1 << 17)))
    with pytest.raises(ConfigError, match=r"is corrupt .it holds token id 3[0-9]{7}, and the tokenizer has 131072 ids"):
        next(train_loader(damaged))


@pytest.mark.parametrize("change", ["targets", "marks", "train"])
def test_damaged_counts_of_chats_are_one_error(tmp_path, folder, change):
    path = write(tmp_path / "data", {"a.jsonl": rows_of(many_chats(9))})
    meta = opened(path, tmp_path, folder).store.folder / "meta.json"
    content = json.loads(meta.read_text())
    if change == "train":
        content["marks"]["train"] = "0"
    else:
        del content[change]
    meta.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"is corrupt \(.*meta.json.*; delete"):
        opened(path, tmp_path, folder)
