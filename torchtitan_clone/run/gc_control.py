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


class GCControl:
    """Context manager that collects on entry and then every gc_freq steps, and not in between.

    The model is not excluded, since another one may replace it: 1 ms for each 4,000 objects, of which 80 blocks have
    50,000.
    """

    def __init__(self, gc_freq: int) -> None:
        self._gc_freq = gc_freq

    def __enter__(self) -> "GCControl":
        gc.disable()
        self._collect()
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()

    def maybe_collect(self, step: int) -> None:
        if step % self._gc_freq == 0:
            self._collect()

    def _collect(self) -> None:
        start = time.perf_counter()
        found = gc.collect()
        logger.info("garbage collection: %.3f s, %s objects", time.perf_counter() - start, f"{found:,}")
