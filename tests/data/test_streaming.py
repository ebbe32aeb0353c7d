"""Streamed hub data equals a simple reference and resumes exactly."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.data.corpora import TOKENIZER, jsonl, parquet, read_hub_in, texts, write
from tests.data.loaders import (
    GLOBAL_BATCH,
    SEQ_LEN,
    assert_equal,
    concatenate,
    next_batches,
    train_loader,
    validation_loader,
)
from tests.support.harness import run_ranks
from torchtitan_clone.comm.json_collectives import all_gather_json
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data import Batch, open_dataset
from torchtitan_clone.data.streaming import positions_from_json
from torchtitan_clone.data.token_store import is_held_out
from torchtitan_clone.ops import IGNORE_INDEX

datasets = pytest.importorskip("datasets")

ROWS = texts(300, words=25)
FRACTION = 0.1


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    read_hub_in(tmp_path, patch=monkeypatch)


@pytest.fixture
def dataset(tmp_path):
    """Returns the folder of the dataset org/name, which has three files."""
    shards = {f"org/name/{n}.jsonl": jsonl(ROWS[n * 100 : (n + 1) * 100]) for n in range(3)}
    write(tmp_path, shards)
    return hub()


def hub(name: str = "org/name", *, tokenizer=TOKENIZER, text_key: str = "text", **data):
    """Opens a hub dataset."""
    return open_dataset(
        training=Training(dataset=name, text_key=text_key),
        data=Data(**{"held_out_fraction": FRACTION, **data}),
        tokenizer=tokenizer,
    )


def reference_stream(row: int, *, epochs: int) -> list[int]:
    """Returns all tokens of one stream."""
    tokens = []
    for epoch in range(epochs):
        for index, text in enumerate(ROWS):
            if (index + epoch) % GLOBAL_BATCH == row and not is_held_out(text, fraction=FRACTION):
                tokens += [*TOKENIZER.encode_batch([text])[0], TOKENIZER.eos_id]
    return tokens


def test_each_row_of_the_batch_is_a_stream_of_documents(dataset):
    streams = [reference_stream(row, epochs=3) for row in range(GLOBAL_BATCH)]
    steps = 2 * min(map(len, streams)) // 3 // SEQ_LEN + 5  # well into the third epoch
    batches = next_batches(train_loader(dataset, document_masking=False), steps)
    for row, tokens in enumerate(streams):
        found = torch.stack([batch.tokens_BT[row] for batch in batches])
        assert found.flatten().tolist() == tokens[: steps * SEQ_LEN]
        assert [batch.targets_BT[row, -1] for batch in batches] == tokens[SEQ_LEN : steps * SEQ_LEN + 1 : SEQ_LEN]


def test_a_beginning_token_precedes_each_document(dataset):
    batches = next_batches(train_loader(replace(dataset, tokenizer=replace(TOKENIZER, bos_id=7))), 20)
    rows = torch.cat([batch.tokens_BT for batch in batches], dim=1)
    for row in rows.tolist():
        starts = [row[index + 1] for index, token in enumerate(row[:-1]) if token == TOKENIZER.eos_id]
        assert row[0] == 7
        assert len(starts) > 1
        assert set(starts) == {7}


def test_ranks_together_read_what_one_rank_reads(dataset):
    expected = next_batches(train_loader(dataset), 20)
    for num_ranks in (2, 8):
        of_ranks = [
            next_batches(train_loader(dataset, rank=rank, num_ranks=num_ranks), 20) for rank in range(num_ranks)
        ]
        assert_equal(concatenate(of_ranks), expected)


@pytest.mark.parametrize("steps", [1, 30, 150, 250])
def test_a_resumed_loader_continues_exactly(dataset, steps):
    loader = train_loader(dataset)
    next_batches(loader, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = next_batches(loader, 8)
    of_ranks = []
    for rank in range(4):
        resumed = train_loader(hub(), rank=rank, num_ranks=4)
        resumed.load_state_dict(state, allow_change=False)
        of_ranks.append(next_batches(resumed, 8))
    assert_equal(concatenate(of_ranks), expected)
    again = train_loader(hub())
    again.load_state_dict(state, allow_change=False)
    assert again.state_dict() == state
    next_batches(again, 8)
    assert {**again.state_dict(), "bookmark": 0} == {**loader.state_dict(), "bookmark": 0}


def test_a_resume_reads_from_the_bookmark(dataset):
    loader = train_loader(dataset)
    next_batches(loader, 150)
    epoch, document, place = loader.state_dict()["bookmark"]
    cursors = loader.state_dict()["cursors"]
    behind = min(cursors)[1] - document
    assert epoch == 1
    assert 0 <= behind < 2 * 64
    assert place is not None or document == 0


def gather(positions):
    """Returns the positions of all ranks."""
    return [position for value in all_gather_json(positions) for position in positions_from_json(value)]


def read_on_a_rank(name: str):
    """Reads batches, saves the state, and reads more; returns the state and the later batches."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    loader = train_loader(hub(name), rank=rank, num_ranks=num_ranks, gather_positions=gather)
    next_batches(loader, 40)
    state = loader.state_dict()
    following = next_batches(loader, 5)
    dist.destroy_process_group()
    return state, following


