"""Batches of a mixture are the same on any ranks, with workers and after a resume; what was trained cannot change.

Tests opening.py, mixture_dataset.py and mixture_state.py.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.data.corpora import TOKENIZER, jsonl, read_hub_in, texts, write
from tests.data.loaders import assert_equal, concatenate, next_batches, train_loader
from tests.data.mixtures import GLOBAL_BATCH, SEQ_LEN, STAGES, Run, open_mixture, sources, write_sources
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, DataSource, Stage, Training
from torchtitan_clone.data import LoaderOptions, ValidationLoader, open_dataset

pytest.importorskip("datasets")
STEPS = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with the text of all sources."""
    found = tmp_path_factory.mktemp("mixture")
    write_sources(found)
    return found


@pytest.fixture(autouse=True)
def _offline(folder, monkeypatch):
    read_hub_in(folder, patch=monkeypatch)


@pytest.fixture(scope="module")
def expected(folder):
    """Returns the batches of all steps, read by one rank, and the state after each."""
    with pytest.MonkeyPatch.context() as patch:
        read_hub_in(folder, patch=patch)
        run = Run(open_mixture(folder))
        found, states = [], [run.state()]
        for _ in range(STEPS):
            found += joined(run.batches(1))
            states.append(json.loads(json.dumps(run.state())))
        return found, states


def joined(batches):
    """Returns global batches, given those of all ranks of each step."""
    return concatenate([list(of_rank) for of_rank in zip(*batches, strict=True)])


def labels(batch):
    """Returns the source of each row."""
    assert (batch.groups_BT == batch.groups_BT[:, :1]).all()
    return batch.groups_BT[:, 0].tolist()


def test_stages_have_their_shape_and_shares(folder, expected):
    batches, _ = expected
    assert {batch.tokens_BT.shape for batch in batches[:60]} == {(GLOBAL_BATCH, SEQ_LEN)}
    assert {batch.tokens_BT.shape for batch in batches[60:]} == {(GLOBAL_BATCH // 2, 2 * SEQ_LEN)}
    for steps, shares in (
        (slice(30), (0.6, 0.1, 0.3)),
        (slice(30, 60), (0.2, 0.3, 0.5)),
        (slice(60, 90), (0, 0.5, 0.5)),
    ):
        rows = [label for batch in batches[steps] for label in labels(batch)]
        assert np.allclose(np.bincount(rows, minlength=3) / len(rows), shares, atol=0.15)


def test_rows_are_text_of_their_source(folder, expected):
    known = [texts(60, seed=1), texts(40, seed=2), texts(80, seed=3, words=25)]
    contents = ["|".join(map(as_text, TOKENIZER.encode_batch(each))) for each in known]
    for batch in expected[0][::9]:
        for row, label in zip(batch.tokens_BT.tolist(), labels(batch), strict=True):
            pieces = as_text(row).split(f" {TOKENIZER.eos_id} ")
            assert all(piece.strip() in contents[label] for piece in pieces)


def as_text(ids):
    """Returns the ids with spaces around them."""
    return f" {' '.join(map(str, ids))} "


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_together_read_what_one_rank_reads(folder, expected, num_ranks):
    run = Run(open_mixture(folder), num_ranks=num_ranks, local_batch_size=1)
    assert_equal(joined(run.batches(STEPS)), expected[0])
    assert run.state()["samples"] == expected[1][-1]["samples"]
    assert run.state()["cursors"] == expected[1][-1]["cursors"]


def test_a_stop_at_any_step_changes_no_batch(folder, expected):
    """With other ranks and micro-batches, at 200 random steps and around the borders of stages."""
    batches, states = expected
    dataset, generator = open_mixture(folder), np.random.default_rng(0)
    for step in [0, 1, 30, 31, 60, 61, *generator.integers(0, STEPS - 2, 200).tolist()]:
        num_ranks, rows = ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1))[generator.integers(5)]
        options = {"local_batch_size": rows, "reads_ahead": bool(generator.integers(2))}
        run = Run(dataset, num_ranks=num_ranks, state=states[step], **options)
        assert_equal(joined(run.batches(2)), batches[step : step + 2])


