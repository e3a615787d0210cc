"""The one place that decides what an engine evicts next, adapter or cached KV block.

Code that is short of memory calls `next_victim`, evicts what it returns, and calls it again:

    caller                                 short of           candidates
    room.ByteBudget (a CPU's adapters)     adapters' bytes    idle adapters
    host_room.HostRoom (the host tier)     adapters' bytes    idle host copies that no device copies from
    arena.Arena.take                       adapters' bytes    idle adapters and cached blocks
    arena.Arena.gain_blocks                KV blocks          idle adapters and cached blocks
    blocks.BlockPool without an arena      KV blocks          cached blocks
    host_kv.HostKV                         host KV blocks     host blocks that no copy uses

The twin runs the same scheduler, so it evicts the same. Only what is idle is a candidate: the adapter table
and the block pool add what becomes idle and remove what is used again, so that no policy can evict what is
pinned. Free memory is used up before anything is evicted.

Among adapters, the one of the least value goes first: the seconds that reloads of it would take, per byte of
it, by how often it was used lately. Its uses fade with those of the others (`Uses`), so that of two adapters
used once the older goes. One that was loaded ahead of any request goes before all others.

Among blocks, the least recently used goes first. But where blocks that no second request ever shared fill
more than a quarter of the memory, the oldest of these does: a stream of prompts that never repeat must not
evict what is in use.

Of that adapter and that block, the less recently used goes, or the block in the latter case, or the adapter
if it was loaded ahead.

A policy can also use what this one ignores: which adapter computed a block, whether that adapter is in memory
(`IdleAdapters.resident`), and how much memory is short.

Where KV blocks have a host tier, what is evicted from the device may be copied there first: blocks of a
preempted request (`swapping`), and the cached blocks that `blocks_to_save` returns. The host tier evicts the
least recently used block.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Set
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, NamedTuple, Protocol

from loraplex.perf.drift import DriftWatch

_UNSHARED_SHARE: Final = 0.25
"""Share of the KV memory for cached blocks that were never shared."""
_NUM_NEXT: Final = 32
"""Number of cached blocks, those evicted next, that are considered for a copy to the host."""
_MOST_REMOVED: Final = 64
"""Places of removed adapters to keep, beside as many as there are others."""
_HALF_LIFE: Final = 512
"""Uses of adapters of the same memory after which an old one counts half as much as a new one."""


class Uses:
    """The uses of a copy: `total`, their number, and `score`, the logarithm of a sum over its uses in which
    each weighs twice as much as one `_HALF_LIFE` uses before it. Scores of copies can be compared at any
    time: fading would lower all of them alike."""

    __slots__ = ("score", "total")

    def __init__(self) -> None:
        self.total = 0
        self.score = -math.inf

    def add(self, when: int) -> None:
        """`when`: the number of uses of any adapter of the memory so far."""
        weight = when / _HALF_LIFE
        larger, smaller = max(self.score, weight), min(self.score, weight)
        self.score = larger + math.log2(1 + math.exp2(smaller - larger))
        self.total += 1


class IdleAdapter(Protocol):
    """A policy's view of a copy of an adapter that no request uses. `last_use`: a number that rises with
    time, comparable with that of blocks where the two share memory; 0 if it is `ahead`: loaded ahead of any
    request, and not used since. `uses`: by requests."""

    @property
    def version(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def last_use(self) -> int: ...
    @property
    def uses(self) -> Uses: ...
    @property
    def ahead(self) -> bool: ...
    @property
    def reloads_from_host(self) -> bool:
        """True if host memory has a copy to load it from; otherwise it must be read from disk."""
        ...


class CachedBlock(NamedTuple):
    """A cached KV block that no request holds. `contents`: identifies its contents, wherever the block is.
    `shared`: more than one request has held it. `adapter`: the one that computed it."""

    contents: int
    last_use: int
    shared: bool
    adapter: str | None


Victim = IdleAdapter | CachedBlock


ReloadSeconds = Callable[[IdleAdapter], float]
"""Returns the seconds to bring an adapter back once it is evicted."""


def predicted_reloads(costs: DriftWatch) -> ReloadSeconds:
    """Return a function that predicts reloads by the current cost model."""
    return lambda adapter: costs.model.reload_s(adapter.num_bytes, from_host=adapter.reloads_from_host)


def _by_bytes(adapter: IdleAdapter) -> float:
    return adapter.num_bytes


class IdleAdapters:
    """The idle adapters of one memory. `resident`: all adapters in it, idle or not. `num_bytes`: total bytes
    of the idle ones. `reload_s`: predicts reloads; without a prediction, each byte takes as long as another.

    The values are those when an adapter was added: while it is idle, only `reload_s` can change its value
    beside those of others, and then it has to be removed and added again.
    """

    def __init__(self, resident: Set[str] = frozenset()) -> None:
        self.resident = resident
        self.num_bytes = 0
        self.reload_s: ReloadSeconds = _by_bytes
        self._adapters: dict[str, IdleAdapter] = {}
        # The first of the heap goes first. It also has places of adapters that were removed since, which are
        # not in `_places` any more: so adding and removing take microseconds, however many are idle.
        self._heap: list[_Place] = []
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[IdleAdapter]:
        """Yield them in the order in which they became idle."""
        return iter(self._adapters.values())

    def __contains__(self, version: object) -> bool:
        return version in self._adapters

    @property
    def versions(self) -> KeysView[str]:
        return self._adapters.keys()

    @property
    def first(self) -> IdleAdapter | None:
        """The next adapter to evict; None if there is none."""
        heap, places = self._heap, self._places
        while heap and places.get(heap[0].version) is not heap[0]:
            heappop(heap)
        return self._adapters[heap[0].version] if heap else None

    def add(self, adapter: IdleAdapter) -> None:
        """Add an adapter whose last use has just ended, or that was loaded ahead of any request."""
        self._adapters[adapter.version] = adapter
        self.num_bytes += adapter.num_bytes
        place = _Place(not adapter.ahead, self.value(adapter), adapter.last_use, adapter.version)
        self._places[adapter.version] = place
        heappush(self._heap, place)

    def remove(self, adapter: IdleAdapter) -> None:
        del self._adapters[adapter.version]
        self.num_bytes -= adapter.num_bytes
        del self._places[adapter.version]
        if len(self._heap) > 2 * len(self._places) + _MOST_REMOVED:
            self._heap = list(self._places.values())
            heapify(self._heap)

    def value(self, adapter: IdleAdapter) -> float:
        """Return the logarithm of the seconds of reloads that a byte of it saves."""
        seconds = self.reload_s(adapter)
        return adapter.uses.score + math.log2(seconds / adapter.num_bytes) if seconds > 0 else -math.inf


class _Place(NamedTuple):
    """A place in the order of eviction."""

    is_used: bool
    value: float
    last_use: int
    version: str


class CachedBlocks:
    """The cached blocks of a pool, by their contents."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: number of blocks in the whole memory."""
        self._max_unshared = int(num_blocks * _UNSHARED_SHARE)
        # Contents -> last use and adapter, the oldest first.
        self._shared: OrderedDict[int, tuple[int, str | None]] = OrderedDict()
        self._unshared: OrderedDict[int, tuple[int, str | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shared) + len(self._unshared)

    def __contains__(self, contents: object) -> bool:
        return contents in self._shared or contents in self._unshared

    def __iter__(self) -> Iterator[CachedBlock]:
        for is_shared, queue in ((False, self._unshared), (True, self._shared)):
            for contents, (last_use, adapter) in queue.items():
                yield CachedBlock(contents, last_use, is_shared, adapter)

    @property
    def is_flooded(self) -> bool:
        """True if blocks that were never shared have more than their share of the memory."""
        return len(self._unshared) > self._max_unshared

    @property
    def first(self) -> CachedBlock | None:
        """The next block to evict; None if there is none."""
        unshared, shared = _oldest(self._unshared, is_shared=False), _oldest(self._shared, is_shared=True)
        if unshared is None or shared is None:
            return unshared or shared
        return unshared if self.is_flooded or unshared.last_use < shared.last_use else shared

    def shared(self) -> Iterator[int]:
        """Yield the contents that were shared at some time, in order of eviction."""
        return iter(self._shared)

    def add(self, contents: int, last_use: int, adapter: str | None, *, shared: bool) -> None:
        """Add a block that its last request has released."""
        (self._shared if shared else self._unshared)[contents] = (last_use, adapter)

    def remove(self, contents: int) -> None:
        if self._unshared.pop(contents, None) is None:
            del self._shared[contents]


NO_ADAPTERS: Final = IdleAdapters()
NO_BLOCKS: Final = CachedBlocks(0)


def next_victim(adapters: IdleAdapters, blocks: CachedBlocks, *, short: int) -> Victim | None:
    """Return what to evict next for a caller that is `short` of so many bytes, or of so many blocks where
    these have memory of their own. None if nothing is short, or there is nothing to evict."""
    if short <= 0:
        return None
    adapter, block = adapters.first, blocks.first
    if adapter is None or block is None:
        return adapter or block
    cached_since = 0 if blocks.is_flooded else block.last_use
    return adapter if adapter.last_use < cached_since else block


def blocks_to_save(blocks: CachedBlocks, is_held: Callable[[int], bool]) -> list[int]:
    """Return the contents of cached blocks to copy to the host before they are evicted: those that were
    shared, that the host does not hold yet, and that are among the next to go. Contents that no second
    request used are not worth a copy."""
    return [contents for contents in islice(blocks.shared(), _NUM_NEXT) if not is_held(contents)]


def next_host_victim(idle: Iterable[int], spared: Collection[int]) -> int | None:
    """Return the contents that the host tier evicts next, of those that no copy uses, given least recently
    used first; None if there are only `spared` ones, which are being saved themselves."""
    return next((contents for contents in idle if contents not in spared), None)


def _oldest(queue: OrderedDict[int, tuple[int, str | None]], *, is_shared: bool) -> CachedBlock | None:
    for contents, (last_use, adapter) in queue.items():
        return CachedBlock(contents, last_use, is_shared, adapter)
    return None
