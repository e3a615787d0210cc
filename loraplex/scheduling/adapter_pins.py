"""Brings in the adapters of requests that wait, and holds them there until these have run.

A request that waits holds its adapter on sufferance: where adapters and KV blocks share memory, it has to let
go if somebody before it is short of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from itertools import islice

from loraplex.adapters.room import Tier
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import AdapterLoad
from loraplex.scheduling.sequence import Sequence


class AdapterPins:
    """`prefetch_depth`: how far down the queue adapters start to load. `refused`: the request for whose
    adapter there was no room just now, if any; nobody behind it may take what it waits for."""

    def __init__(self, memory: Memory, *, prefetch_depth: int, max_running: int) -> None:
        self._memory = memory
        self._residency = memory.residency
        self._prefetch_depth = prefetch_depth
        self._max_running = max_running
        self._loads: list[str] = []
        self.refused: Sequence | None = None

    def prefetch(self, waiting: deque[Sequence], running: Many[Sequence]) -> None:
        """Pin or start to load adapters of the first waiting requests, in order, while there is room."""
        self.refused = None
        for sequence in islice(waiting, self._prefetch_depth):
            version = sequence.adapter
            if version is None or sequence.pinned:
                continue
            absent = self._residency.tier(version) is Tier.DISK
            # A load leaves every running request room to grow by a block: what it took would be asked back.
            while not self._residency.acquire(version, spare_blocks=len(running)):
                # What is being loaded may be all that is in the way, and not for long.
                if self._residency.num_loading > 0 or not self.unpin_youngest(waiting, behind=sequence):
                    self.refused = sequence
                    return  # nobody overtakes: a large adapter must not starve behind small ones
            sequence.pinned = True
            if absent:
                self._loads.append(version)
            self._follow_moves(running)

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the request could run as far as its adapter goes."""
        if sequence.adapter is None:
            return True
        return sequence.pinned and self._residency.is_resident(sequence.adapter)

    def unpin_youngest(self, waiting: deque[Sequence], behind: Sequence | None = None) -> bool:
        """Let go of the adapter in shared memory that the last request in the queue holds, if that is behind
        the one named. False if there is none."""
        if not self._memory.shared:
            return False
        # Pins are given near the head; since then, no more than all who ran can have come before them.
        for sequence in reversed(list(islice(waiting, self._prefetch_depth + self._max_running))):
            if sequence is behind:
                return False
            if sequence.pinned and sequence.adapter is not None and self.is_ready(sequence):
                self._residency.unpin(sequence.adapter)
                sequence.pinned = False
                return True
        return False

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """What was started since the last call."""
        loads, self._loads = self._loads, []
        return tuple(self._memory.load_of(version) for version in loads)

    def _follow_moves(self, running: Many[Sequence]) -> None:
        """Blocks may have had to make way for the adapter; those who hold them look for them elsewhere."""
        moved = self._memory.take_block_moves()
        for sequence in running if moved else ():
            sequence.block_ids[:] = [moved.get(block, block) for block in sequence.block_ids]
