"""Paged KV memory: blocks, their references, and the prefix cache of blocks that can be reused.

A full block is cached under (identity of the block before it, its tokens); the chain starts at a root
that stands for the adapter version. Keys hold the tokens themselves, so a lookup can never mistake one
prefix for another, as it could with hashes, and one tenant never reads another's keys and values. A salt
in the key of a first block keeps apart the chains of requests that must not even notice each other's hits.

        empty --allocate--> held (ref 1) --share--> held (ref n) --release--> empty, or cached if published
        A cached block keeps its contents until it is shared again, or emptied because memory is short, in the
        order that `victims` decides.

Where blocks share memory with adapters (`Reserve`), a pool can gain blocks, and can be made to give up its
last ones: their contents move to blocks with lower numbers.

The identity of a block's contents is a *node*. Where there is a host tier (`host_kv`), it may hold a node's
contents too, and keeps the node when they are evicted here. A block that is being copied from or to the host
is *locked*: it has a reference, and is not moved.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from loraplex.scheduling.host_kv import CacheKey, HostBlock, HostKV
from loraplex.scheduling.victims import NO_ADAPTERS, CachedBlock, CachedBlocks, next_victim


class Reserve(Protocol):
    """The source of more blocks for a pool."""

    def num_blocks_to_gain(self) -> int:
        """Return how many blocks the pool could gain at most."""
        ...

    def gain_blocks(self, wanted: int) -> bool:
        """Provide at least one more empty block: call `BlockPool.extend` with up to `wanted` blocks, made of
        unused memory or of evicted adapters, or `BlockPool.empty` if a cached block is the next victim.
        Return False if there is neither."""
        ...


class Contents(NamedTuple):
    """A node and where its contents are: in a block, or on the host only."""

    node: int
    block: int | None


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0. `keeps_contents`: whether there is a
    prefix cache. `host`: its host tier, None without one. `num_evicted`: cached blocks that were emptied
    because memory was short."""

    keeps_contents = True
    host: HostKV | None = None
    num_evicted = 0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        uses: Iterator[int] | None = None,
        reserve: Reserve | None = None,
        host: HostKV | None = None,
    ) -> None:
        """`uses`: a counter that orders the ends of uses, shared with the reserve's adapters."""
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._uses = uses or count()
        self._reserve = reserve
        self.host = host
        self._locked: set[int] = set()
        self._refs = [0] * num_blocks
        self._last_use = [0] * num_blocks  # 0: never
        # The lowest are allocated first, so that the last blocks stay empty and can be given up at no cost.
        # A block may be in the heap several times; it is empty only if it is in the set.
        self._empty = set(range(num_blocks))
        self._empty_heap = list(range(num_blocks))
        self.cached = CachedBlocks(num_blocks)
        self._shared: set[int] = set()  # nodes whose contents were shared at some time, held or cached
        self._adapter_of: dict[int, str | None] = {}  # by node
        self._block_of: dict[CacheKey, int] = {}
        self._key_of: dict[int, CacheKey] = {}
        # Contents keep their node when they move to another block.
        self._node_of: dict[int, int] = {}
        self._holder_of: dict[int, int] = {}
        self._roots: dict[str | None, int] = {}
        self._next_node = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._empty) + len(self.cached)

    @property
    def num_obtainable(self) -> int:
        """Most blocks that `allocate` could return."""
        return self.num_free + (self._reserve.num_blocks_to_gain() if self._reserve else 0)

    @property
    def num_locked(self) -> int:
        """Number of blocks that are being copied from or to the host."""
        return len(self._locked)

    @property
    def num_free_soon(self) -> int:
        """Number of locked blocks that no sequence holds: they are free when their copies have ended."""
        return sum(self._refs[block] == 1 for block in self._locked)

    def num_freed_by(self, held: Iterable[Sequence[int]]) -> int:
        """Return how many blocks would be free if these references were given back."""
        counts = Counter(block for blocks in held for block in blocks)
        return sum(self._refs[block] == count for block, count in counts.items())

    def are_movable(self, count: int) -> bool:
        """Return whether none of the last `count` blocks is locked."""
        return all(block < self.num_blocks - count for block in self._locked)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None if there are too few; no sequence loses
        any."""
        if count > len(self._empty) and count > self.num_obtainable:
            return None
        while len(self._empty) < count:
            if not self._find_more(count - len(self._empty)):
                return None
        heap, empty, refs, blocks = self._empty_heap, self._empty, self._refs, list[int]()
        while len(blocks) < count:
            block = heapq.heappop(heap)
            if block in empty:
                empty.remove(block)
                refs[block] = 1
                blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on blocks that `match` found."""
        for block in blocks:
            node = self._node_of[block]
            if self._refs[block] == 0:
                self.cached.remove(node)
            self._refs[block] += 1
            self._shared.add(node)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. The last blocks of a sequence are released first: its start is reused
        most."""
        refs, last_use, uses, node_of = self._refs, self._last_use, self._uses, self._node_of
        for block in reversed(blocks):
            refs[block] -= 1
            assert refs[block] >= 0, f"block {block} released twice"
            if refs[block] > 0:
                continue
            last_use[block] = use = next(uses)
            node = node_of.get(block)
            if node is not None:
                self.cached.add(node, use, self._adapter_of[node], shared=node in self._shared)
            else:
                self._push_empty(block)

    def empty(self, victim: CachedBlock) -> None:
        """Drop the contents of a cached block."""
        self.num_evicted += 1
        self.cached.remove(victim.contents)
        block = self._holder_of[victim.contents]
        self._forget(block)
        self._push_empty(block)

    def extend(self, count: int) -> None:
        """Add blocks after the last one."""
        self._refs += [0] * count
        self._last_use += [0] * count
        for block in range(self.num_blocks, self.num_blocks + count):
            self._push_empty(block)
        self.num_blocks += count

    def last_use_of(self, blocks: Iterable[int]) -> int:
        """Return when the last of these was released; 0 if none ever was."""
        return max((self._last_use[block] for block in blocks), default=0)

    def retract(self, count: int) -> dict[int, int]:
        """Give up the last `count` blocks. Return where the contents of those in use must be copied, old
        block to new."""
        assert count <= self.num_empty
        assert count < self.num_blocks
        last, self.num_blocks = self.num_blocks, self.num_blocks - count
        leaving = range(self.num_blocks, last)
        assert self._locked.isdisjoint(leaving), "a block that is being copied would move"
        used = [block for block in leaving if block not in self._empty]
        self._empty.difference_update(leaving)
        moves = {block: self._pop_empty() for block in used}
        if moves:
            self._take_over(moves)
        del self._refs[self.num_blocks :]
        del self._last_use[self.num_blocks :]
        return moves

    def match(self, adapter: str | None, token_ids: Sequence[int], salt: str = "") -> list[int]:
        """Return the cached blocks of the longest known prefix with this salt. At least one token is always
        left to compute."""
        num_full = (len(token_ids) - 1) // self.block_size
        node = self._root(adapter)
        found: list[int] = []
        for index in range(num_full):
            key = (node, self._contents_of(token_ids, index, salt))
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
            node = self._node_of[block]
        return found

    def find(self, adapter: str | None, token_ids: Sequence[int], salt: str = "") -> list[Contents]:
        """Do what `match` does, with the contents that the host tier holds."""
        num_full = (len(token_ids) - 1) // self.block_size
        node: int | None = self._root(adapter)
        found: list[Contents] = []
        for index in range(num_full):
            assert node is not None
            key = (node, self._contents_of(token_ids, index, salt))
            block = self._block_of.get(key)
            if block is not None:
                node = self._node_of[block]
            else:
                node = None if self.host is None else self.host.node_of(key)
                if node is None:
                    break
            found.append(Contents(node, block))
        return found

    def count_match(self, token_ids: Sequence[int], found: Sequence[int]) -> None:
        """Count a match that led to an admission; a request that has to wait is matched many times."""
        self.prefix_queries += (len(token_ids) - 1) // self.block_size
        self.prefix_hits += len(found)

    def publish(
        self,
        adapter: str | None,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        first: int,
        end: int,
        salt: str = "",
    ) -> None:
        """Make the sequence's full blocks [first, end) findable; those before are already published.

        If another sequence published the same contents first, its block stays the findable one, and the chain
        of this sequence ends: it could only repeat what is cached.
        """
        for index in range(first, end):
            parent = self._root(adapter) if index == 0 else self._node_of.get(blocks[index - 1])
            if parent is None:
                return
            key = (parent, self._contents_of(token_ids, index, salt))
            if key in self._block_of or blocks[index] in self._key_of:
                continue
            node = None if self.host is None else self.host.node_of(key)
            self._put(blocks[index], key, self._new_node() if node is None else node, adapter)

    def forget_adapter(self, adapter: str) -> None:
        """Make this adapter's blocks unfindable; they age out of the cache."""
        self._roots.pop(adapter, None)
        if self.host is not None:
            self.host.forget_adapter(adapter)

    # ---- the host tier

    def published(self, blocks: Iterable[int]) -> list[Contents]:
        """Return the contents of a sequence's first blocks, as far as they are published."""
        found: list[Contents] = []
        for block in blocks:
            node = self._node_of.get(block)
            if node is None:
                break
            found.append(Contents(node, block))
        return found

    def chain(self, node: int) -> list[Contents]:
        """Return the contents that a prefix up to this node consists of, the first first, as far back as they
        are on the device."""
        found: list[Contents] = []
        block = self._holder_of.get(node)
        while block is not None:
            found.append(Contents(node, block))
            node = self._key_of[block][0]
            block = self._holder_of.get(node)
        return found[::-1]

    def identity(self, block: int) -> tuple[CacheKey, str | None]:
        """Return the key of a published block, and the adapter that computed it."""
        return self._key_of[block], self._adapter_of[self._node_of[block]]

    def lock(self, block: int) -> None:
        """Keep a block and its place until `unlock`, for a copy."""
        assert block not in self._locked
        if self._refs[block] == 0:
            self.cached.remove(self._node_of[block])
        self._refs[block] += 1
        self._locked.add(block)

    def unlock(self, block: int) -> None:
        self._locked.remove(block)
        self.release([block])

    def adopt(self, block: int, contents: HostBlock) -> None:
        """Make a block findable that contents were copied to from the host, unless they have been computed
        again meanwhile."""
        if contents.key not in self._block_of:
            self._put(block, contents.key, contents.node, contents.adapter)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that references equal the holders', and that all other blocks are empty or cached."""
        counts = Counter(block for blocks in held for block in blocks)
        counts.update(self._locked)
        for block in range(self.num_blocks):
            assert self._refs[block] == counts[block], f"block {block}: {self._refs[block]} refs"
            node = self._node_of.get(block)
            cached = node in self.cached
            assert (block in self._empty or cached) == (counts[block] == 0)
            assert cached == (block in self._key_of and counts[block] == 0)
        assert len(self._refs) == self.num_blocks > max([0, *self._empty, *self._key_of, *counts])
        assert not self._empty & self._node_of.keys()
        assert self._shared <= self._holder_of.keys() == self._adapter_of.keys()
        assert self._holder_of == {node: block for block, node in self._node_of.items()}
        assert all((block.contents in self._shared) == block.shared for block in self.cached)
        assert set(self._empty_heap) >= self._empty
        assert all(self._last_use[self._holder_of[one.contents]] == one.last_use for one in self.cached)
        assert len(self._last_use) == self.num_blocks
        assert self._block_of == {key: block for block, key in self._key_of.items()}
        assert self._node_of.keys() == self._key_of.keys()
        if self.host is not None:
            self.host.check_integrity()
            assert all(self.host.node_of(key) in (None, self._node_of[b]) for b, key in self._key_of.items())
            assert self.host.num_copying == len(self._locked), "a copy under way locks one block of each tier"

    def _contents_of(self, token_ids: Sequence[int], index: int, salt: str) -> tuple[int | str, ...]:
        """Return a block's part of its key. Only the first block has the salt: the others descend from it."""
        tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return (*tokens, salt) if salt and index == 0 else tuple(tokens)

    def _put(self, block: int, key: CacheKey, node: int, adapter: str | None) -> None:
        """Make a block's contents findable."""
        self._block_of[key] = block
        self._key_of[block] = key
        self._node_of[block] = node
        self._holder_of[node] = block
        self._adapter_of[node] = adapter

    def _root(self, adapter: str | None) -> int:
        root = self._roots.get(adapter)
        if root is None:
            root = self._roots[adapter] = self._new_node()
        return root

    def _new_node(self) -> int:
        self._next_node += 1
        return self._next_node

    def _find_more(self, wanted: int) -> bool:
        """Provide at least one more empty block; return False if there is none."""
        if self._reserve is not None:
            return self._reserve.gain_blocks(wanted)
        victim = next_victim(NO_ADAPTERS, self.cached, short=wanted)
        if victim is None:
            return False
        assert isinstance(victim, CachedBlock)
        self.empty(victim)
        return True

    def _push_empty(self, block: int) -> None:
        self._empty.add(block)
        heapq.heappush(self._empty_heap, block)

    def _pop_empty(self) -> int:
        while True:
            block = heapq.heappop(self._empty_heap)
            if block in self._empty:
                self._empty.remove(block)
                return block

    def _take_over(self, moves: dict[int, int]) -> None:
        """Transfer references, last uses and contents from each block to another."""
        for source, target in moves.items():
            self._refs[target] = self._refs[source]
            self._last_use[target] = self._last_use[source]
            if source in self._key_of:
                key = self._key_of[target] = self._key_of.pop(source)
                self._block_of[key] = target
                node = self._node_of[target] = self._node_of.pop(source)
                self._holder_of[node] = target

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            node = self._node_of.pop(block)
            del self._holder_of[node]
            del self._adapter_of[node]
            self._shared.discard(node)
