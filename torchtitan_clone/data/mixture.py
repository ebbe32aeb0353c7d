"""The order of a mixture: which row of which source each sample is, as a pure function of the sample's number.

A stage is divided into blocks of samples. After n samples at the end of a block, a source with share w has been used
round(w * n) times, and that with the largest share takes the rest; within a block the sources are in random order. The
count is at most 1/2 off, that of the largest share at most (D - 1) / 2 for D sources, and it never decreases, since a
block has at least D * (D - 1) samples. Shares are exact fractions, so that the order is the same on every machine.

Use k of a source is row k of its shuffled epochs. Where a stage changes seq_len, the uses continue with as many rows of
the new length as cover the tokens used before.
"""

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np

from torchtitan_clone.config.stages import Timeline
from torchtitan_clone.data.dataset import permute

_BLOCK_BITS = 11


class Shares:
    """Exact shares of the sources in one stage, and how many uses of each source a number of samples has."""

    def __init__(self, weights: list[float]) -> None:
        fractions = [Fraction(weight) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self._parts = [int(fraction * scale) for fraction in fractions]
        self._total = sum(self._parts)
        self._largest = self._parts.index(max(self._parts))
        used = sum(part > 0 for part in self._parts)
        self.block_size = 1 << max(_BLOCK_BITS, (used * (used - 1)).bit_length())

    def uses(self, samples: int) -> list[int]:
        """Returns the uses of each source in this many samples from the start of the stage, at the end of a block."""
        counts = [(2 * part * samples + self._total) // (2 * self._total) for part in self._parts]
        counts[self._largest] = 0
        counts[self._largest] = samples - sum(counts)
        return counts


class Mixture:
    """The order of all samples of a run."""

    def __init__(self, timeline: Timeline, *, seed: int) -> None:
        self.timeline = timeline
        self._first_timeline = timeline
        self.names = list(timeline.stages[0].weights)
        self._seed = seed
        self._shares = [Shares(list(stage.weights.values())) for stage in timeline.stages]
        self._starts = [np.zeros(len(self.names), dtype=np.int64)]
        """Uses of each source before each stage, in rows of the stage."""
        self._block: tuple[tuple[int, int], np.ndarray, np.ndarray] | None = None
        for index, (stage, following) in enumerate(pairwise(timeline.stages)):
            uses = self._starts[index] + self._uses_in_stage(index, following.first_sample - stage.first_sample)
            self._starts.append(-(-uses * stage.seq_len // following.seq_len))

    def pass_over(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Passes over these ranges of batches, which were read, besides those that the options name."""
        self.timeline = self._first_timeline.passing_over(ranges)

    def locate(self, samples: range) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sample by its index, and the number of its uses before; all in one stage."""
        index = self.timeline.stage_of_sample(samples.start)
        size = self._shares[index].block_size
        first = samples.start - self.timeline.stages[index].first_sample
        last = first + len(samples)
        blocks: list[tuple[np.ndarray, np.ndarray]] = []
        for block in range(first // size, (last - 1) // size + 1):
            inside = slice(max(0, first - block * size), last - block * size)
            sources, uses = self._read_block(index, block)
            blocks.append((sources[inside], uses[inside]))
        return np.concatenate([sources for sources, _ in blocks]), np.concatenate([uses for _, uses in blocks])

    def uses_by_stage(self, sample: int) -> np.ndarray:
        """Returns how many rows of each source [stages, sources] come before a sample in each stage."""
        stages = self.timeline.stages
        ends = [*(stage.first_sample for stage in stages[1:]), sample]
        lengths = [max(0, min(sample, end) - stage.first_sample) for stage, end in zip(stages, ends, strict=True)]
        return np.stack([self._uses_in_stage(index, length) for index, length in enumerate(lengths)])

    def tokens_by_stage(self, sample: int) -> np.ndarray:
        """Returns the tokens [stages, sources] trained before a sample, without the batches passed over."""
        timeline = self.timeline
        uses = self.uses_by_stage(sample)
        for first, last in timeline.skipped:
            ends = (timeline.first_sample(batch=batch) for batch in (first, last + 1))
            before, after = (self.uses_by_stage(min(end, sample)) for end in ends)
            uses = uses - (after - before)
        return uses * np.array([[stage.seq_len] for stage in timeline.stages])

    def tokens_before(self, sample: int) -> list[int]:
        """Returns the tokens of each source trained before a sample."""
        return self.tokens_by_stage(sample).sum(axis=0).tolist()

    def _uses_in_stage(self, index: int, samples: int) -> np.ndarray:
        """Returns the uses of each source in the first samples of a stage."""
        size = self._shares[index].block_size
        block, rest = divmod(samples, size)
        counts = np.array(self._shares[index].uses(block * size))
        if rest:
            counts += np.bincount(self._read_block(index, block)[0][:rest], minlength=len(self.names))
        return counts

    def _read_block(self, index: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and use of each sample of a block; keeps the last, which consecutive batches share."""
        kept = self._block  # threads may replace it
        if kept is None or kept[0] != (index, block):
            shares = self._shares[index]
            size = shares.block_size
            low = np.array(shares.uses(block * size))
            counts = np.array(shares.uses((block + 1) * size)) - low
            order = permute(np.arange(size), n=size, seed=self._seed, epoch=f"stage {index} block {block}")
            sources = np.repeat(np.arange(len(counts)), counts)[order]
            uses = np.empty(size, dtype=np.int64)
            uses[np.argsort(sources, kind="stable")] = np.arange(size) + np.repeat(
                self._starts[index] + low - (np.cumsum(counts) - counts), counts
            )
            self._block = kept = (index, block), sources, uses
        return kept[1:]