def test_workers_read_what_this_process_reads(folder, expected):
    batches, states = expected
    run = Run(open_mixture(folder), num_workers=2, state=states[28])
    assert_equal(joined(run.batches(5)), batches[28:33])
    run.loaders.clear()  # ends the workers now; garbage collection would wait 5 s for each


def test_a_batch_that_is_passed_over_leaves_the_others_alone(folder, expected):
    batches, states = expected
    ranges = [(5, 6), (29, 33), (58, 64)]
    kept = [batch for number, batch in enumerate(batches, start=1) if not any(a <= number <= b for a, b in ranges)]
    run = Run(open_mixture(folder, skip_steps=ranges), num_ranks=2)
    found = joined(run.batches(54 - 3))
    assert_equal(found, kept[:51])
    resumed = Run(open_mixture(folder, skip_steps=ranges), state=json.loads(json.dumps(run.state())))
    rows = joined(resumed.batches(3))
    assert rows[0].tokens_BT.shape == kept[51].tokens_BT.shape
    late = Run(
        open_mixture(folder, skip_steps=[(5, 6), (50, 52)]), state=states[49]
    )  # after the first has been trained
    assert_equal(joined(late.batches(4)), batches[52:56])


def test_one_source_reads_what_the_short_form_reads(folder):
    web = DataSource(name="web", path=str(folder / "web"))
    data = Data(cache_folder=str(folder / "cache"), held_out_fraction=0.1)
    plain = open_dataset(
        training=Training(dataset_path=str(folder / "web"), seq_len=SEQ_LEN), data=data, tokenizer=TOKENIZER
    )
    loader = train_loader(plain)
    batches = next_batches(loader, 20)
    run = Run(open_mixture(folder, entries=[web], stages=[]))
    assert_equal(joined(run.batches(20)), batches)
    assert set(loader.state_dict()) == {
        "samples", "data", "tokenizer", "eos_id", "held_out_fraction", "seq_len", "document_masking", "seed",
    }  # fmt: skip
    # A run that began without tables continues with more stages and sources, and from a source without a name.
    entries = [web, DataSource(name="code", path=str(folder / "code"), weight=0.0)]
    later = [Stage(first_step=21, weights={"code": 1.0})]
    appended = Run(open_mixture(folder, entries=entries, stages=later), state=loader.state_dict())
    assert labels(appended.batches(1)[0][0]) == [1] * GLOBAL_BATCH
    short = {"dataset_path": str(folder / "web")}
    skipping = Run(
        open_mixture(folder, entries=[], stages=[], skip_steps=[(23, 25)], **short), state=loader.state_dict()
    )
    expected = next_batches(loader, 6)
    assert_equal(joined(skipping.batches(3)), [*expected[:2], expected[5]])
    named = Run(open_mixture(folder, entries=[web], stages=[]), state=skipping.state())
    assert_equal(joined(named.batches(1)), next_batches(loader, 1))
    back = train_loader(plain)
    back.load_state_dict(skipping.state(), allow_change=False)


CHANGES = [
    ({"stages": [STAGES[0]]}, 70, r"the stage from step 61 has been trained: it is missing"),
    (
        {"stages": [Stage(first_step=31, weights={"web": 1.0}), STAGES[1]]},
        40,
        r"from step 31 has been trained: weights",
    ),
    ({"stages": [Stage(first_step=20), *STAGES]}, 40, r"the stage from step 31 has been trained: first_step was 31"),
    ({"stages": [STAGES[0], Stage(first_step=40, seq_len=32)]}, 50, r"steps from step 40 on have been trained without"),
    ({"entries": ["code"]}, 10, r'data\.sources: entry 1 was "web" and is "code"'),
]


@pytest.mark.parametrize(("change", "step", "message"), CHANGES)
def test_a_trained_stage_or_source_that_changes_is_an_error(folder, expected, change, step, message):
    if "entries" in change:
        change = {"entries": sources(folder)[1:], "stages": []}
    with pytest.raises(ConfigError, match=message):
        Run(open_mixture(folder, **change), state=expected[1][step])


