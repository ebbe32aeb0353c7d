"""Collection happens at its steps and at no other time."""

import gc
import logging
import weakref

import pytest

from torchtitan_clone.run.gc_control import GCControl


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
    assert caplog.messages[0].startswith("garbage collection: 0.")


def test_leaving_enables_automatic_collection_again():
    with GCControl(10):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
