"""Extends the trace of a step with few layers to one with more, which repeat what one of them does.

Group: one or several consecutive layers, after which their kinds repeat. Run: consecutive events of a group, such as
those of its forward.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from torchtitan_clone.run.memory_trace import Event


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The groups of layers of a pipeline stage: those after `copied`, `more` of them, are not in a trace.

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

    def group_of(self, layer: int) -> int | None:
        """Returns the number of a layer's group in the trace; None for a layer of no group."""
        found = next((index for index, group in enumerate(self.groups) if layer in group), None)
        return found - self.more if found is not None and found > self.copied else found


class UnlikeError(Exception):
    """Layers of a trace are not as alike as required."""


Run = tuple[int, int, str]  # stage, group and phase of the step
Place = tuple[Run, int, int]  # how many runs of the same kind there were before, and how many allocations in this one


class _Stretcher:
    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self._groups = {
            layer: (stage, group)
            for stage, stretch in enumerate(stretches)
            for layer in chain.from_iterable(stretch.groups)
            if (group := stretch.group_of(layer)) is not None
        }
        self._places: dict[int, Place] = {}
        """Where each block of a group is allocated."""
        self._live: dict[object, int] = {}
        """Blocks of the extended trace by their places there; those that are allocated outside of groups by number."""
        self._next_block = 0
        self.events: list[Event] = []

    def run_of(self, event: Event) -> Run | None:
        return None if event.layer not in self._groups else (*self._groups[event.layer], event.step_phase)

    def add(self, run: Run, count: int, events: Iterable[Event], *, shift: int) -> None:
        """Adds a run of a group, as that of the one `shift` groups behind."""
        stage, group, phase = run
        allocations = 0
        for event in events:
            if event.size:
                self._places[event.block] = run, count, allocations
                self._allocate(((stage, group + shift, phase), count, allocations), event)
                allocations += 1
            else:
                self._free(event, run=run, shift=shift)

    def add_outside(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.size:
                self._allocate(event.block, event)
            else:
                self._free(event, run=None, shift=0)

    def _allocate(self, place: object, event: Event) -> None:
        self._live[place] = self._next_block
        self._next_block += 1
        self.events.append(event._replace(block=self._live[place]))

    def _free(self, event: Event, *, run: Run | None, shift: int) -> None:
        for place in self._freed(event.block, run=run, shift=shift):
            if place not in self._live:
                raise UnlikeError
            self.events.append(event._replace(block=self._live.pop(place)))

    def _freed(self, block: int, *, run: Run | None, shift: int) -> list[object]:
        if block not in self._places:
            return [block]
        (stage, group, phase), count, index = self._places[block]
        stretch = self._stretches[stage]
        if run is not None and run[0] == stage and abs(run[1] - group) <= stretch.reach:
            shifts: Iterable[int] = [shift]
        elif group == stretch.copied:
            shifts = range(stretch.more + 1)
        else:
            shifts = [stretch.more if group > stretch.copied else 0]
        return [((stage, group + by, phase), count, index) for by in shifts]


def stretch_trace(events: Sequence[Event], *, stretches: Sequence[Stretch]) -> list[Event]:
    """Returns the trace with `more` groups of layers in each stage; UnlikeError if they do not repeat."""
    stretcher = _Stretcher(stretches)
    runs = [(run, list(members)) for run, members in groupby(events, key=stretcher.run_of)]
    _check_alike(runs, stretches=stretches)
    counts: Counter[Run] = Counter()
    before: dict[int, int] = {}
    for run, members in runs:
        if run is None:
            stretcher.add_outside(members)
            continue
        stage, group, _ = run
        stretch = stretches[stage]
        shifts: Iterable[int] = [stretch.more if group > stretch.copied else 0]
        if group == stretch.copied:
            shifts = range(stretch.more + 1)
            shifts = reversed(shifts) if before.get(stage, -1) > group else shifts
        for shift in shifts:
            stretcher.add(run, counts[run], members, shift=shift)
        counts[run] += 1
        before[stage] = group
    return stretcher.events


def _check_alike(runs: Sequence[tuple[Run | None, list[Event]]], *, stretches: Sequence[Stretch]) -> None:
    shapes: dict[Run, list[object]] = {}
    for run, members in runs:
        if run is not None:
            shapes.setdefault(run, []).append([(event.size, event.stream, event.part) for event in members])
    for (stage, group, phase), found in shapes.items():
        if group == stretches[stage].copied and shapes.get((stage, group + 1, phase)) != found:
            raise UnlikeError
