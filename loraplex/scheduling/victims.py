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

The policy is LRU over both kinds, with two exceptions:
- an adapter that was loaded ahead of any request is evicted first;
- where cached blocks that no second request ever shared fill more than a quarter of the memory, the oldest of
  these is evicted first: a stream of prompts that never repeat must not evict what is in use.

A policy can also use what LRU ignores: an adapter's bytes, how often it was used, whether it would be loaded
again from host memory or from disk; whether a block was shared, which adapter computed it, and whether that
adapter is in memory (`IdleAdapters.resident`); and how much memory is short.

Where KV blocks have a host tier, what is evicted from the device may be copied there first: blocks of a
preempted request (`swapping`), and the cached blocks that `blocks_to_save` returns. The host tier evicts the
least recently used block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Set
from itertools import islice
from typing import Final, NamedTuple, Protocol

_UNSHARED_SHARE: Final = 0.25
"""Share of the KV memory for cached blocks that were never shared."""
_NUM_NEXT: Final = 32
"""Number of cached blocks, those evicted next, that are considered for a copy to the host."""


class IdleAdapter(Protocol):
    """A policy's view of a copy of an adapter that no request uses. `last_use`: a number that rises with
    time, comparable with that of blocks where the two share memory. `num_uses`: number of requests that used
    it. `ahead`: it was loaded ahead of any request, and none has used it since."""

    @property
    def version(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def last_use(self) -> int: ...
    @property
    def num_uses(self) -> int: ...
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


class IdleAdapters:
    """The idle adapters of one memory, in order of eviction. `resident`: all adapters in it, idle or not.
    `num_bytes`: total bytes of the idle ones."""

    def __init__(self, resident: Set[str] = frozenset()) -> None:
        self.resident = resident
        self.num_bytes = 0
        # In order of eviction. Removal from the middle must be fast: any of them may be used again.
        self._adapters: OrderedDict[str, IdleAdapter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[IdleAdapter]:
        return iter(self._adapters.values())

    def __contains__(self, version: object) -> bool:
        return version in self._adapters

    @property
    def versions(self) -> KeysView[str]:
        return self._adapters.keys()

    @property
    def first(self) -> IdleAdapter | None:
        return next(iter(self._adapters.values()), None)

    def add(self, adapter: IdleAdapter) -> None:
        """Add an adapter whose last use has just ended, or that was loaded ahead of any request."""
        self._adapters[adapter.version] = adapter
        self.num_bytes += adapter.num_bytes
        if adapter.ahead:
            self._adapters.move_to_end(adapter.version, last=False)

    def remove(self, adapter: IdleAdapter) -> None:
        del self._adapters[adapter.version]
        self.num_bytes -= adapter.num_bytes


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
    idle_since = 0 if adapter.ahead else adapter.last_use
    cached_since = 0 if blocks.is_flooded else block.last_use
    return adapter if idle_since < cached_since else block


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
