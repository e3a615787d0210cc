"""Running requests that do nothing but decode, taken together: many steps of all cost as little as one.

On a virtual clock nothing is computed between two such steps, so that only their sum matters. While requests
are in the group their own state stands still; it is brought up to date (`settle`) before anybody looks at it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final, NamedTuple

from loraplex.core.request import EngineRequest
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.sequence import Sequence

_FOREVER: Final = 1 << 60


class _Member(NamedTuple):
    """Ordered by `end`, the step with which it has all its tokens. `entered`: the steps there were before it.
    `num_needed`: blocks that it had yet to ask for then. `weight`: of its adapter."""

    end: int
    order: int
    sequence: Sequence
    entered: int
    num_needed: int
    weight: int


class DecodeGroup:
    """`positions`: what the group attends to in its next step. `adapters`: how many requests are on each.
    `weight`: of these adapters, once each; `row_weight`: of the adapters of all requests; `largest_weight`:
    of the heaviest adapter. `num_adapter_rows`: requests that have an adapter. `num_changes`: rises whenever
    any of this may have changed."""

    def __init__(
        self,
        members: Iterable[Sequence],
        pool: BlockPool,
        max_model_len: int,
        weigh: Callable[[str], int] = lambda version: 0,
    ) -> None:
        """Members decode, and have sampled a token. `weigh`: an adapter, as whoever times steps counts it."""
        self._pool = pool
        self._max_model_len = max_model_len
        self._weigh = weigh
        self._num_steps = 0
        self._order = count()
        self._members: list[_Member] = []  # a heap
        self._num_needed = 0
        self.num_changes = 0
        self.positions = 0
        self.adapters: dict[str, int] = {}
        self.weight = 0
        self.row_weight = 0
        self.largest_weight = 0
        self.num_adapter_rows = 0
        self._num_by_weight: dict[int, int] = {}  # distinct adapters
        for sequence in members:
            self.enter(sequence)
        self._max_steps = _FOREVER
        if self._num_needed > pool.num_empty and self._members:
            # Every one of them needs a block in as many steps as a block has tokens, or sooner.
            self._max_steps = max(pool.num_empty // len(self._members) - 1, 0) * pool.block_size

    def __len__(self) -> int:
        return len(self._members)

    @property
    def steps_left(self) -> int:
        """The steps up to the first end of a request, or until blocks may run out."""
        if not self._members:
            return 0
        return min(self._members[0].end, self._max_steps) - self._num_steps

    def has_room_for(self, num_blocks: int) -> bool:
        """Tell whether all blocks that the group will ever hold are free, and so many more."""
        return self._max_steps == _FOREVER and self._num_needed + num_blocks <= self._pool.num_empty

    def enter(self, sequence: Sequence) -> None:
        length, version = len(sequence.token_ids), sequence.adapter
        last_length = _last_length(sequence.request, self._max_model_len)
        needed = max(self._pool.blocks_for(last_length) - len(sequence.block_ids), 0)
        steps = self._num_steps
        end = steps + last_length - length
        weight = 0 if version is None else self._enter_adapter(version)
        heapq.heappush(self._members, _Member(end, next(self._order), sequence, steps, needed, weight))
        self.num_changes += 1
        self._num_needed += needed
        self.positions += length

    def advance(self, num_steps: int, token_id: int) -> list[Sequence]:
        """Returns those that have all their tokens with the last of these steps, but for that token: they
        are settled, and in the group no more."""
        members = self._members
        steps = self._num_steps = self._num_steps + num_steps
        assert steps <= min(members[0].end, self._max_steps), "leaps end where requests do"
        self.num_changes += 1
        self.positions += num_steps * len(members)
        ended = []
        while members and members[0].end == steps:
            member = heapq.heappop(members)
            self._leave(member, token_id)
            ended.append(member.sequence)
        return ended

    def settle(self, token_id: int) -> None:
        """Bring every member up to date. The group is of no use afterwards."""
        for member in self._members:
            self._catch_up(member.sequence, self._num_steps - member.entered, token_id)

    def _leave(self, member: _Member, token_id: int) -> None:
        sequence = member.sequence
        num_steps = self._num_steps - member.entered
        self.positions -= len(sequence.token_ids) + num_steps
        self._num_needed -= member.num_needed
        version = sequence.adapter
        if version is not None:
            self._leave_adapter(version, member.weight)
        if self._pool.keeps_contents:
            self._catch_up(sequence, num_steps, token_id)
            sequence.token_ids.pop()  # which is the caller's to accept
        else:
            # Blocks that it never drew need not be given back.
            sequence.num_computed += num_steps
            sequence.token_ids += [token_id] * (num_steps - 1)

    def _enter_adapter(self, version: str) -> int:
        """Count one request more on it. Returns its weight."""
        weight, others = self._weigh(version), self.adapters.get(version, 0)
        self.adapters[version] = others + 1
        self.row_weight += weight
        self.num_adapter_rows += 1
        if others == 0:
            self.weight += weight
            by_weight = self._num_by_weight
            by_weight[weight] = by_weight.get(weight, 0) + 1
            if weight > self.largest_weight:
                self.largest_weight = weight
        return weight

    def _leave_adapter(self, version: str, weight: int) -> None:
        others = self.adapters[version] - 1
        self.row_weight -= weight
        self.num_adapter_rows -= 1
        if others > 0:
            self.adapters[version] = others
            return
        del self.adapters[version]
        self.weight -= weight
        by_weight = self._num_by_weight
        by_weight[weight] -= 1
        if by_weight[weight] == 0:
            del by_weight[weight]
            if weight == self.largest_weight:
                # Adapters have few different sizes: few ranks, on few choices of modules.
                self.largest_weight = max(by_weight, default=0)

    def _catch_up(self, sequence: Sequence, num_steps: int, token_id: int) -> None:
        sequence.num_computed += num_steps
        sequence.token_ids += [token_id] * num_steps
        missing = self._pool.blocks_for(sequence.num_computed) - len(sequence.block_ids)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            assert blocks is not None, "a group lasts no longer than empty blocks do"
            sequence.block_ids += blocks


def blocks_ahead(sequence: Sequence, pool: BlockPool, max_model_len: int) -> int:
    """Blocks that it may yet ask for; its last token is computed by no step."""
    return max(blocks_of(sequence.request, pool, max_model_len) - len(sequence.block_ids), 0)


def blocks_of(request: EngineRequest, pool: BlockPool, max_model_len: int) -> int:
    """All that it may ask for."""
    return pool.blocks_for(_last_length(request, max_model_len))


def _last_length(request: EngineRequest, max_model_len: int) -> int:
    """Tokens it will have in the end."""
    max_tokens = request.params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, max_model_len)