def test_a_changed_batch_size_names_its_option(folder):
    web = DataSource(name="web", path=str(folder / "web"))
    half = Stage(first_step=1, global_batch_size=GLOBAL_BATCH // 2)
    before = Run(open_mixture(folder, entries=[web], stages=[half]))
    before.batches(1)
    with pytest.raises(ConfigError, match=r"trained: training\.global_batch_size was 4 and is 8"):
        Run(open_mixture(folder, entries=[web], stages=[]), state=before.state())
    changed = replace(half, global_batch_size=GLOBAL_BATCH * 2)
    with pytest.raises(ConfigError, match="trained: global_batch_size was 4 and is 16"):
        Run(open_mixture(folder, entries=[web], stages=[changed]), state=before.state())


def test_a_changed_weight_among_many_is_an_error(folder):
    entries = [DataSource(name=f"source {index}", path=str(folder / "web")) for index in range(16)]
    run = Run(open_mixture(folder, entries=entries, stages=[]))
    run.batches(1)
    state = run.state()
    entries[-1] = replace(entries[-1], weight=1.5)
    entries[-2] = replace(entries[-2], weight=0.5)
    with pytest.raises(ConfigError, match="from step 1 has been trained: weights was"):
        Run(open_mixture(folder, entries=entries, stages=[]), state=state)


def test_streams_keep_their_positions_where_other_sources_change(folder):
    """Only those with the same fingerprint do."""
    write(folder, {"org/more/a.jsonl": jsonl(texts(80, seed=4)), "org/less/a.jsonl": jsonl(texts(80, seed=5))})
    hub, more = sources(folder)[2], DataSource(name="more", dataset="org/more", weight=0.5)
    run = Run(open_mixture(folder, entries=[*sources(folder), more], stages=[]))
    run.batches(20)
    state = run.state()
    before = dict(zip(("hub", "more"), state["streams"], strict=True))
    assert before["hub"] != before["more"]
    other = {"name": "hub", "dataset": "org/less", "weight": 0.5}
    for entries, kept in (
        ([sources(folder)[1], hub, more], ["hub", "more"]),  # the first source is another one
        ([*sources(folder)[:2], more, hub], ["more", "hub"]),
        ([*sources(folder)[:2], more], ["more"]),
        ([*sources(folder)[:2], replace(hub, name="renamed"), more], ["hub", "more"]),
        ([*sources(folder)[:2], DataSource(**other), more], [None, "more"]),
    ):
        run = Run(open_mixture(folder, entries=entries, stages=[]), state=state, allow_change=True)
        found = run.state()
        streams = found["streams"] if len(kept) > 1 else [{key: found[key] for key in ("cursors", "bookmark")}]
        start = {"cursors": [[0, 0, 0]] * GLOBAL_BATCH, "bookmark": [0, 0, None]}
        assert streams == [before.get(name, start) for name in kept]


def test_a_hub_dataset_that_is_added_starts_at_its_beginning(folder, expected):
    write(folder, {"org/more/a.jsonl": jsonl(texts(80, seed=4))})
    more = DataSource(name="more", dataset="org/more", weight=0.0)
    stages = [STAGES[0], Stage(first_step=46, weights={"more": 1.0})]
    run = Run(open_mixture(folder, entries=[*sources(folder), more], stages=stages), state=expected[1][45])
    alone = Run(open_mixture(folder, entries=[more], stages=[Stage(first_step=1, weights={"more": 1.0})]))
    for (one,), (other,) in zip(run.batches(5), alone.batches(5), strict=True):
        assert torch.equal(one.tokens_BT, other.tokens_BT)
    assert len(run.state()["streams"]) == 2
    resumed = Run(open_mixture(folder, entries=[*sources(folder), more], stages=stages), state=run.state(), num_ranks=2)
    assert_equal(joined(resumed.batches(3)), joined(run.batches(3)))


def test_a_long_range_without_streams_is_passed_over_at_once(folder):
    web = sources(folder)[:1]
    run = Run(open_mixture(folder, entries=web, stages=[Stage(first_step=9, seq_len=32)], skip_steps=[(2, 10**11)]))
    assert run.batches(2)[1][0].tokens_BT.shape == (GLOBAL_BATCH // 2, 32)


def test_stages_that_are_not_trained_may_change(folder, expected):
    batches, states = expected
    for stages in ([STAGES[0]], [STAGES[0], Stage(first_step=50, weights={"hub": 1.0})]):
        run = Run(open_mixture(folder, stages=stages), state=states[45])
        assert_equal(joined(run.batches(4)), batches[45:49])


def test_a_limit_that_cannot_hold_is_an_error_with_a_weight_that_does(folder):
    limited = sources(folder, has_hub=False, code={"max_epochs": 2.0, "weight": 0.2}, web={"weight": 0.8})
    dataset = open_mixture(folder, entries=limited, stages=[])
    steps = 300
    epochs = dataset.epochs_before(steps * GLOBAL_BATCH)["code"]
    assert epochs > 2
    with pytest.raises(ConfigError, match=rf'name "code": would be read {epochs:.3g} times in 300 steps, and') as error:
        dataset.check(steps=steps)
    weight = float(str(error.value).split("lower its weight to ")[1].split(",")[0])
    for allowed, factor in ((True, 1.0), (False, 1.1)):
        lower = sources(folder, has_hub=False, code={"max_epochs": 2.0, "weight": weight * factor}, web={"weight": 0.8})
        again = open_mixture(folder, entries=lower, stages=[])
        assert (again.epochs_before(steps * GLOBAL_BATCH)["code"] <= 2) == allowed
    with pytest.raises(ConfigError, match=r"lower its weight in each stage, to 0\.\d+ of its share"):
        open_mixture(folder, entries=limited, stages=[Stage(first_step=5, weights={"code": 1.0})], steps=steps)


def test_sources_that_cannot_be_used_are_errors_that_name_them(folder, tmp_path):
    write(tmp_path, {"small/a.jsonl": jsonl(texts(2))})
    small = DataSource(name="small", path=str(tmp_path / "small"))
    with pytest.raises(ConfigError, match=r'data\.sources, name "small": training\.seq_len = 4096: a sequence takes'):
        open_mixture(folder, entries=[small], stages=[Stage(first_step=5, seq_len=4096, global_batch_size=8)], steps=9)
    for entry, message in (
        (DataSource(name="gone", path="nowhere"), r'name "gone": path = "nowhere": no such file'),
        (DataSource(name="gone", dataset="unknown"), r'name "gone": dataset = "unknown": unknown dataset'),
        (DataSource(name="none", dataset=""), r'name "none": dataset = "": unknown dataset'),
        (DataSource(name="hub", dataset="org/name", max_epochs=1.0), r'name "hub": max_epochs = 1: the size of a'),
        (DataSource(name="web", path=str(folder / "web"), text_key="body"), r"no key 'body' \(text_key\) among"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_mixture(folder, entries=[entry], stages=[])


def test_a_source_without_held_out_rows_is_left_out_of_validation(folder, tmp_path, caplog):
    write(tmp_path, {"tiny/a.jsonl": jsonl(["x"])})
    tiny = DataSource(name="tiny", path=str(tmp_path / "tiny"), weight=0.0)
    dataset = open_mixture(folder, entries=[*sources(folder, has_hub=False), tiny], stages=[])
    options = LoaderOptions(seq_len=SEQ_LEN, document_masking=True)
    loader = ValidationLoader(dataset, options=options, global_batch_size=4)
    assert {label for batch in loader for label in labels(batch)} == {0, 1}
    assert 'left out of validation: data.sources, name "tiny": training.seq_len = 16' in caplog.text
    alone = open_mixture(folder, entries=[tiny], stages=[Stage(first_step=1, weights={"tiny": 1.0})])
    with pytest.raises(ConfigError, match=r"validation split of .*tiny.* has 0 in"):
        ValidationLoader(alone, options=options, global_batch_size=4)


def test_validation_reads_the_held_out_rows_of_all_sources_in_turn(folder):
    def read(dataset):
        options = LoaderOptions(seq_len=SEQ_LEN, document_masking=True)
        return list(ValidationLoader(dataset, options=options, global_batch_size=4))

    mixture = open_mixture(folder)
    batches = read(mixture)
    order = [labels(batch)[0] for batch in batches]
    assert order[:3] == [0, 1, 2]
    for index, source in enumerate(mixture.sources.values()):
        alone = read(source)
        found = [batch for batch, label in zip(batches, order, strict=True) if label == index]
        assert len(found) == len(alone)
        assert_equal(found, alone)
