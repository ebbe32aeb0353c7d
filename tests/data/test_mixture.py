"""The order of a mixture: every use of a source once, in order and by its share, for any stages, at any sample."""

import pickle

import numpy as np
import pytest

from torchtitan_clone.config.schema_training import Data, DataSource, Stage, Training
from torchtitan_clone.config.stages import resolved_timeline
from torchtitan_clone.data.mixture import Mixture, Shares

BATCH = 8


def mixture(weights, *stages, seq_len=16, seed=0, skip_steps=()):
    """Returns the order of sources with these weights, with a batch of 8 rows at first."""
    sources = [DataSource(name=name, weight=weight) for name, weight in weights.items()]
    data = Data(sources=sources, stages=list(stages), skip_steps=[list(each) for each in skip_steps])
    timeline = resolved_timeline(data, training=Training(seq_len=seq_len), global_batch_size=BATCH)
    return Mixture(timeline, seed=seed)


def locate_batches(order, batches):
    """Returns sources and uses of consecutive batches, one row a sample."""
    found = []
    for batch in batches:
        start = order.timeline.first_sample(batch=batch)
        samples = range(start, order.timeline.first_sample(batch=batch + 1))
        found.append(np.stack(order.locate(samples), axis=1))
    return np.concatenate(found)


def random_stages(generator, names):
    """Returns up to three stages with random weights, some of them zero or tiny."""
    steps = np.sort(generator.choice(np.arange(2, 1500), generator.integers(0, 4), replace=False))
    return [Stage(first_step=int(step), weights=random_weights(generator, names)) for step in steps]


