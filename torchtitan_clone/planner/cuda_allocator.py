"""A model of torch's caching allocator on CUDA: what a sequence of allocations makes it reserve.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchtitan_clone.planner.memory_trace import Event

ROUNDING = 512
MIB = 2**20
Pool = tuple[int, bool]  # stream, and whether it is that of small blocks


@dataclass(kw_only=True, eq=False)
class MemoryBlock:
    """A part of a segment, with its neighbours there."""

    address: int
    size: int
    pool: Pool
    is_free: bool = False
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


@dataclass(kw_only=True)
class CachingAllocator:
    """Counts the bytes that are allocated, and those that are reserved: taken from the device, and never given back.

    `expandable` is the option expandable_segments.
    """

    expandable: bool = False
    reserved: int = 0
    allocated: int = 0
    peak_allocated: int = 0
    _free: dict[Pool, list[tuple[int, int]]] = field(default_factory=dict)
    """Size and address of the free blocks in each pool, ordered."""
    _blocks: dict[int, MemoryBlock] = field(default_factory=dict)
    """The free blocks by address."""
    _ends: dict[Pool, MemoryBlock] = field(default_factory=dict)
    """The last block of each pool's expandable segment."""
    _next_address: int = 0

    def allocate(self, size: int, *, stream: int) -> MemoryBlock:
        """Takes the smallest free block that suffices, or a new segment, and splits off what is left."""
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        pool = (stream, size <= MIB)
        block = self._best_fit(size, pool=pool)
        if block is None:
            block = self._expand(size, pool=pool) if self.expandable else self._new_segment(size, pool=pool)
        rest = block.size - size
        if rest >= ROUNDING if pool[1] else rest > MIB:
            self._split(block, size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Frees a block, and joins it with its free neighbours."""
        self.allocated -= block.size
        if block.after is not None and block.after.is_free:
            self._take(block.after)
            self._join(block, block.after)
        if block.before is not None and block.before.is_free:
            self._take(block.before)
            self._join(block.before, block)
            block = block.before
        block.is_free = True
        insort(self._free.setdefault(block.pool, []), (block.size, block.address))
        self._blocks[block.address] = block

    def _best_fit(self, size: int, *, pool: Pool) -> MemoryBlock | None:
        free = self._free.setdefault(pool, [])
        index = bisect_left(free, (size, 0))
        # The end of an expandable segment counts as large as it may become.
        end = self._ends.get(pool)
        if index + 1 < len(free) and end is not None and free[index][1] == end.address:
            index += 1
        if index == len(free):
            return None
        block = self._blocks[free[index][1]]
        self._take(block)
        return block

    def _new_segment(self, size: int, *, pool: Pool) -> MemoryBlock:
        whole = 2 * MIB if pool[1] else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += whole
        self._next_address += whole
        return MemoryBlock(address=self._next_address - whole, size=whole, pool=pool)

    def _expand(self, size: int, *, pool: Pool) -> MemoryBlock:
        """Maps memory at the end of the pool's segment."""
        page = 2 * MIB if pool[1] else 20 * MIB
        end = self._ends.get(pool)
        if end is None or not end.is_free:
            address = 2**50 * len(self._ends) if end is None else end.address + end.size
            block = MemoryBlock(address=address, size=0, pool=pool, before=end)
            if end is not None:
                end.after = block
            self._ends[pool] = end = block
        else:
            self._take(end)
        mapped = -(-(size - end.size) // page) * page
        self.reserved += mapped
        end.size += mapped
        return end

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(address=block.address + size, size=block.size - size, pool=block.pool, before=block)
        rest.after, block.after, block.size = block.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        rest.is_free = True
        insort(self._free[rest.pool], (rest.size, rest.address))
        self._blocks[rest.address] = rest

    def _take(self, block: MemoryBlock) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
        del self._blocks[block.address]
        block.is_free = False

    def _join(self, block: MemoryBlock, after: MemoryBlock) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        if self._ends.get(block.pool) is after:
            self._ends[block.pool] = block


def replay(events: Iterable[Event], *, expandable: bool) -> CachingAllocator:
    """Returns the allocator after these allocations."""
    allocator = CachingAllocator(expandable=expandable)
    blocks: dict[int, MemoryBlock] = {}
    for event in events:
        if event.size:
            blocks[event.block] = allocator.allocate(event.size, stream=event.stream)
        else:
            allocator.free(blocks.pop(event.block))
    return allocator
