"""Runs Python's garbage collector at the same steps on all ranks, so that they do not pause one after another."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_clone.observe.logging import logger


@contextmanager
def importing() -> Iterator[None]:
    """Imports modules without collections, and excludes them from later ones: torch has a million objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_all() -> None:
    """Collects also what was alive at an earlier collection, such as a model that another one replaces."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class GCControl:
    """Context manager that collects on entry and then every gc_freq steps, and not in between.

    Objects that are alive after the first collection (modules, code, the model) are excluded from later ones, which
    makes these short; they stay excluded until the process ends.
    """

    def __init__(self, gc_freq: int) -> None:
        self._gc_freq = gc_freq

    def __enter__(self) -> "GCControl":
        gc.disable()
        self._collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()

    def maybe_collect(self, step: int) -> None:
        """Collects if the step is a multiple of gc_freq."""
        if step % self._gc_freq == 0:
            self._collect()

    def _collect(self) -> None:
        start = time.perf_counter()
        found = gc.collect()
        logger.info("garbage collection: %.3f s, %s objects", time.perf_counter() - start, f"{found:,}")
