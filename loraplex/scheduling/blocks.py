"""Paged KV memory: blocks, who holds them, and which finished ones can be used again.

A full block is cached under (identity of the block before it, its tokens); the chain starts at a root
that stands for the adapter version. Keys hold the tokens themselves, so a lookup can never mistake one
prefix for another, as it could with hashes, and one tenant never reads another's keys and values.

    free --allocate--> held (ref 1) --share--> held (ref n) --release--> free
    A free block that is cached keeps its contents until `allocate` takes it; the queue of free blocks
    is in order of release, so the least recently used contents go first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

_CacheKey = tuple[int, tuple[int, ...]]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        # Ordered, with removal from the middle: a cached block leaves the queue when it is shared again.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[_CacheKey, int] = {}
        self._key_of: dict[int, _CacheKey] = {}
        self._node_of: dict[int, int] = {}
        self._roots: dict[str | None, int] = {}
        self._next_node = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with a reference each, or None (and no change) if there are too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on blocks that `match` found."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. The end of a sequence is freed first: its start is reused most."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released twice"
            if self._refs[block] == 0:
                self._free[block] = None

    def match(self, adapter: str | None, token_ids: Sequence[int]) -> list[int]:
        """Cached blocks of the longest known prefix. At least one token is always left to compute."""
        num_full = (len(token_ids) - 1) // self.block_size
        node = self._root(adapter)
        found: list[int] = []
        for index in range(num_full):
            key = (node, self._tokens_of(token_ids, index))
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
            node = self._node_of[block]
        return found

    def count_match(self, token_ids: Sequence[int], found: Sequence[int]) -> None:
        """Count a match that led to an admission; a request that has to wait is matched many times."""
        self.prefix_queries += (len(token_ids) - 1) // self.block_size
        self.prefix_hits += len(found)

    def publish(
        self, adapter: str | None, token_ids: Sequence[int], blocks: Sequence[int], first: int, end: int
    ) -> None:
        """Make the sequence's full blocks [first, end) findable; those before are already published.

        Where another sequence published the same contents first, its block stays the findable one, and
        the chain of this sequence ends: it could only repeat what is cached.
        """
        for index in range(first, end):
            parent = self._root(adapter) if index == 0 else self._node_of.get(blocks[index - 1])
            if parent is None:
                return
            key = (parent, self._tokens_of(token_ids, index))
            if key in self._block_of or blocks[index] in self._key_of:
                continue
            self._block_of[key] = blocks[index]
            self._key_of[blocks[index]] = key
            self._node_of[blocks[index]] = self._new_node()

    def forget_adapter(self, adapter: str) -> None:
        """No sequence will find this adapter's blocks any more; they age out of the free queue."""
        self._roots.pop(adapter, None)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that references equal the holders', and that the free queue is the rest."""
        counts = Counter(block for blocks in held for block in blocks)
        for block in range(self.num_blocks):
            assert self._refs[block] == counts[block], f"block {block}: {self._refs[block]} refs"
            assert (block in self._free) == (counts[block] == 0)
        assert self._block_of == {key: block for block, key in self._key_of.items()}
        assert self._node_of.keys() == self._key_of.keys()

    def _tokens_of(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _root(self, adapter: str | None) -> int:
        root = self._roots.get(adapter)
        if root is None:
            root = self._roots[adapter] = self._new_node()
        return root

    def _new_node(self) -> int:
        self._next_node += 1
        return self._next_node

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            del self._node_of[block]