@pytest.mark.parametrize("damaged", ["[", "[" * 200_000, "[]", "3", "{}", "", '{"epoch": 0, "examples_iterable": {}}'])
def test_a_damaged_bookmark_is_an_error(dataset, damaged):
    loader = train_loader(dataset)
    next_batches(loader, 30)
    epoch, document, place = loader.state_dict()["bookmark"]
    assert place is not None
    resumed = train_loader(dataset)
    state = loader.state_dict() | {"bookmark": [epoch, document, damaged or place.replace('"epoch": 0', '"epoch": 9')]}
    resumed.load_state_dict(state, allow_change=False)
    with pytest.raises(ConfigError, match="the position in org/name that the checkpoint holds is damaged"):
        next_batches(resumed, 1)


def test_the_state_is_gathered_from_all_ranks(dataset, tmp_path):
    (state, left), (same, right) = run_ranks(read_on_a_rank, 2, str(tmp_path / "org/name"))
    assert state == same
    assert len(state["cursors"]) == GLOBAL_BATCH
    resumed = train_loader(hub(str(tmp_path / "org/name")))
    resumed.load_state_dict(json.loads(json.dumps(state)), allow_change=False)
    assert_equal(next_batches(resumed, 5), concatenate([left, right]))


def test_positions_of_replica_groups_merge_to_one_state(dataset):
    undivided = train_loader(dataset)
    groups = [train_loader(dataset) for _ in range(2)]
    for _ in range(30):
        batches = [group.next_batch(replica_index=index, num_replicas=2) for index, group in enumerate(groups)]
        assert_equal(concatenate([[batch] for batch in batches]), next_batches(undivided, 1))
        # The groups exchange their positions as JSON, in any order.
        positions = json.loads(json.dumps([position for group in groups[::-1] for position in group.stream_positions]))
        for group in groups:
            group.commit()
            group.set_stream_positions(positions)
    states = [group.state_dict() for group in groups]
    assert states[0] == states[1]
    assert states[0]["cursors"] == undivided.state_dict()["cursors"]
    assert_equal(next_batches(groups[0], 5), next_batches(undivided, 5))


def test_workers_read_what_this_process_reads(dataset):
    loader = train_loader(dataset)
    next_batches(loader, 10)
    with_workers = train_loader(dataset, num_workers=2)
    with_workers.load_state_dict(loader.state_dict(), allow_change=False)
    expected = next_batches(loader, 12)
    assert_equal(next_batches(with_workers, 6), expected[:6])
    resumed = train_loader(hub())
    resumed.load_state_dict(with_workers.state_dict(), allow_change=False)
    assert_equal(next_batches(resumed, 6), expected[6:])


def test_fewer_documents_than_rows_reach_every_row(tmp_path):
    write(tmp_path, {"org/few/a.parquet": parquet(ROWS[:3])})
    batches = next_batches(train_loader(hub("org/few", held_out_fraction=0.0)), 10)
    decoded = TOKENIZER.decode(torch.cat([batch.tokens_BT[5] for batch in batches]).tolist())
    assert any(text in decoded for text in ROWS[:3])


