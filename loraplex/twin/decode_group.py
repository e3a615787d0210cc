"""Running requests that only decode, advanced together: many steps of all cost as little as one.

On a virtual clock nothing is computed between two such steps, so that only their sum matters. The members'
own state is not updated while they are in the group; `settle` brings it up to date before it is used.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final, NamedTuple

from loraplex.core.request import EngineRequest
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.request_state import RequestState

_FOREVER: Final = 1 << 60


class _Member(NamedTuple):
    """A member, ordered by `end`, the step with which it has all its tokens. `entered`: the group's steps
    before it joined. `num_needed`: blocks that it still needed then. `weight`: its adapter's weight."""

    end: int
    order: int
    sequence: RequestState
    entered: int
    num_needed: int
    weight: int


class DecodeGroup:
    """Decoding requests that advance together. `positions`: context positions of the group's next step.
    `adapters`: number of requests on each. `weight`: sum of these adapters' weights; `row_weight`: sum over
    all requests; `largest_weight`: weight of the heaviest adapter. `num_adapter_rows`: requests with an
    adapter. `num_changes`: increases whenever any of this may have changed."""

    def __init__(
        self,
        members: Iterable[RequestState],
        pool: BlockPool,
        max_model_len: int,
        adapter_weight: Callable[[str], int] = lambda version: 0,
    ) -> None:
        """Members decode, and have sampled a token. `adapter_weight`: returns an adapter's weight, as the
        step times count it."""
        self._pool = pool
        self._max_model_len = max_model_len
        self._adapter_weight = adapter_weight
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
            # Each member needs a block at least once in `block_size` steps.
            self._max_steps = max(pool.num_empty // len(self._members) - 1, 0) * pool.block_size

    def __len__(self) -> int:
        return len(self._members)

    @property
    def steps_left(self) -> int:
        """Number of steps until a request ends, or until blocks may run out."""
        if not self._members:
            return 0
        return min(self._members[0].end, self._max_steps) - self._num_steps

    def has_room_for(self, num_blocks: int) -> bool:
        """Return whether all blocks that the group will ever need are free, and `num_blocks` more."""
        return self._max_steps == _FOREVER and self._num_needed + num_blocks <= self._pool.num_empty

    def enter(self, sequence: RequestState) -> None:
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

    def advance(self, num_steps: int, token_id: int) -> list[RequestState]:
        """Advance all members. Return those that have all their tokens with the last step, except that token:
        they are settled, and have left the group."""
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
        """Bring every member's state up to date. The group must not be used afterwards."""
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
            sequence.token_ids.pop()  # the caller accepts the last token
        else:
            # Blocks that it never allocated need not be released.
            sequence.num_computed += num_steps
            sequence.token_ids += [token_id] * (num_steps - 1)

    def _enter_adapter(self, version: str) -> int:
        """Count one more request on an adapter, and return its weight."""
        weight, others = self._adapter_weight(version), self.adapters.get(version, 0)
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

    def _catch_up(self, sequence: RequestState, num_steps: int, token_id: int) -> None:
        sequence.num_computed += num_steps
        sequence.token_ids += [token_id] * num_steps
        missing = self._pool.blocks_for(sequence.num_computed) - len(sequence.block_ids)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            assert blocks is not None, "a group lasts no longer than empty blocks do"
            sequence.block_ids += blocks


def blocks_ahead(sequence: RequestState, pool: BlockPool, max_model_len: int) -> int:
    """Return the blocks that a request may still need; its last token is never computed."""
    return max(blocks_of(sequence.request, pool, max_model_len) - len(sequence.block_ids), 0)


def blocks_of(request: EngineRequest, pool: BlockPool, max_model_len: int) -> int:
    """Return all blocks that a request may need."""
    return pool.blocks_for(_last_length(request, max_model_len))


def _last_length(request: EngineRequest, max_model_len: int) -> int:
    """Return the tokens that a request will have at its end."""
    max_tokens = request.params.max_tokens
    if max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, max_model_len)
