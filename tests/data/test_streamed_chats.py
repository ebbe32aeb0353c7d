"""Chats of a hub dataset, tokenized while they are read, against chats that are rendered one by one."""

import json

import numpy as np
import pytest

from tests.data.chats import many_chats, template, turns, write_tokenizer
from tests.data.corpora import jsonl, read_hub_in, texts, write
from tests.data.loaders import assert_equal, concatenate, next_batches, train_loader, validation_loader
from tests.data.mixtures import Run, open_mixture
from tests.data.test_chat import found
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, DataSource, Stage, Training
from torchtitan_clone.data import build_tokenizer, open_dataset
from torchtitan_clone.data.opening import describe_source

pytest.importorskip("datasets")

CHATS = [*many_chats(60), turns("only a question"), *many_chats(60, seed=1)]
"""Of some a turn is rendered in another way once later ones follow, so that they have a text for each."""
TOOLS = '[{"type": "function"}]'


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    """Makes the dataset org/chats."""
    read_hub_in(tmp_path, patch=monkeypatch)
    rows = [{"messages": chat, **({"tools": TOOLS} if number % 5 == 0 else {})} for number, chat in enumerate(CHATS)]
    write(tmp_path, {"org/chats/a.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a tokenizer whose turns end with the end-of-text token."""
    chat_template = template("qwen3", is_marked=False)
    return write_tokenizer(tmp_path_factory.mktemp("assets") / "t", chat_template=chat_template, eos_token="<|im_end|>")


def opened(folder, *, held_out_fraction=0.0, **training):
    """Opens the dataset."""
    return open_dataset(
        training=Training(dataset="org/chats", format="chat", **training),
        data=Data(held_out_fraction=held_out_fraction),
        tokenizer=build_tokenizer(folder),
    )


def rendered(folder, **options):
    """Returns the tokens of each chat with targets: ids, whether each is a target, and whether it ends a text."""
    chats = []
    for number, chat in enumerate(CHATS):
        row = {"messages": chat, "tools": TOOLS if number % 5 == 0 else None}
        parts = [np.array([*zip(ids, targets, strict=True)]) for ids, targets in found(folder, row, **options)]
        ends = [np.arange(len(part)) == len(part) - 1 for part in parts]
        chats.append(
            np.concatenate([np.c_[part, end] for part, end in zip(parts, ends, strict=True)]) if parts else None
        )
    return chats


@pytest.mark.parametrize("options", [{}, {"supervise": "last", "supervise_thinking": False}])
def test_each_row_of_the_batch_is_a_stream_of_chats(folder, options):
    chats = rendered(folder, **{key.removeprefix("supervise_"): value for key, value in options.items()})
    batches = next_batches(train_loader(opened(folder, **options)), 60)
    num_rows, seq_len = batches[0].tokens_BT.shape
    for row in range(num_rows):
        epochs = range(8)
        order = [chat for epoch in epochs for number, chat in enumerate(chats) if (number + epoch) % num_rows == row]
        ids, is_target, is_end = np.concatenate([chat for chat in order if chat is not None]).T
        length = seq_len * len(batches)
        assert length < len(ids)
        wanted = np.where((is_target[1:] == 1) & (is_end[:-1] == 0), ids[1:], -100)[:length]
        assert np.concatenate([batch.tokens_BT[row].numpy() for batch in batches]).tolist() == ids[:length].tolist()
        assert np.concatenate([batch.targets_BT[row].numpy() for batch in batches]).tolist() == wanted.tolist()
        begins = np.concatenate([[1], is_end[:-1]])[:length]
        begins[::seq_len] = 1  # a row continues no document
        positions = np.concatenate([batch.positions_BT[row].numpy() for batch in batches])
        assert np.flatnonzero(positions == 0).tolist() == np.flatnonzero(begins).tolist()
    assert 0 < sum(batch.num_targets for batch in batches) < 60 * num_rows * seq_len / 2


def test_streamed_chats_are_the_same_on_any_ranks_with_workers_and_after_a_resume(folder):
    dataset = opened(folder)
    alone = next_batches(train_loader(dataset), 12)
    ranks = [train_loader(dataset, rank=rank, num_ranks=2, num_workers=rank) for rank in range(2)]
    before = concatenate([next_batches(loader, 5) for loader in ranks])
    assert_equal(alone[:5], before)
    positions = [position for loader in ranks for position in loader.stream_positions]
    gathered = train_loader(dataset, gather_positions=lambda _: positions)
    next_batches(gathered, 5)
    resumed = train_loader(dataset, num_workers=2)
    resumed.load_state_dict(gathered.state_dict(), allow_change=False)
    assert_equal(alone[5:], next_batches(resumed, 7))


def test_a_mixture_of_text_and_streamed_chats_resumes_at_any_stop(tmp_path, folder):
    write(tmp_path, {"text/a.jsonl": jsonl(texts(40))})
    chats = {"dataset": "org/chats", "format": "chat"}
    entries = [
        DataSource(name="text", path="text"),
        DataSource(name="chats", **chats),
        DataSource(name="more", **chats),
    ]
    stages = [Stage(first_step=6, weights={"text": 0.2, "chats": 0.3, "more": 0.5}, seq_len=32)]
    mixture = open_mixture(tmp_path, entries=entries, stages=stages, tokenizer=build_tokenizer(folder))
    alone = [batch for (batch,) in Run(mixture).batches(14)]
    before = Run(mixture, num_ranks=2)
    for stop in range(1, 12):
        before.batches(1)
        resumed = [batch for (batch,) in Run(mixture, state=before.state()).batches(3)]
        assert_equal(alone[stop : stop + 3], resumed)


def test_other_targets_are_other_data(folder):
    identities = {
        opened(folder, **each).identity.data for each in ({}, {"supervise": "last"}, {"supervise_thinking": False})
    }
    assert len(identities) == 3
    state = train_loader(opened(folder)).state_dict()
    with pytest.raises(ConfigError, match="the fingerprint of the data was"):
        train_loader(opened(folder, supervise="last")).load_state_dict(state, allow_change=False)


def test_chats_are_held_out_whole(folder):
    dataset = opened(folder, held_out_fraction=0.2)
    held_out = sum(batch.num_targets for batch in validation_loader(dataset))
    every = sum(int(chat[1:, 1].sum()) for chat in rendered(folder) if chat is not None)
    assert 0.05 * every < held_out < 0.4 * every


def test_rows_that_are_no_chats_are_refused(tmp_path, folder):
    bad = [{"messages": [{"role": "human", "content": "a"}]}]
    write(tmp_path, {"org/chats/a.jsonl": "".join(json.dumps(row) + "\n" for row in bad).encode()})
    with pytest.raises(ConfigError, match=r"org/chats, row 0: message 1 has the unknown role 'human'; known"):
        next(train_loader(opened(folder)))
    write(tmp_path, {"org/chats/a.jsonl": json.dumps({"messages": turns("a")}).encode() + b"\n"})
    with pytest.raises(
        ConfigError, match=r"no train text in 1 rows; set it to a dataset with chats that have a turn to"
    ):
        next(train_loader(opened(folder)))
    plain = write_tokenizer(tmp_path / "t", chat_template=None)
    with pytest.raises(ConfigError, match="chats are rendered by the tokenizer's chat template, and it has none"):
        opened(plain)
    described = describe_source(Training(dataset="org/chats", format="chat", supervise="last"))
    assert described == 'org/chats, streamed from the Hugging Face hub; chats, of which supervise = "last" are targets'