def random_weights(generator, names):
    weights = generator.dirichlet(np.ones(len(names))) * generator.choice([0, 1e-4, 1], len(names), p=[0.2, 0.2, 0.6])
    weights[generator.integers(len(names))] += 0.1
    return dict(zip(names, weights.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_every_use_of_a_source_comes_once_and_in_order(seed):
    generator = np.random.default_rng(seed)
    names = [f"source {index}" for index in range(generator.integers(1, 9))]
    stages = random_stages(generator, names)
    order = mixture(random_weights(generator, names), *stages, seed=seed)
    found = locate_batches(order, range(1, 2000))
    for index in range(len(names)):
        uses = found[found[:, 0] == index, 1]
        assert np.array_equal(uses, np.arange(len(uses))), names[index]
    for sample in generator.integers(0, len(found), 20).tolist():
        assert np.array_equal(np.stack(order.locate(range(sample, sample + 1)), axis=1)[0], found[sample])
        assert (
            order.uses_by_stage(sample).sum(axis=0).tolist()
            == np.bincount(found[:sample, 0], minlength=len(names)).tolist()
        )


@pytest.mark.parametrize("seed", range(30))
def test_shares_are_within_half_a_row_at_the_end_of_blocks(seed):
    generator = np.random.default_rng(seed)
    weights = list(random_weights(generator, range(generator.integers(1, 60))).values())
    shares = Shares(weights)
    blocks = [*range(200), *generator.integers(0, 10**12 // 2048, 200).tolist()]
    wanted = np.array(weights) / np.sum(weights)
    for block in blocks:
        samples = block * shares.block_size
        uses, following = np.array(shares.uses(samples)), np.array(shares.uses(samples + shares.block_size))
        assert uses.sum() == samples
        assert (following >= uses).all()
        error = np.abs(uses - wanted * samples)
        limit = np.where(wanted == wanted.max(), (np.count_nonzero(wanted) - 1) / 2, 0.5)
        assert (error <= np.maximum(limit, 0) + 1e-3).all()
        assert not uses[wanted == 0].any()


def test_a_share_of_one_row_in_many_blocks_is_kept():
    order = mixture({"web": 1.0, "wiki": 1e-4})
    assert order.uses_by_stage(10**7).sum(axis=0).tolist() == [9_999_000, 1000]


def test_a_far_sample_is_found_without_those_before_it():
    order = mixture({"web": 0.7, "code": 0.2, "books": 0.1}, Stage(first_step=1000, weights={"code": 1.0, "web": 0.5}))
    sources, uses = order.locate(range(10**12, 10**12 + 4096))
    again = pickle.loads(pickle.dumps(order)).locate(range(10**12 + 4000, 10**12 + 4096))
    assert np.array_equal(sources[4000:], again[0])
    assert np.array_equal(uses[4000:], again[1])
    for index in (0, 1):
        assert np.array_equal(np.diff(uses[sources == index]), np.ones(np.count_nonzero(sources == index) - 1))
    assert set(sources.tolist()) == {0, 1}


def test_an_appended_stage_and_a_new_source_leave_earlier_samples_alone():
    before = mixture({"web": 0.7, "code": 0.3})
    after = mixture({"web": 0.7, "code": 0.3, "math": 0.0}, Stage(first_step=500, weights={"math": 1.0, "web": 1.0}))
    assert np.array_equal(locate_batches(before, range(1, 500)), locate_batches(after, range(1, 500)))
    assert not np.array_equal(locate_batches(before, range(500, 600)), locate_batches(after, range(500, 600)))


def test_another_seed_and_every_block_have_another_order():
    orders = [mixture({"web": 0.5, "code": 0.5}, seed=seed).locate(range(4096))[0] for seed in range(2)]
    parts = [part for order in orders for part in (order[:2048], order[2048:])]
    for index, one in enumerate(parts):
        assert np.count_nonzero(one == 0) == 1024
        assert not any(np.array_equal(one, other) for other in parts[index + 1 :])


def test_a_longer_sequence_continues_after_the_tokens_used_before():
    order = mixture({"web": 0.5, "code": 0.5}, Stage(first_step=101, seq_len=64), Stage(first_step=201, seq_len=16))
    long, short = (stage.global_batch_size for stage in order.timeline.stages[1:])
    assert (long, short) == (2, 8)
    used = order.uses_by_stage(order.timeline.first_sample(batch=101)).sum(axis=0)
    found = locate_batches(order, range(101, 201))
    for index in (0, 1):
        uses = found[found[:, 0] == index, 1]
        assert np.array_equal(uses, -(-used[index] // 4) + np.arange(len(uses)))
    assert sum(order.tokens_before(order.timeline.first_sample(batch=301))) == 300 * BATCH * 16


def test_batches_that_are_passed_over_are_used_and_not_trained():
    order = mixture({"web": 0.5, "code": 0.5}, Stage(first_step=50, weights={"web": 1.0}), skip_steps=[(40, 59)])
    timeline = order.timeline
    assert [timeline.batch_of_step(step) for step in (1, 39, 40, 41)] == [1, 39, 60, 61]
    for batches in (39, 45):
        assert timeline.next_sample(batches * BATCH) == timeline.first_sample(batch=60)
    assert timeline.next_sample(60 * BATCH) == 60 * BATCH
    tokens = order.tokens_before(timeline.first_sample(batch=61))
    assert sum(tokens) == 40 * BATCH * 16
    assert order.uses_by_stage(timeline.first_sample(batch=60)).sum() * 16 == sum(tokens) + 19 * BATCH * 16


def test_ranges_are_added_and_may_overlap():
    order = mixture({"web": 1.0}, skip_steps=[(40, 59), (70, 71)])
    for ranges, expected in (
        ([(50, 64)], ((40, 64), (70, 71))),
        ([(60, 61), (5, 5)], ((5, 5), (40, 61), (70, 71))),
        ([(30, 90), (45, 46)], ((30, 90),)),
    ):
        order.pass_over(ranges)
        assert order.timeline.skipped == expected
        assert sum(order.tokens_before(order.timeline.first_sample(batch=101))) == BATCH * 16 * (
            100 - sum(last - first + 1 for first, last in expected)
        )
