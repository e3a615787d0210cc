"""What is evicted next, adapter or cached KV block: the one place where that is decided.

Everybody who is short of memory asks `next_victim`, evicts what it answers, and asks again:

    who is short                           of what            candidates
    room.ByteBudget (a CPU's adapters)     adapters' bytes    idle adapters
    host_room.HostRoom (the host tier)     adapters' bytes    idle host copies that no device copies from
    arena.Arena.take                       adapters' bytes    idle adapters and cached blocks
    arena.Arena.gain_blocks                KV blocks          idle adapters and cached blocks
    blocks.BlockPool without an arena      KV blocks          cached blocks

The twin runs the same scheduler, so it evicts the same. Candidates are only what nobody uses: the adapter
table and the block pool add what becomes idle and remove what is used again, so that no policy can evict
what is pinned. Memory that nobody has is taken before anybody asks for a victim.

The policy is LRU over both kinds, with two exceptions:
- an adapter that was loaded ahead of any request goes first;
- where cached blocks that no second request ever shared fill more than a quarter of the memory, the oldest of
  these goes first: a stream of prompts that nobody repeats must not push out what is in use.

A policy can also decide by what LRU does not look at: an adapter's bytes, how often it was used, whether it
would come back from host memory or from disk; whether a block was shared, which adapter computed it, and
whether that adapter is in memory (`IdleAdapters.resident`); and how much memory is short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, KeysView, Set
from typing import Final, NamedTuple, Protocol

_UNSHARED_SHARE: Final = 0.25
"""Of the KV memory, for cached blocks that were never shared."""


class IdleAdapter(Protocol):
    """A copy of an adapter that nobody uses, as a policy sees it. `last_use`: a number that rises with time;
    the same numbers are given to blocks where the two share memory. `num_uses`: by how many requests.
    `ahead`: it was loaded before anybody asked for it, and nobody has since."""

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
        """True if host memory has a copy to load it from; otherwise it has to be read from disk."""
        ...


class CachedBlock(NamedTuple):
    """A cached KV block that no request holds. `contents`: identifies what is in it, wherever that lies.
    `shared`: by more than one request, at some time. `adapter`: that computed it."""

    contents: int
    last_use: int
    shared: bool
    adapter: str | None


Victim = IdleAdapter | CachedBlock


class IdleAdapters:
    """The idle adapters of one memory, the next to go first. `resident`: all adapters that are there, idle or
    not. `num_bytes`: of all that are idle."""

    def __init__(self, resident: Set[str] = frozenset()) -> None:
        self.resident = resident
        self.num_bytes = 0
        # In the order of eviction, with removal from the middle: any of them may be used again.
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
        """Its last use has just ended, or it has come and nobody has asked for it."""
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
        """`num_blocks`: of the whole memory."""
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
        """Tell whether blocks that were never shared have more than their part of the memory."""
        return len(self._unshared) > self._max_unshared

    @property
    def first(self) -> CachedBlock | None:
        """The next to go."""
        unshared, shared = _oldest(self._unshared, is_shared=False), _oldest(self._shared, is_shared=True)
        if unshared is None or shared is None:
            return unshared or shared
        return unshared if self.is_flooded or unshared.last_use < shared.last_use else shared

    def add(self, contents: int, last_use: int, adapter: str | None, *, shared: bool) -> None:
        """The last request that held it has released it."""
        (self._shared if shared else self._unshared)[contents] = (last_use, adapter)

    def remove(self, contents: int) -> None:
        if self._unshared.pop(contents, None) is None:
            del self._shared[contents]


NO_ADAPTERS: Final = IdleAdapters()
NO_BLOCKS: Final = CachedBlocks(0)


def next_victim(adapters: IdleAdapters, blocks: CachedBlocks, *, short: int) -> Victim | None:
    """Return what is to be evicted next for somebody who is short of so much memory: bytes, or blocks where
    these have memory of their own. None: nothing is short, or there is nothing to evict."""
    if short <= 0:
        return None
    adapter, block = adapters.first, blocks.first
    if adapter is None or block is None:
        return adapter or block
    idle_since = 0 if adapter.ahead else adapter.last_use
    cached_since = 0 if blocks.is_flooded else block.last_use
    return adapter if idle_since < cached_since else block


def _oldest(queue: OrderedDict[int, tuple[int, str | None]], *, is_shared: bool) -> CachedBlock | None:
    for contents, (last_use, adapter) in queue.items():
        return CachedBlock(contents, last_use, is_shared, adapter)
    return None
