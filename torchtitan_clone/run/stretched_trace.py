"""Extends the trace of steps with few layers to one with more, which repeat what one of them does.

Group: one or several consecutive layers, after which their kinds repeat. Run: consecutive events of a group, such as
those of its forward.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torchtitan_clone.run.memory_trace import Event


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The groups of layers of a model or stage: those after `copied`, `more` of them, are not in a trace.

    The group behind them must be like `copied`, and those `reach` groups before. What a group allocates, others up to
    `reach` groups away may free.
    """

    groups: Sequence[Sequence[int]]
    copied: int
    reach: int
    more: int

    @property
    def removed(self) -> list[int]:
        """The layers that are not in the trace."""
        return [layer for group in self.groups[self.copied + 1 : self.copied + 1 + self.more] for layer in group]

    def shifts(self, group: int) -> range:
        """Returns how many groups further those are that a group of the trace stands for."""
        if group == self.copied:
            return range(self.more + 1)
        return range(self.more, self.more + 1) if group > self.copied else range(1)


class UnlikeError(Exception):
    """Layers of a trace are not as alike as required."""


Run = tuple[int, str]  # group and phase of the step
Place = tuple[int, str, int, int]  # group and phase, earlier runs of the same, and earlier allocations in this one


class _Stretcher:
    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        groups = [group for index, group in enumerate(stretch.groups) if not 0 < index - stretch.copied <= stretch.more]
        self._groups = {layer: index for index, group in enumerate(groups) for layer in group}
        self._places: dict[int, Place] = {}
        """Where each block is allocated that a group allocates."""
        self._live: dict[Place | int, int] = {}
        """Blocks of the extended trace by their places there; those that are allocated outside of groups by number."""
        self._next_block = 0
        self.events: list[Event] = []

    def run_of(self, event: Event) -> Run | None:
        group = None if event.layer is None else self._groups.get(event.layer)
        return None if group is None else (group, event.step_phase)

    def add(self, events: Iterable[Event], *, run: Run | None, count: int = 0, shift: int = 0) -> None:
        """Adds a run of a group, as that of the one `shift` groups behind, or events outside of groups."""
        allocations = 0
        for event in events:
            if event.size:
                place = event.block
                if run is not None:
                    self._places[event.block] = (*run, count, allocations)
                    place = (run[0] + shift, run[1], count, allocations)
                    allocations += 1
                self._live[place] = self._next_block
                self.events.append(event._replace(block=self._next_block))
                self._next_block += 1
            else:
                self._free(event, run=run, shift=shift)

    def _free(self, event: Event, *, run: Run | None, shift: int) -> None:
        for place in self._freed(event.block, run=run, shift=shift):
            if place not in self._live:
                raise UnlikeError
            self.events.append(event._replace(block=self._live.pop(place)))

    def _freed(self, block: int, *, run: Run | None, shift: int) -> list[Place | int]:
        if block not in self._places:
            return [block]
        group, phase, count, index = self._places[block]
        is_near = run is not None and abs(run[0] - group) <= self._stretch.reach
        shifts = [shift] if is_near else self._stretch.shifts(group)
        return [(group + by, phase, count, index) for by in shifts]


def stretch_trace(events: Sequence[Event], *, stretch: Stretch) -> list[Event]:
    """Returns the trace with all groups of layers; UnlikeError if they do not repeat."""
    stretcher = _Stretcher(stretch)
    runs = [(run, list(members)) for run, members in groupby(events, key=stretcher.run_of)]
    _check_alike(runs, copied=stretch.copied)
    counts: Counter[Run] = Counter()
    before = -1
    for run, members in runs:
        if run is None:
            stretcher.add(members, run=None)
            continue
        shifts = stretch.shifts(run[0])
        # Backward runs from the last layer to the first.
        for shift in reversed(shifts) if before > run[0] else shifts:
            stretcher.add(members, run=run, count=counts[run], shift=shift)
        counts[run] += 1
        before = run[0]
    return stretcher.events


def _check_alike(runs: Iterable[tuple[Run | None, Sequence[Event]]], *, copied: int) -> None:
    shapes: dict[Run, list[object]] = {}
    for run, members in runs:
        if run is not None:
            shapes.setdefault(run, []).append([(event.size, event.stream, event.part) for event in members])
    if any(shapes.get((copied + 1, phase)) != found for (group, phase), found in shapes.items() if group == copied):
        raise UnlikeError
