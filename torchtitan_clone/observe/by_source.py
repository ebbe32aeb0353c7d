"""Metrics of each source of a mixture."""

import math
from collections.abc import Mapping

Totals = tuple[float, float, float]
"""Sum of the losses in nats, number and bytes of the target tokens of a source."""


def add_totals(before: Mapping[str, Totals], now: Mapping[str, Totals]) -> dict[str, Totals]:
    """Returns the sums of both."""
    zero = (0.0, 0.0, 0.0)
    return dict(before) | {
        name: (loss + more[0], targets + more[1], size + more[2])
        for name, more in now.items()
        for loss, targets, size in [before.get(name, zero)]
    }


def scale_bytes(by_source: Mapping[str, Totals], scales: Mapping[str, float]) -> dict[str, Totals]:
    """Returns the totals with the bytes of each source multiplied by its scale, if it has one."""
    return {name: (loss, count, size * scales.get(name, 1.0)) for name, (loss, count, size) in by_source.items()}


def source_columns(by_source: Mapping[str, Totals], *, prefix: str = "") -> dict[str, float]:
    """Returns mean loss and bits per byte of the sources with targets, as columns of metrics."""
    columns = {f"{prefix}loss/{name}": loss / targets for name, (loss, targets, _) in by_source.items() if targets}
    return columns | {
        f"{prefix}bits_per_byte/{name}": loss / (math.log(2) * size)
        for name, (loss, _, size) in by_source.items()
        if size
    }