def test_validation_reads_exactly_the_held_out_documents(dataset):
    held_out = [text for text in ROWS if is_held_out(text, fraction=FRACTION)]
    tokens = np.concatenate([[*ids, TOKENIZER.eos_id] for ids in TOKENIZER.encode_batch(held_out)])
    num_rows = (len(tokens) - 1) // SEQ_LEN
    loaders = [validation_loader(dataset, rank=rank, num_ranks=2) for rank in range(2)]
    for _ in range(2):
        of_ranks = [list(loader) for loader in loaders]
        batches = concatenate(of_ranks)
        assert len(of_ranks[0]) == len(of_ranks[1]) == -(-num_rows // GLOBAL_BATCH)
        found = torch.cat([batch.tokens_BT for batch in batches])[:num_rows]
        assert found.flatten().tolist() == tokens[: num_rows * SEQ_LEN].tolist()
        targets = torch.cat([batch.targets_BT for batch in batches])
        assert (targets[num_rows:] == IGNORE_INDEX).all()
        assert (targets[:num_rows] != IGNORE_INDEX).any()


def test_another_batch_size_is_an_error_unless_allowed(dataset):
    loader = train_loader(dataset)
    batches = next_batches(loader, 20)
    state = loader.state_dict()
    other = train_loader(dataset, global_batch_size=4)
    with pytest.raises(ConfigError, match=r"training\.global_batch_size was 8 and is 4"):
        other.load_state_dict(state, allow_change=False)
    other.load_state_dict(state, allow_change=True)
    assert other.state_dict()["samples"] == 20 * GLOBAL_BATCH
    rows = {tuple(row) for batch in batches for row in batch.tokens_BT[:, 4:].tolist()}
    assert not any(tuple(row) in rows for row in next(other).tokens_BT[:, 4:].tolist())


def test_other_data_is_an_error_or_starts_at_its_beginning(dataset, tmp_path):
    loader = train_loader(dataset)
    next_batches(loader, 20)
    write(tmp_path, {"org/other/a.jsonl": jsonl(texts(100, seed=1))})
    other = train_loader(hub("org/other"))
    with pytest.raises(ConfigError, match="the fingerprint of the data was"):
        other.load_state_dict(loader.state_dict(), allow_change=False)
    other.load_state_dict(loader.state_dict(), allow_change=True)
    assert_equal(next_batches(other, 2), next_batches(train_loader(hub("org/other")), 2))


def test_bad_rows_are_skipped_up_to_the_limit(tmp_path):
    write(tmp_path, {"org/bad/a.parquet": parquet(["x" * 50, None, "", "y" * 50] * 20)})
    with pytest.raises(ConfigError, match=r"data\.max_bad_rows = 0: (.|\n)*org/bad, row 1: 'text' holds null"):
        next_batches(train_loader(hub("org/bad")), 1)
    next_batches(train_loader(hub("org/bad", max_bad_rows=20)), 20)
    with pytest.raises(ConfigError, match=r"no key 'body' \(training\.text_key\) among 'n', 'text'"):
        next_batches(train_loader(hub("org/bad", text_key="body")), 1)


def test_what_fails_while_reading_ahead_is_an_error_of_the_next_batch(tmp_path):
    write(tmp_path, {"org/bad/a.parquet": parquet([*(["x" * 50] * 200), None])})
    found: list[list[Batch]] = []
    for reads_ahead in (False, True):
        loader = train_loader(hub("org/bad"))
        found.append([])
        with pytest.raises(ConfigError, match="holds null"):
            read_all(loader, found[-1], reads_ahead=reads_ahead)
    assert len(found[0]) > 1
    assert_equal(*found)


def read_all(loader, batches, *, reads_ahead):
    """Appends all batches that can be committed until one cannot be read."""
    while True:
        batch = loader.next_batch()
        if reads_ahead:
            loader.read_ahead()
        loader.commit()
        batches.append(batch)


def test_a_dataset_without_text_is_an_error(tmp_path):
    write(tmp_path, {"org/none/a.parquet": parquet([""] * 200)})
    with pytest.raises(ConfigError, match=r'training\.dataset = "org/none": no train text in 200 rows; set it to'):
        next_batches(train_loader(hub("org/none")), 1)
    assert not list(validation_loader(hub("org/none")))  # a run that has such text for training goes on


def test_a_commit_can_be_named(tmp_path, monkeypatch):
    """The library ignores it for datasets in a folder, as here: it is seen on its way there."""
    write(tmp_path, {"org/pinned/a.parquet": parquet(texts(200))})
    load, revisions = datasets.load_dataset_builder, []

    def record(*names, revision):
        revisions.append(revision)
        return load(*names, revision=revision)

    monkeypatch.setattr(datasets, "load_dataset_builder", record)
    pinned, newest = hub("org/pinned@1a2b"), hub("org/pinned")
    assert revisions == ["1a2b", None]
    assert pinned.identity == newest.identity
    assert_equal(next_batches(train_loader(pinned), 1), next_batches(train_loader(newest), 1))


def test_a_dataset_that_cannot_be_opened_is_an_error():
    with pytest.raises(ConfigError, match=r'training\.dataset = "org/missing": cannot be opened'):
        hub("org/missing")


def test_a_missing_package_is_an_error_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match='needs the package datasets; pip install "datasets>=4'):
        hub("org/name")
