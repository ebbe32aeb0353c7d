"""Collection happens at its steps and at no other time."""

import gc
import logging
import re
import weakref

import pytest

from torchtitan_clone.run.stopping import GCControl, importing


class Node:
    def __init__(self):
        self.me = self


@pytest.fixture
def collector():
    with GCControl(10) as collector:
        yield collector


def test_cycles_live_until_the_step_of_collection(collector):
    node = weakref.ref(Node())
    for _ in range(10_000):  # enough to start an automatic collection several times over
        Node()
    for step in range(1, 10):
        collector.maybe_collect(step)
    assert node() is not None
    collector.maybe_collect(10)
    assert node() is None


def test_time_is_logged(collector, caplog):
    with caplog.at_level(logging.INFO):
        collector.maybe_collect(20)
    assert re.match(r"garbage collection: \d+\.\d+ s, ", caplog.messages[0])


def test_leaving_enables_automatic_collection_again():
    with GCControl(10):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_the_first_collection_has_seen_is_collected_by_a_later_one():
    """As a model that another one replaces."""
    node = Node()
    watched = weakref.ref(node)
    with GCControl(10) as collector:
        del node
        assert watched() is not None
        collector.maybe_collect(10)
        assert watched() is None


def test_imported_objects_are_excluded_from_collections():
    try:
        with importing():
            assert not gc.isenabled()
            node = weakref.ref(Node())
        assert gc.isenabled()
        gc.collect()
        assert node() is not None
    finally:
        gc.unfreeze()
