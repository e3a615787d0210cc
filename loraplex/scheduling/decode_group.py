"""Running requests that do nothing but decode, taken together: many steps of all cost as little as one.

On a virtual clock nothing is computed between two such steps, so that only their sum matters. While requests
are in the group their own state stands still; it is brought up to date (`settle`) before anybody looks at it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Final

from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.sequence import Sequence

_FOREVER: Final = 1 << 60


class DecodeGroup:
    """`positions`: what the group attends to in its next step. `adapters`: how many requests are on each."""

    def __init__(self, members: Iterable[Sequence], pool: BlockPool, max_model_len: int) -> None:
        """Members decode, and have sampled a token."""
        self._pool = pool
        self._max_model_len = max_model_len
        self._num_steps = 0
        self._order = count()
        self._ends: list[tuple[int, int, Sequence]] = []
        self._entered: dict[Sequence, int] = {}
        self._num_needed = 0
        self.positions = 0
        self.adapters: Counter[str] = Counter()
        for sequence in members:
            self.enter(sequence)
        self._max_steps = _FOREVER
        if self._num_needed > pool.num_empty and self._entered:
            # Every one of them needs a block in as many steps as a block has tokens, or sooner.
            self._max_steps = max(pool.num_empty // len(self._entered) - 1, 0) * pool.block_size

    def __len__(self) -> int:
        return len(self._entered)

    @property
    def steps_left(self) -> int:
        """Up to the first end of a request, or until blocks may run out."""
        if not self._ends:
            return 0
        return min(self._ends[0][0], self._max_steps) - self._num_steps

    def has_room_for(self, sequences: Iterable[Sequence]) -> bool:
        """Whether all that the group and these will ever hold is there to be had."""
        if self._max_steps < _FOREVER:
            return False
        needed = sum(self._needed_by(sequence) for sequence in sequences)
        return self._num_needed + needed <= self._pool.num_empty

    def enter(self, sequence: Sequence) -> None:
        length = len(sequence.token_ids)
        end = self._num_steps + self._last_length(sequence) - length
        heapq.heappush(self._ends, (end, next(self._order), sequence))
        self._entered[sequence] = self._num_steps
        self._num_needed += self._needed_by(sequence)
        self.positions += length
        if sequence.adapter is not None:
            self.adapters[sequence.adapter] += 1

    def advance(self, num_steps: int, token_id: int) -> list[Sequence]:
        """Returns those that have all their tokens with the last of these steps, but for that token: they
        are settled, and in the group no more."""
        assert 0 < num_steps <= self.steps_left
        self._num_steps += num_steps
        self.positions += num_steps * len(self._entered)
        ended = []
        while self._ends and self._ends[0][0] == self._num_steps:
            sequence = heapq.heappop(self._ends)[2]
            self._leave(sequence, token_id)
            ended.append(sequence)
        return ended

    def settle(self, token_id: int) -> None:
        """Bring every member up to date. The group is of no use afterwards."""
        for sequence, entered in self._entered.items():
            self._catch_up(sequence, self._num_steps - entered, token_id)

    def _leave(self, sequence: Sequence, token_id: int) -> None:
        num_steps = self._num_steps - self._entered.pop(sequence)
        self.positions -= len(sequence.token_ids) + num_steps
        self._num_needed -= self._needed_by(sequence)
        version = sequence.adapter
        if version is not None:
            self.adapters[version] -= 1
            if self.adapters[version] == 0:
                del self.adapters[version]
        if self._pool.keeps_contents:
            self._catch_up(sequence, num_steps, token_id)
            sequence.token_ids.pop()  # which is the caller's to accept
        else:
            # Blocks that it never drew need not be given back.
            sequence.num_computed += num_steps
            sequence.token_ids += [token_id] * (num_steps - 1)

    def _catch_up(self, sequence: Sequence, num_steps: int, token_id: int) -> None:
        sequence.num_computed += num_steps
        sequence.token_ids += [token_id] * num_steps
        missing = self._pool.blocks_for(sequence.num_computed) - len(sequence.block_ids)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            assert blocks is not None, "a group lasts no longer than empty blocks do"
            sequence.block_ids += blocks

    def _last_length(self, sequence: Sequence) -> int:
        return _last_length(sequence, self._max_model_len)

    def _needed_by(self, sequence: Sequence) -> int:
        return blocks_ahead(sequence, self._pool, self._max_model_len)


def blocks_ahead(sequence: Sequence, pool: BlockPool, max_model_len: int) -> int:
    """Blocks that it may yet ask for; its last token is computed by no step."""
    return max(pool.blocks_for(_last_length(sequence, max_model_len)) - len(sequence.block_ids), 0)


def _last_length(sequence: Sequence, max_model_len: int) -> int:
    """Tokens it will have in the end."""
    max_tokens = sequence.request.params.max_tokens
    return max_model_len if max_tokens is None else min(sequence.num_prompt + max_tokens, max_model_len)
