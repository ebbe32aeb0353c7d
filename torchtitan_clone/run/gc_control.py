"""Python's garbage collector at steps of our choosing, so that the ranks do not pause one after the other."""

import gc
import time

from torchtitan_clone.observe.logging import logger


class GCControl:
    """Collects now and then every gc_freq steps; nothing is collected in between until close().

    What is alive after the first collection (modules, code, the model) is never looked at again, which makes the later
    ones short.
    """

    def __init__(self, gc_freq: int) -> None:
        self.gc_freq = gc_freq
        gc.disable()
        self._collect()
        gc.freeze()

    def run(self, step: int) -> None:
        """Collect if it is this step's turn."""
        if step % self.gc_freq == 0:
            self._collect()

    def close(self) -> None:
        """Give Python its automatic collection back."""
        gc.unfreeze()
        gc.enable()

    def _collect(self) -> None:
        start = time.perf_counter()
        found = gc.collect()
        logger.info("garbage collection: %.3f s, %s objects", time.perf_counter() - start, f"{found:,}")
