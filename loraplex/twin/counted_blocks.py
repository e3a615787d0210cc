"""KV memory whose contents are not used: blocks are counted, and have no numbers.

A twin computes nothing and its prompts have nothing in common, so that decisions depend only on the number of
free blocks. Any number of them is allocated or released at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from loraplex.scheduling.blocks import BlockPool, Reserve
from loraplex.scheduling.victims import NO_BLOCKS


class CountedPool(BlockPool):
    """A `BlockPool` without a prefix cache, whose blocks all have the number 0."""

    keeps_contents = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        uses: Iterator[int] | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._uses = uses or count()
        self._reserve = reserve
        self._num_empty = num_blocks
        self._last_release = 0
        self.cached = NO_BLOCKS
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_empty(self) -> int:
        return self._num_empty

    @property
    def num_locked(self) -> int:
        return 0

    @property
    def num_free_soon(self) -> int:
        return 0

    def num_freed_by(self, held: Iterable[Sequence[int]]) -> int:
        return sum(map(len, held))

    def are_movable(self, count: int) -> bool:
        return True

    @property
    def num_free(self) -> int:
        return self._num_empty

    def allocate(self, count: int) -> list[int] | None:
        if count > self._num_empty and count > self.num_obtainable:
            return None
        while self._num_empty < count:
            if not self._find_more(count - self._num_empty):
                return None
        self._num_empty -= count
        return [0] * count

    def share(self, blocks: Iterable[int]) -> None:
        assert not blocks, "there is nothing to share"

    def release(self, blocks: Sequence[int]) -> None:
        self._num_empty += len(blocks)
        assert self._num_empty <= self.num_blocks, "blocks released twice"
        self._last_release = next(self._uses)

    def extend(self, count: int) -> None:
        self.num_blocks += count
        self._num_empty += count

    def last_use_of(self, blocks: Iterable[int]) -> int:
        """Return the last release of any block: any of these may have been that one."""
        return self._last_release

    def retract(self, count: int) -> dict[int, int]:
        """Give up blocks. A device would move the contents of those in use; there are no contents here."""
        assert count <= self._num_empty
        assert count < self.num_blocks
        self.num_blocks -= count
        self._num_empty -= count
        return {}

    def match(self, adapter: str | None, token_ids: Sequence[int], salt: str = "") -> list[int]:
        return []

    def publish(
        self,
        adapter: str | None,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        first: int,
        end: int,
        salt: str = "",
    ) -> None:
        pass

    def forget_adapter(self, adapter: str) -> None:
        pass

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        assert sum(map(len, held)) + self._num_empty == self.num_blocks

    def _find_more(self, wanted: int) -> bool:
        return self._reserve is not None and self._reserve.gain_blocks(wanted)
