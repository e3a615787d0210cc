"""Decides who gives back memory when KV memory is short.

In this order, until there is enough:

    1. waiting requests that hold KV blocks (`swapping`), from the last in the queue
    2. waiting requests that hold a pin, where adapters share the memory, from the last in the queue
    3. merged weights, if the step does not run on them
    4. running requests, which are preempted: paused ones first, then the youngest

Blocks that are being copied to or from the host may be free soon: as long as there are any, a running request
that is short gets no token instead.
"""

from __future__ import annotations

import math

from loraplex.scheduling.adapter_pins import AdapterPins
from loraplex.scheduling.batching.batcher import Batcher
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.request_limits import room_in_words
from loraplex.scheduling.request_queues import RequestQueues
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.swapping import Swapping


class MemoryPressure:
    """Takes memory from the requests in `queues`. `preempted`, in each method: requests that were preempted
    in the step being decided."""

    def __init__(
        self,
        memory: Memory,
        batcher: Batcher,
        pins: AdapterPins,
        queues: RequestQueues,
        swapping: Swapping | None,
    ) -> None:
        self._memory = memory
        self._pool = memory.pool
        self._batcher = batcher
        self._pins = pins
        self._queues = queues
        self._swapping = swapping

    # ---- for running requests

    def grow(self, sequence: RequestState, num_tokens: int, preempted: list[RequestState]) -> bool:
        """Allocate a running request's blocks up to `num_tokens`. Return False if it gets no token now:
        memory is free soon, or it was preempted itself, or it failed, as there will never be enough for
        it."""
        queues = self._queues
        while True:
            missing = self._pool.blocks_for(num_tokens) - len(sequence.block_ids)
            blocks = self._pool.allocate(max(missing, 0))
            if blocks is not None:
                sequence.block_ids += blocks
                return True
            if self._pool.num_free_soon > 0:
                return False
            if self.give_up_last() or self._pins.unpin_youngest(queues.waiting) or self.give_back_merged():
                continue
            victim = queues.paused.pop() if queues.paused else queues.running[-1]
            if victim is sequence and sequence.num_unknown > 0:
                return False  # the token in flight may be its last: decide again when it is known
            if victim is sequence and len(queues.running) == 1:
                if not self._is_free_later():
                    # Alone and still short: the request has outgrown KV memory.
                    room = room_in_words(sequence.adapter, self._memory)
                    queues.fail(sequence, f"{room}, too few for this request; {self._memory.advice}")
                return False
            queues.preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False

    def _is_free_later(self) -> bool:
        """Return whether something else than a request gives back memory later: adapters that load for other
        requests, or merged weights, as the next step does not run on these."""
        return self._memory.shared and (
            self._memory.table.serving.num_loading > 0 or self._batcher.merged.version is not None
        )

    # ---- for waiting requests

    def preempt_paused(self, preempted: list[RequestState]) -> bool:
        """Preempt the youngest paused request, if all running ones are paused, so that none would ever give
        back memory. Return False otherwise, and while copies are about to free some."""
        paused = self._queues.paused
        if not paused or len(paused) < len(self._queues.running) or self._pool.num_free_soon > 0:
            return False
        preempted.append(paused.pop())
        self._queues.preempt(preempted[-1])
        return True

    def take_from_behind(self, sequence: RequestState) -> bool:
        """Take blocks from a waiting request that holds some, this one or one behind it, or a pin from one
        behind it; return False if none has any."""
        return self.give_up_last(sequence.queue_position) or self._pins.unpin_youngest(
            self._queues.waiting, sequence
        )

    def keep_order(self) -> None:
        """Take the blocks from returning requests that must not overtake one whose adapter has no room."""
        refused = self._pins.refused if self._memory.shared else None
        while refused is not None and self.give_up_last(refused.queue_position):
            pass

    # ---- for both

    def give_up_last(self, first: float = -math.inf) -> bool:
        """See `Swapping.give_up_last`."""
        return self._swapping is not None and self._swapping.give_up_last(first)

    def give_back_merged(self) -> bool:
        """Give back the memory of merged weights, if this step does not run on them."""
        if self._batcher.batch.merged is None:
            return self._batcher.merged.give_back()
        self._batcher.merged.short_of_memory()
        return False
