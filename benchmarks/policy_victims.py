"""Other orders of eviction than `scheduling.victims`, for trials in the twin (`benchmarks.policies`).

`next_victim` asks the idle adapters for their first, the cached blocks for theirs, and evicts the one with
the smaller `last_use`. These are other containers of both: what they show as first, and as its last use, is
the policy. The scheduler is the shipped one. In trials of blocks the adapters go in the shipped order, unless
they depend on the blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Final

from loraplex.scheduling.memory import Memory
from loraplex.scheduling.victims import NO_BLOCKS, CachedBlock, CachedBlocks, IdleAdapter, IdleAdapters

HALF_LIFE: Final = 512
"""Uses of adapters after which an old one counts for half of a new one."""
_SHARED_USES: Final = 2
"""The number of uses that a block counts for if a second request has used it."""

Seconds = Callable[[IdleAdapter], float]
"""The time to bring an adapter back."""


class LruAdapters(IdleAdapters):
    """The adapter that was idle for longest goes first, but for those that were loaded ahead."""

    @property
    def first(self) -> IdleAdapter | None:
        return next((each for each in self if each.ahead), next(iter(self), None))


class LfuAdapters(IdleAdapters):
    """The adapter that is used least goes first."""

    def value(self, adapter: IdleAdapter) -> float:
        return adapter.uses.score


class StagedFirstAdapters(LruAdapters):
    """LRU, but adapters that host memory has a copy of go before those that are on disk alone."""

    @property
    def first(self) -> IdleAdapter | None:
        oldest = super().first
        if oldest is None or oldest.ahead:
            return oldest
        return next((each for each in self if each.reloads_from_host), oldest)


class Floor:
    """The floor of greedy-dual policies: the value of the last victim, which new values are added to."""

    def __init__(self) -> None:
        self.value = 0.0


class Counts:
    """Counts of the uses of each adapter, which fade. Each count is kept as of its last change."""

    def __init__(self) -> None:
        self._now = 0
        self._counts: dict[str, tuple[float, int]] = {}
        self._seen: dict[str, int] = {}

    def add(self, adapter: IdleAdapter) -> None:
        """Count its uses since it was last here."""
        version = adapter.version
        new = adapter.uses.total - self._seen.get(version, 0)
        self._seen[version] = adapter.uses.total
        self._now += new
        self._counts[version] = (self.of(version) + new, self._now)

    def of(self, version: str) -> float:
        count, when = self._counts.get(version, (0.0, self._now))
        return count * math.exp2((when - self._now) / HALF_LIFE)


class GreedyDualAdapters(IdleAdapters):
    """GDSF: uses times seconds a byte, on top of the value of the last victim."""

    def __init__(self, resident: Set[str], seconds: Seconds, floor: Floor) -> None:
        super().__init__(resident)
        self._seconds = seconds
        self._floor = floor
        self._uses = Counts()
        self._floors: dict[str, float] = {}
        self.rivals: CachedBlocks = NO_BLOCKS  # they raise the floor while there are any

    @property
    def first(self) -> IdleAdapter | None:
        found = min(self, key=self._key, default=None)
        if found is not None and not self.rivals:
            self._floor.value = max(self._floor.value, self.value(found))
        return found

    def add(self, adapter: IdleAdapter) -> None:
        self._uses.add(adapter)
        self._floors[adapter.version] = self._floor.value
        super().add(adapter)

    def value(self, adapter: IdleAdapter) -> float:
        saved_s = self._uses.of(adapter.version) * self._seconds(adapter)
        return self._floors[adapter.version] + saved_s / adapter.num_bytes

    def _key(self, adapter: IdleAdapter) -> tuple[bool, float]:
        return not adapter.ahead, self.value(adapter)


class BackedAdapters(LruAdapters):
    """LRU, but adapters without cached blocks go before those whose blocks would wait for them."""

    def __init__(self, resident: Set[str], blocks: BlocksByAdapter) -> None:
        super().__init__(resident)
        self._blocks = blocks

    @property
    def first(self) -> IdleAdapter | None:
        oldest = super().first
        if oldest is None or oldest.ahead:
            return oldest
        return next((each for each in self if not self._blocks.has(each.version)), oldest)


class BlocksByAdapter(CachedBlocks):
    """The shipped order of blocks, which can be found by adapter as well."""

    def __init__(self, num_blocks: int, adapters: IdleAdapters) -> None:
        super().__init__(num_blocks)
        self._all_adapters = adapters
        self._of: dict[str | None, OrderedDict[int, CachedBlock]] = {}
        self._adapter_of: dict[int, str | None] = {}

    def has(self, version: str) -> bool:
        return version in self._of

    def add(self, contents: int, last_use: int, adapter: str | None, *, shared: bool) -> None:
        super().add(contents, last_use, adapter, shared=shared)
        self._adapter_of[contents] = adapter
        self._of.setdefault(adapter, OrderedDict())[contents] = CachedBlock(
            contents, last_use, shared, adapter
        )

    def remove(self, contents: int) -> None:
        super().remove(contents)
        adapter = self._adapter_of.pop(contents)
        del self._of[adapter][contents]
        if not self._of[adapter]:
            del self._of[adapter]


class AbsentFirstBlocks(BlocksByAdapter):
    """The oldest block whose adapter is not in memory goes before everything else."""

    @property
    def first(self) -> CachedBlock | None:
        resident = self._all_adapters.resident
        absent = (
            next(iter(blocks.values()))
            for version, blocks in self._of.items()
            if version is not None and version not in resident
        )
        found = min(absent, key=_last_use, default=None)
        return super().first if found is None else found._replace(last_use=0)


class GreedyDualBlocks(CachedBlocks):
    """Blocks and adapters by one measure: the seconds that they save a byte. A block that was not shared has
    no limit of its own here: one that was counts twice."""

    def __init__(self, num_blocks: int, adapters: GreedyDualAdapters, floor: Floor, byte_s: float) -> None:
        """`byte_s`: seconds of prefill in a byte of KV."""
        super().__init__(num_blocks)
        self._adapters = adapters
        self._floor = floor
        self._byte_s = byte_s
        # By shared or not; within either, values rise in the order in which blocks came.
        self._values: tuple[OrderedDict[int, float], OrderedDict[int, float]] = (OrderedDict(), OrderedDict())

    @property
    def is_flooded(self) -> bool:
        return False

    @property
    def first(self) -> CachedBlock | None:
        found = [(value, contents) for queue in self._values for contents, value in _head(queue)]
        if not found:
            return None
        value, contents = min(found)
        adapter = min(self._adapters, key=self._adapters.value, default=None)
        least = math.inf if adapter is None else self._adapters.value(adapter)
        self._floor.value = max(self._floor.value, min(value, least))
        shown_use = 0 if adapter is None or value <= least else adapter.last_use + 1
        return CachedBlock(contents, shown_use, False, None)

    def add(self, contents: int, last_use: int, adapter: str | None, *, shared: bool) -> None:
        super().add(contents, last_use, adapter, shared=shared)
        uses = _SHARED_USES if shared else 1
        self._values[shared][contents] = self._floor.value + uses * self._byte_s

    def remove(self, contents: int) -> None:
        super().remove(contents)
        if self._values[0].pop(contents, None) is None:
            del self._values[1][contents]


Victims = Callable[[Memory, Seconds, float], None]
"""Puts a policy in place of the shipped one, given what reloads take and the seconds of prefill in a byte."""


def lru(memory: Memory, seconds: Seconds, byte_s: float) -> None:
    tables = memory.table
    tables.serving.idle = LruAdapters(tables.serving.resident)
    tables.host.idle = LruAdapters(tables.host.resident)


def lfu(memory: Memory, seconds: Seconds, byte_s: float) -> None:
    tables = memory.table
    tables.serving.idle = LfuAdapters(tables.serving.resident)
    tables.host.idle = LfuAdapters(tables.host.resident)


def staged_first(memory: Memory, seconds: Seconds, byte_s: float) -> None:
    memory.table.serving.idle = StagedFirstAdapters(memory.table.serving.resident)


def absent_first(memory: Memory, seconds: Seconds, byte_s: float) -> None:
    if memory.pool.keeps_contents:
        memory.pool.cached = AbsentFirstBlocks(memory.pool.num_blocks, memory.table.serving.idle)


def backed(memory: Memory, seconds: Seconds, byte_s: float) -> None:
    """Absent first, and adapters whose blocks are cached last: FASTLIBRA's dependency both ways."""
    if memory.pool.keeps_contents:
        serving = memory.table.serving
        blocks = AbsentFirstBlocks(memory.pool.num_blocks, serving.idle)
        memory.pool.cached = blocks
        serving.idle = BackedAdapters(serving.resident, blocks)


def gdsf(memory: Memory, seconds: Seconds, byte_s: float) -> None:
    """Evict adapters and blocks by one measure."""
    tables, floor = memory.table, Floor()
    adapters = GreedyDualAdapters(tables.serving.resident, seconds, floor)
    tables.serving.idle = adapters
    tables.host.idle = GreedyDualAdapters(tables.host.resident, seconds, Floor())
    if memory.pool.keeps_contents:
        adapters.rivals = GreedyDualBlocks(memory.pool.num_blocks, adapters, floor, byte_s)
        memory.pool.cached = adapters.rivals


def _last_use(block: CachedBlock) -> int:
    return block.last_use


def _head(queue: OrderedDict[int, float]) -> list[tuple[int, float]]:
    return [next(iter(queue.items()))] if queue else []
