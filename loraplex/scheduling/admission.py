"""Decides which waiting requests run: in which order, and whether each has all that it needs.

A request is admitted, in the order of the queue, once

    its adapter is pinned and in memory, or on its way there (`adapters.may_join`)
    its tokens in flight are known, and its keys and values on the host are on the device again
    one of `max_running` places is free, and one of the slots for adapters
    its first chunk fits the step's budget
    there are KV blocks for its whole prompt, beside those promised to requests that run already

No request overtakes one that found no memory. Lines of batches that run give way to live requests that lack
nothing but a place or memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Final

from loraplex.scheduling.adapter_planner import AdapterPlanner
from loraplex.scheduling.batching.batcher import Batcher
from loraplex.scheduling.batching.grouped import GroupedQueue
from loraplex.scheduling.borrowing import Borrowing
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.memory_pressure import MemoryPressure
from loraplex.scheduling.plan import Chunk
from loraplex.scheduling.request_queues import RequestQueues
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.swapping import Swapping

_MAX_BEHIND_COPIES: Final = 16
"""Waiting requests that a step looks at although their prefix is being copied for another one: there may be
thousands of them."""


class Admission:
    """Moves requests of `queues` from waiting to running. `pressure`: takes memory from others for them."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        batcher: Batcher,
        adapters: AdapterPlanner,
        queues: RequestQueues,
        pressure: MemoryPressure,
        swapping: Swapping | None,
        borrowing: Borrowing,
    ) -> None:
        self._config = config
        self._memory = memory
        self._pool = memory.pool
        self._batcher = batcher
        self._adapters = adapters
        self._pins = adapters.pins
        self._queues = queues
        self._waiting = queues.waiting
        self._running = queues.running
        self._slots = queues.slots
        self._pressure = pressure
        self._swapping = swapping
        self._borrowing = borrowing

    def bring_in(self) -> None:
        """Choose the order of waiting requests, where that is not the order of arrival, and start loads and
        reads for the first."""
        if isinstance(self._waiting, GroupedQueue):
            self._waiting.select(
                self._running,
                self._config.max_running - self._num_placed,
                self._config.work.max_tokens,
                self._batcher.now_s,
                lambda: self._batcher.end_pace(self._running),
            )
        self._waiting.arrange(max(self._config.prefetch_depth, self._config.max_running))
        self._adapters.bring_in(self._waiting, self._running)
        if self._pins.refused is not None:
            self._pressure.give_back_merged()

    def ready(self) -> Iterable[RequestState]:
        """Return the first waiting requests that could run, as far as their adapters and their tokens are
        concerned, in order."""
        return filter(self._may_admit, self._waiting.ready(self._config.max_running))

    def _may_admit(self, sequence: RequestState) -> bool:
        """Return whether a waiting request could run, as far as its adapter and its tokens are concerned."""
        return self._pins.is_ready(sequence) and sequence.num_unknown == 0

    def make_way(self) -> list[RequestState]:
        """Preempt running lines of batches, the youngest first, for live requests that could run in their
        places, or in their memory; return them. Called before a step is decided."""
        if not any(each.is_line for each in self._running) or self._batcher.displaces:
            return []
        lines = [each for each in self._running if each.is_line]
        self._waiting.arrange(max(self._config.prefetch_depth, self._config.max_running))
        bounded: set[str] = set()
        live = [
            each
            for each in self._waiting.ready(self._config.max_running)
            if not each.is_line and self._may_admit(each) and not self._pins.is_arriving(each)
            if self._slots.has_room_for(each.adapter) and not self._is_bounded(each, bounded)
        ]
        num_wanted = len(live) - max(self._config.max_running - len(self._running), 0)
        if self._pins.short in live and self._pool.num_free_soon == 0:
            num_wanted = max(num_wanted, 1)
        victims = lines[::-1][: max(num_wanted, 0)]
        for victim in victims:
            self._queues.preempt(victim)
        return victims

    def admit(self, chunks: list[Chunk], budget: float, preempted: list[RequestState]) -> None:
        """Admit waiting requests, and add their chunks. `preempted`: paused requests that had to give up
        their memory, where nothing else runs, are added here."""
        self._pins.short = None
        # No request overtakes one that was refused memory for its adapter: it would take that memory.
        refused = self._pins.refused if self._memory.shared else None
        admitted: list[RequestState] = []
        num_promised: int | None = None
        num_behind_copies = 0
        bounded: set[str] = set()  # tenants that may not run more
        is_live_behind_copies = False
        for sequence in self._candidates():
            if budget < 1 or not self._has_place_for(sequence):
                break
            if refused is not None and sequence.queue_position > refused.queue_position:
                break
            if not self._may_admit(sequence):
                continue
            if self._pins.is_arriving(sequence) and not self._adapters.may_join(sequence, chunks):
                continue
            if not self._slots.has_room_for(sequence.adapter) or self._is_bounded(sequence, bounded):
                continue
            if sequence.is_line and is_live_behind_copies:
                continue  # it would give way again when they have ended
            if num_promised is None:
                num_promised = self._all_promised_blocks()
            if sequence in self._pins.returning:
                num_promised -= self._promised_blocks(sequence)
            if self._awaits_copies(sequence, num_promised):
                if sequence in self._pins.returning:
                    num_promised += self._promised_blocks(sequence)
                    continue
                is_live_behind_copies |= not sequence.is_line
                num_behind_copies += 1
                if num_behind_copies == _MAX_BEHIND_COPIES:
                    break
                continue
            num_tokens = self._start(sequence, budget, num_promised)
            while num_tokens == 0 and self._pressure.preempt_paused(preempted):
                num_promised = self._all_promised_blocks()
                num_tokens = self._start(sequence, budget, num_promised)
            if num_tokens == 0:
                self._pins.short = sequence
                self._pressure.give_up_last(sequence.queue_position + 1)
                break
            admitted.append(sequence)
            self._queues.run(sequence)
            num_promised += self._promised_blocks(sequence)
            chunks.append(sequence.next_chunk(num_tokens))
            budget -= self._config.work.cost(sequence.num_computed, num_tokens)
        for sequence in admitted:
            self._waiting.remove(sequence)
        if self._pins.short is not None:
            self._pressure.give_back_merged()

    def _is_bounded(self, sequence: RequestState, bounded: set[str]) -> bool:
        """Return whether the tenant of a request may not run more, and if so, add it to `bounded`."""
        tenant = sequence.request.tenant
        if not self._borrowing.is_bounded or tenant in bounded:
            return tenant in bounded
        if self._borrowing.may_run(sequence, self._running):
            return False
        bounded.add(tenant)
        return True

    def _candidates(self) -> Iterable[RequestState]:
        """Return the waiting requests that the step's batch allows, in the order in which they may run."""
        if not self._batcher.pauses:
            return self._waiting.candidates()
        ready = self._waiting.ready(self._config.max_running)
        if not self._batcher.displaces:  # nor does any request overtake another one
            return takewhile(lambda each: self._batcher.batch.allows(each.adapter), ready)
        ready.sort(key=lambda each: each.turn)
        return self._batcher.batch.select(ready, len(ready))

    # ---- memory

    def _all_promised_blocks(self) -> int:
        return sum(map(self._promised_blocks, (*self._running, *self._pins.returning)))

    def _promised_blocks(self, sequence: RequestState) -> int:
        """Return the blocks that a running request still has to take for the tokens that it has."""
        return max(self._pool.blocks_for(len(sequence.token_ids)) - len(sequence.block_ids), 0)

    def _start(self, sequence: RequestState, budget: float, num_promised: int) -> int:
        """Allocate blocks for a first chunk after the cached prefix, and return its tokens; 0 if memory is
        short. There must be memory for all that the request has to compute, beside the blocks promised to
        running requests. If none runs, or prompts are not cut, memory for the first chunk is enough."""
        searches = sequence.request.params.prompt_logprobs is None
        salt = sequence.request.cache_salt
        cached = self._pool.match(sequence.adapter, sequence.token_ids, salt) if searches else []
        self._pool.share(cached)
        num_cached = len(cached) * self._pool.block_size
        num_tokens = self._first_chunk(len(sequence.token_ids) - num_cached, num_cached, budget)
        if num_tokens == 0:
            self._pool.release(cached)
            return 0
        missing = self._pool.blocks_for(num_cached + num_tokens) - len(cached)
        whole = self._pool.blocks_for(len(sequence.token_ids)) - len(cached)
        cuts_prompts = not self._config.prompts_first
        if cuts_prompts and self._others_run(sequence) and num_promised + whole > self._pool.num_obtainable:
            self._pool.release(cached)
            return 0
        blocks = self._pool.allocate(missing)
        while blocks is None and not self._running and self._pressure.take_from_behind(sequence):
            blocks = self._pool.allocate(missing)  # no running request would ever free memory
        if blocks is None:
            self._pool.release(cached)
            return 0
        if self._swapping is not None:
            self._swapping.admitted(sequence)
        sequence.block_ids = cached + blocks
        sequence.num_computed = num_cached
        sequence.num_published = len(cached)
        if sequence.num_cached is None:
            sequence.num_cached = min(num_cached, sequence.num_prompt)
            self._waiting.admitted(sequence, self._batcher.now_s)
        if searches:
            self._pool.count_match(sequence.token_ids, cached)
        return num_tokens

    def _first_chunk(self, num_tokens: int, start: int, budget: float) -> int:
        """Return how many of `num_tokens` tokens a first chunk has; 0 if it does not fit the budget."""
        work = self._config.work
        if self._config.prompts_first:
            return num_tokens if num_tokens <= budget or budget >= work.max_tokens else 0
        return work.chunk(num_tokens, start, budget)

    def _others_run(self, sequence: RequestState) -> bool:
        """Return whether other requests run, or will as soon as their keys and values are on the device."""
        returning = self._pins.returning
        return bool(self._running) or len(returning) > (sequence in returning)

    def _awaits_copies(self, sequence: RequestState, num_promised: int) -> bool:
        """Return whether a request waits for copies from the host, which are begun here if there is
        memory."""
        return self._swapping is not None and self._swapping.fetch(
            sequence, num_running=len(self._running), num_promised=num_promised
        )

    # ---- places

    def _has_place_for(self, sequence: RequestState) -> bool:
        """Return whether a request may run beside those that run and the returning ones; one of these loses
        its place to a request before it."""
        returning, limit = self._pins.returning, self._config.max_running
        num_placed = self._num_placed
        if not returning or sequence in returning or num_placed + len(returning) < limit:
            return num_placed < limit
        return num_placed < limit and self._pressure.give_up_last(sequence.queue_position + 1)

    @property
    def _num_placed(self) -> int:
        """Number of `max_running` places that are taken; paused requests lose theirs if the policy displaces
        requests, as long as there are not too many of them."""
        if not self._batcher.displaces:
            return len(self._running)
        # An executor keeps state for so many requests at most.
        num_active, most = len(self._running) - len(self._queues.paused), 2 * self._config.max_running
        return num_active if len(self._running) < most else self._config.max_running
