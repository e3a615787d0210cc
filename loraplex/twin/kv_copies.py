"""Copies of KV blocks between a simulated device and its host tier."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from loraplex.scheduling.plan import BlockCopy


class KVCopies(NamedTuple):
    """Copies of one plan in one direction, and when the last of them ends."""

    end_s: float
    copies: tuple[BlockCopy, ...]
    out: bool


class KVCopiesInFlight:
    """Copies end in order in each direction: out, on a bus of their own, and in, on the bus of adapters."""

    def __init__(self) -> None:
        self._outs: deque[KVCopies] = deque()
        self._ins: deque[KVCopies] = deque()
        self.out_free_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._outs or self._ins)

    def begin(self, copies: KVCopies) -> None:
        (self._outs if copies.out else self._ins).append(copies)

    @property
    def next_end_s(self) -> float:
        """The time when the first of them ends; infinity if there are none."""
        return min((queue[0].end_s for queue in (self._outs, self._ins) if queue), default=math.inf)

    def take_ended(self, now_s: float) -> Iterator[KVCopies]:
        """Yield those that have ended by `now_s`, and forget them."""
        for queue in (self._outs, self._ins):
            while queue and queue[0].end_s <= now_s:
                yield queue.popleft()
