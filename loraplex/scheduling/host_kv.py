"""The host tier of KV memory: keys and values in host memory, the second level of the prefix cache.

A host block is as large as a device block over all layers. It holds the contents of one node of the block
pool's prefix cache (`blocks.BlockPool`), whose contents may be on the device, on the host, or on both: a node
is forgotten only when they are on neither.

             reserve                  copied_out              begin_in
    EMPTY ------------> COPYING_OUT ------------> HELD <------------------> HELD, COPYING_IN
      ^                      |                     |         copied_in
      |------ failed --------'                     |
      `------ evicted, forget_adapter -------------'

transitions     `swapping` begins copies; the executor carries them out and reports how they end
                (`Scheduler.swap_ended`). While a copy is under way, the device block is locked in its place
                (`BlockPool.lock`), and the host block keeps its contents.
eviction        Blocks that are held and not being copied are evicted when the tier is full, in the order that
                `victims` decides.
forgotten       A block of an adapter that was forgotten can no longer be found. It is emptied when its copy
                has ended.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from loraplex.core.errors import CapacityError
from loraplex.scheduling.victims import next_host_victim

_MOST_BYTES: Final = 64 << 40
"""More than a host has. Each block costs the scheduler a little memory, so a mistake must not make many."""

CacheKey = tuple[int, tuple[int | str, ...]]
"""The node before a block, and the block's tokens; behind those of a first block the salt, if any."""


class HostState(Enum):
    """The state of a host block that is not empty."""

    COPYING_OUT = auto()
    HELD = auto()


@dataclass(kw_only=True, slots=True, eq=False)
class HostBlock:
    """A host block that is not empty. `node`, `key`, `adapter`: its contents, as the block pool names them.
    `copying_in`: a copy to the device is under way. `is_known`: its contents can be found."""

    number: int
    node: int
    key: CacheKey
    adapter: str | None
    state: HostState = HostState.COPYING_OUT
    copying_in: bool = False
    is_known: bool = True

    @property
    def is_idle(self) -> bool:
        return self.state is HostState.HELD and not self.copying_in


class HostKV:
    """`num_blocks` host blocks of `block_bytes` each. `num_copied_out`, `num_copied_in`: blocks copied since
    the start. `num_hits`: blocks that requests were admitted with because the tier held them."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._empty = list(range(num_blocks))  # a heap: neighbours are copied together
        self._blocks: dict[int, HostBlock] = {}  # by number
        self._of_node: dict[int, HostBlock] = {}
        self._of_key: dict[CacheKey, HostBlock] = {}
        # The nodes of idle blocks, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.num_copied_out = 0
        self.num_copied_in = 0
        self.num_hits = 0

    @property
    def num_used(self) -> int:
        return len(self._blocks)

    def holds(self, node: int) -> bool:
        """Return whether the contents are here, or on their way here."""
        return node in self._of_node

    def is_arriving(self, node: int) -> bool:
        """Return whether the contents are being copied to the device."""
        return self._of_node[node].copying_in

    def node_of(self, key: CacheKey) -> int | None:
        """Return the node that is known by this key; None if its contents are not here."""
        block = self._of_key.get(key)
        return None if block is None else block.node

    def touch(self, node: int) -> None:
        """Record a use of contents that are here."""
        if node in self._idle:
            self._idle.move_to_end(node)

    def reserve(self, node: int, key: CacheKey, adapter: str | None, spared: Collection[int]) -> int | None:
        """Return the host block that a node's contents are going to be copied to, evicting another if none is
        empty; None if only `spared` nodes could be evicted."""
        assert node not in self._of_node, "the contents are here already"
        if not self._empty:
            victim = next_host_victim(self._idle, spared)
            if victim is None:
                return None
            self._release(self._of_node[victim])
        block = HostBlock(number=heapq.heappop(self._empty), node=node, key=key, adapter=adapter)
        self._blocks[block.number] = self._of_node[node] = self._of_key[key] = block
        return block.number

    def copied_out(self, number: int, *, failed: bool = False) -> None:
        """Record that a copy from the device has ended."""
        block = self._blocks[number]
        assert block.state is HostState.COPYING_OUT
        block.state = HostState.HELD
        self.num_copied_out += not failed
        self._settle(block, failed=failed)

    def begin_in(self, node: int) -> int:
        """Record that contents are being copied to the device, and return their host block."""
        block = self._of_node[node]
        assert block.is_idle
        block.copying_in = True
        del self._idle[node]
        return block.number

    def copied_in(self, number: int, *, failed: bool = False) -> HostBlock | None:
        """Record that a copy to the device has ended. Return the block; None if the copy failed, or if its
        contents were forgotten meanwhile. Contents that could not be copied are forgotten."""
        block = self._blocks[number]
        assert block.copying_in
        block.copying_in = False
        self.num_copied_in += not failed
        self._settle(block, failed=failed)
        return block if block.is_known and not failed else None

    def forget_adapter(self, adapter: str) -> None:
        """Free the blocks of an adapter; those that are being copied are freed when their copies end."""
        for block in [block for block in self._blocks.values() if block.adapter == adapter]:
            if block.is_idle:
                self._release(block)
            elif block.is_known:
                self._hide(block)

    def check_integrity(self) -> None:
        """Assert that every block is empty, idle or being copied, and that what is known can be found."""
        assert sorted([*self._blocks, *self._empty]) == list(range(self.num_blocks))
        known = [block for block in self._blocks.values() if block.is_known]
        assert self._of_node == {block.node: block for block in known}
        assert self._of_key == {block.key: block for block in known}
        assert self._idle.keys() == {block.node for block in known if block.is_idle}
        assert all(block.is_known or not block.is_idle for block in self._blocks.values())

    @property
    def num_copying(self) -> int:
        """Number of blocks that copies under way read or write."""
        return sum(not block.is_idle for block in self._blocks.values())

    def _settle(self, block: HostBlock, *, failed: bool) -> None:
        """Make a block idle whose copy has ended, or empty if its contents are of no use."""
        if not block.is_known or failed:
            self._release(block)
        else:
            self._idle[block.node] = None

    def _release(self, block: HostBlock) -> None:
        if block.is_known:
            self._hide(block)
        del self._blocks[block.number]
        heapq.heappush(self._empty, block.number)

    def _hide(self, block: HostBlock) -> None:
        """Make a block's contents unfindable."""
        block.is_known = False
        del self._of_node[block.node]
        del self._of_key[block.key]
        self._idle.pop(block.node, None)


def host_kv_of(budget_bytes: int, block_bytes: int) -> HostKV | None:
    """Return a tier of so many bytes, or None for 0. Raises CapacityError if they hold no block, or more than
    any host has."""
    if budget_bytes == 0:
        return None
    if budget_bytes < block_bytes:
        raise CapacityError(
            f"{budget_bytes:,} bytes hold no block of the KV cache, which has {block_bytes:,}; raise "
            "--kv-swap-memory, or leave it out"
        )
    if budget_bytes > _MOST_BYTES:
        raise CapacityError(
            f"--kv-swap-memory asks for {budget_bytes:,} bytes, more than any host has; lower it"
        )
    return HostKV(budget_bytes // block_bytes, block_bytes)
