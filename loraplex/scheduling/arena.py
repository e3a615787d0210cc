"""One memory for KV blocks and adapters: blocks from the bottom, adapters from the top, a border that moves.

    page  0   1   2  ...            border                                    num_pages
        | KV | KV | KV | ... | empty | gap | adapter | hole | adapter | merged |
        `-------- BlockPool --------'`----------- Places ------------'

A page is a KV block over all layers. Adapters take units, several to a page, so that a small adapter does not
pay for a whole page. When either side is short, unused memory is taken first, then `victims` chooses what to
evict, a cached block or an adapter. Both can be moved by a copy, so neither blocks the other: blocks move
down to let the border pass, adapters move up. Only a block that is being copied from or to the host stays
where it is until the copy has ended.

Merged weights (`adapters.merged_layout`) lie at the very top while there are any, and nowhere else, because
captured graphs hold their addresses: adapters that are there move away, or are evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

from loraplex.core.errors import CapacityError
from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.host_room import HostRoom
from loraplex.scheduling.places import Places, Shift
from loraplex.scheduling.plan import AdapterLoad, Move
from loraplex.scheduling.room import Evict
from loraplex.scheduling.victims import CachedBlock, IdleAdapters, next_victim

_UNITS_PER_PAGE: Final = 8
UNIT_ALIGNMENT: Final = 256
"""Bytes. Adapters begin at multiples of it, as device allocations do."""


def units_per_page(page_bytes: int) -> int:
    """Return the units in a page: the largest number, up to 8, that leaves each unit aligned."""
    return next(n for n in range(_UNITS_PER_PAGE, 0, -1) if page_bytes % (n * UNIT_ALIGNMENT) == 0 or n == 1)


class Arena:
    """The `scheduling.memory.Memory`, the adapter table's `Room` and the pool's `Reserve` in one class: they
    are two sides of the same border."""

    shared = True
    advice = adapter_advice = "raise --memory-fraction"
    on_device = True

    def __init__(
        self,
        *,
        num_pages: int,
        page_bytes: int,
        block_size: int,
        host_bytes: int = 0,
        pool: type[BlockPool] = BlockPool,
        host_kv: HostKV | None = None,
    ) -> None:
        """`host_bytes`: host memory that adapters are read into first; 0 to load them from disk. `pool`: the
        class that manages KV blocks. `host_kv`: the host tier of blocks, for a pool that keeps contents."""
        self._page_bytes = page_bytes
        self._page_units = units_per_page(page_bytes)
        self._unit_bytes = page_bytes // self._page_units
        self._num_pages = num_pages
        self._merged_units = 0
        self._places = Places(num_pages * self._page_units)
        self._under_way: deque[int] = deque()  # when each step in flight was decided
        self._vacated: list[tuple[int, int, int]] = []  # begin, end, last use; a step in flight may use them
        self._moves: list[Move] = []
        self._block_moves: dict[int, int] = {}
        self.shared_bytes = num_pages * page_bytes
        self.used_bytes = 0
        self._uses = count(1)
        tier = {} if host_kv is None else {"host": host_kv}
        self.pool = pool(num_pages, block_size, self._uses, reserve=self, **tier)
        self.table = AdapterTable(self, host=HostRoom(host_bytes), uses=self._uses)

    # ---- Memory

    def max_tokens(self, adapter_bytes: int) -> int:
        num_units = self._num_pages * self._page_units - adapter_bytes // self._unit_bytes
        return num_units // self._page_units * self.pool.block_size

    def load_of(self, version: str) -> AdapterLoad:
        start, size = self._places.span_of(version)
        quiet = all(end <= start or start + size <= begin for begin, end, _ in self._vacated)
        return AdapterLoad(version=version, place=start * self._unit_bytes, quiet=quiet)

    @property
    def merged_bytes(self) -> int:
        return self._merged_units * self._unit_bytes

    @property
    def merge_place(self) -> int | None:
        return self._places.end * self._unit_bytes if self._merged_units > 0 else None

    def take_merged(self, num_bytes: int) -> bool:
        more_units = -(-num_bytes // self._unit_bytes) - self._merged_units
        if more_units <= 0:
            self._raise_end(-more_units)
            return True
        if not self._make_room_below(more_units):
            return False
        shifts = self._places.lower_end(more_units)
        assert shifts is not None
        self._record(shifts)
        self._merged_units += more_units
        return True

    def give_back_merged(self) -> None:
        self._raise_end(self._merged_units)

    def step_decided(self) -> None:
        self._under_way.append(next(self._uses))

    def step_landed(self) -> None:
        self._under_way.popleft()
        oldest = self._under_way[0] if self._under_way else None
        self._vacated = [span for span in self._vacated if oldest is not None and span[2] > oldest]

    def take_moves(self) -> Sequence[Move]:
        moves, self._moves = self._moves, []
        return moves

    def take_block_moves(self) -> dict[int, int]:
        moves, self._block_moves = self._block_moves, {}
        return moves

    def check_integrity(self) -> None:
        """Assert that blocks, adapters and merged weights fill the arena, up to the border from both
        sides."""
        assert self.pool.num_blocks * self._page_units == self._places.begin
        assert self._places.end + self._merged_units == self._num_pages * self._page_units
        assert self._merged_units >= 0
        self._places.check_integrity(
            {version: size // self._unit_bytes for version, size in self.table.held_bytes().items()}
        )
        assert not self._block_moves, "a block was moved, and nobody followed"

    # ---- Room: what adapters need

    @property
    def budget_bytes(self) -> int:
        """Bytes of all pages but one: without a KV block no request can run."""
        return (self._num_pages - 1) * self._page_bytes

    def taken_by(self, num_bytes: int) -> int:
        taken_bytes = -(-num_bytes // self._unit_bytes) * self._unit_bytes
        if taken_bytes > self.budget_bytes:
            raise CapacityError(
                f"the adapter needs {num_bytes:,} bytes, the device's memory for adapters and KV cache is "
                f"{self.shared_bytes:,}; {self.advice}"
            )
        return taken_bytes

    def take(
        self, version: str, taken_bytes: int, idle: IdleAdapters, evict: Evict, spare_blocks: int
    ) -> bool:
        size = taken_bytes // self._unit_bytes
        num_free = min(self.pool.num_free, self.pool.num_blocks - 1)
        spare_units = max(num_free - spare_blocks, 0) * self._page_units
        idle_units = idle.num_bytes // self._unit_bytes
        if size > self._places.num_free + idle_units + spare_units:
            return False
        while not self._places.put(version, size):
            if not self._widen_gap(size, idle, evict):
                return False
        self.used_bytes += taken_bytes
        return True

    def settle(self, version: str) -> None:
        self._places.unfix(version)

    def give_back(self, version: str, taken_bytes: int, last_use: int) -> None:
        start, size = self._places.span_of(version)
        self._places.remove(version)
        self.used_bytes -= taken_bytes
        self._vacate(start, start + size, last_use)

    def _widen_gap(self, size: int, idle: IdleAdapters, evict: Evict) -> bool:
        """Take one step towards a gap of `size` units: give it empty blocks, lift adapters into holes, evict
        a victim, or push adapters together if there is no victim. Return False if there is no room now."""
        # One block stays: without it no request could run.
        num_empty = min(self.pool.num_empty, self.pool.num_blocks - 1)
        missing_pages = -(-(size - self._places.gap) // self._page_units)
        if not self.pool.are_movable(missing_pages):
            return False  # a block in the way is being copied from or to the host, which will not be for long
        if missing_pages <= num_empty:
            self._lower_border(missing_pages)
            return True
        wanted_gap = size - num_empty * self._page_units
        if self._lift_adapters(wanted_gap):
            return True
        victim = next_victim(idle, self.pool.cached, short=missing_pages * self._page_bytes)
        if victim is None:
            return self._push_adapters(wanted_gap)
        if isinstance(victim, CachedBlock):
            self.pool.empty(victim)
        else:
            evict(victim)
        return True

    def _make_room_below(self, size: int) -> bool:
        """Evict and lower the border until the end of the places can be lowered by `size` units. Return
        False, and change nothing, if what is in use or being loaded is in the way."""
        if self.pool.num_locked > 0:
            return False  # a block in the way may be being copied from or to the host
        idle, evict = self.table.serving.idle, self.table.serving.evict
        extended = min(self.pool.num_free, self.pool.num_blocks - 1) * self._page_units
        if size > self._places.num_free + extended + idle.num_bytes // self._unit_bytes:
            return False
        if not self._places.can_lower_end(size, extended=extended, without=idle.versions):
            return False
        while (num_pages := self._pages_to_lower_end(size)) is None:
            num_empty = min(self.pool.num_empty, self.pool.num_blocks - 1)
            missing_units = size - self._places.num_free - num_empty * self._page_units
            short = max(missing_units, 1) * self._unit_bytes
            victim = next_victim(idle, self.pool.cached, short=short)
            assert victim is not None, "without any victims there was room"
            if isinstance(victim, CachedBlock):
                self.pool.empty(victim)
            else:
                evict(victim)
        if num_pages > 0:
            self._lower_border(num_pages)
        return True

    def _pages_to_lower_end(self, size: int) -> int | None:
        """Return how many empty blocks to give to the gap before the end is lowered; None if all of them are
        too few."""
        places = self._places
        num_empty = min(self.pool.num_empty, self.pool.num_blocks - 1)
        fewest = max(-(-(size - places.num_free) // self._page_units), 0)
        if fewest > num_empty:
            return None
        # With a gap for all adapters that have to move, no others need to; empty blocks cost nothing.
        enough = max(-(-(places.num_units_above(places.end - size) - places.gap) // self._page_units), fewest)
        for num_pages in (min(enough, num_empty), num_empty):  # all of them are needed only around loads
            if places.can_lower_end(size, extended=num_pages * self._page_units):
                return num_pages
        return None

    def _raise_end(self, size: int) -> None:
        """Give the lowest part of the merged weights' memory to adapters."""
        begin = self._places.end
        self._places.raise_end(size)
        self._merged_units -= size
        if size > 0:
            self._vacate(begin, begin + size, next(self._uses))

    def _lower_border(self, num_pages: int) -> None:
        last = self.pool.num_blocks
        last_use = self.pool.last_use_of(range(last - num_pages, last))
        moved = self.pool.retract(num_pages)
        self._places.extend(num_pages * self._page_units)
        self._vacate(self._places.begin, last * self._page_units, last_use)
        self._moves += [
            Move(
                source_byte=source * self._page_bytes,
                target_byte=target * self._page_bytes,
                num_bytes=self._page_bytes,
            )
            for source, target in moved.items()
        ]
        assert not self._block_moves, "nobody followed the moves before"
        self._block_moves = moved

    def _vacate(self, begin: int, end: int, last_use: int) -> None:
        """Remember a stretch that a step in flight may still use."""
        if self._under_way and last_use > self._under_way[0]:
            self._vacated.append((begin, end, last_use))

    def _lift_adapters(self, gap: int) -> bool:
        """Widen the gap by moving the lowest adapters into holes. Cheap: only adapters at the border move."""
        if gap > self._places.num_free:
            return False
        self._record(self._places.lift(gap))
        return self._places.gap >= gap

    def _push_adapters(self, gap: int) -> bool:
        """Widen the gap by closing all holes, which may move every adapter. Return False if one that is being
        loaded is in the way, which will not be for long."""
        if gap > self._places.num_free:
            return False
        self._record(self._places.push_together())
        return self._places.gap >= gap

    def _record(self, shifts: Iterable[Shift]) -> None:
        self._moves += [
            Move(
                source_byte=shift.source * self._unit_bytes,
                target_byte=shift.target * self._unit_bytes,
                num_bytes=shift.size * self._unit_bytes,
                version=shift.name,
            )
            for shift in shifts
        ]

    # ---- Reserve: what KV blocks need

    def num_blocks_to_gain(self) -> int:
        return (
            self._places.num_free + self.table.serving.idle.num_bytes // self._unit_bytes
        ) // self._page_units

    def gain_blocks(self, wanted: int) -> bool:
        while not self._lift_adapters(self._page_units):
            victim = next_victim(self.table.serving.idle, self.pool.cached, short=wanted * self._page_bytes)
            if isinstance(victim, CachedBlock):
                self.pool.empty(victim)
                return True
            # Evicting is preferred to pushing adapters together, which copies more.
            if victim is not None:
                self.table.serving.evict(victim)
            elif not self._push_adapters(self._page_units):
                return False
        num_pages = min(wanted, self._places.gap // self._page_units)
        self._places.retract(num_pages * self._page_units)
        self.pool.extend(num_pages)
        return True
