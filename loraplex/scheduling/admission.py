"""Decides which waiting requests run: in which order, and whether each has all that it needs.

A request is admitted, in the order of the queue, once

    its adapter is pinned and in memory, or on its way there (`adapters.may_join`)
    its tokens in flight are known, and its keys and values on the host are on the device again
    one of `max_running` places is free, and one of the slots for adapters
    its first chunk fits the step's budget
    there are KV blocks for its whole prompt, beside those promised to requests that run already

No request overtakes one that found no memory. A running line of a batch gives its place, or as many as are
needed their memory, to a live request that lacks nothing else, and that is admitted in the same step; with
copies of KV blocks to the host, as soon as these have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        self._fair = queues.fair
        self._pressure = pressure
        self._swapping = swapping
        self._borrowing = borrowing
        self.on_give_way: Callable[[RequestState], None] = lambda line: None
        """Called before a running line of a batch is preempted, which may have a chunk in the step."""

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

    def admit(self, chunks: list[Chunk], budget: float, preempted: list[RequestState]) -> None:
        """Admit waiting requests, and add their chunks. `preempted`: paused requests that had to give up
        their memory, where nothing else runs, and lines of batches that gave way are added here; chunks of
        such lines are removed."""
        self._pins.short = None
        # No request overtakes one that was refused memory for its adapter: it would take that memory.
        refused = self._pins.refused if self._memory.shared else None
        admitted: list[RequestState] = []
        num_promised: int | None = None
        num_behind_copies = 0
        bounded: set[str] = set()  # tenants that may not run more
        is_live_behind_copies = False
        for sequence in self._candidates():
            if budget < 1:
                break
            has_place = self._has_place_for(sequence)
            if not has_place and not self._lines_behind(sequence):
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
            while num_tokens == 0 and self._can_lines_free(sequence, budget, num_promised):
                self._give_way(self._lines_behind(sequence)[-1], chunks, preempted)
                has_place = True
                num_promised = self._all_promised_blocks()
                num_tokens = self._start(sequence, budget, num_promised)
            if num_tokens > 0 and not has_place:
                self._give_way(self._lines_behind(sequence)[-1], chunks, preempted)
                num_promised = self._all_promised_blocks()
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
        if not self._batcher.pauses and not any(each.is_line for each in self._running):
            return self._waiting.candidates()
        # A list: requests that give way enter the queue meanwhile.
        ready = self._waiting.ready(self._config.max_running)
        if not self._batcher.displaces:  # nor does any request overtake another one
            return takewhile(lambda each: self._batcher.batch.allows(each.adapter), ready)
        ready.sort(key=lambda each: each.turn)
        return self._batcher.batch.select(ready, len(ready))

    # ---- lines of batches that give way

    def _lines_behind(self, sequence: RequestState) -> list[RequestState]:
        """Return the running lines of batches that give way to a request, the first to do so last. None gives
        way to one of a tenant that is served after its own, nor in the step that it is admitted in."""
        if sequence.is_line or self._batcher.displaces:
            return []
        rank = self._fair.rank
        own_rank = rank(sequence.request.tenant)
        return [
            each
            for each in self._running
            if each.is_line and each not in self._waiting and rank(each.request.tenant) >= own_rank
        ]

    def _can_lines_free(self, sequence: RequestState, budget: float, num_promised: int) -> bool:
        """Return whether a request that is short of memory would have enough if lines of batches gave way,
        and none is about to be free."""
        lines = self._lines_behind(sequence)
        if not lines or self._pool.num_free_soon > 0:
            return False
        cached = self._cached_blocks(sequence)
        self._pool.share(cached)
        num_cached, num_tokens = len(cached) * self._pool.block_size, len(sequence.token_ids)
        missing = self._pool.blocks_for(num_tokens) - len(cached)
        promised = num_promised - sum(map(self._promised_blocks, lines))
        num_free = self._pool.num_obtainable + self._pool.num_freed_by(each.block_ids for each in lines)
        self._pool.release(cached)
        fits_step = self._first_chunk(num_tokens - num_cached, num_cached, budget) > 0
        return fits_step and promised + missing <= num_free

    def _give_way(self, line: RequestState, chunks: list[Chunk], preempted: list[RequestState]) -> None:
        """Preempt a line of a batch, and take its chunk out of the step."""
        self.on_give_way(line)
        chunks[:] = [each for each in chunks if each.request_id != line.request_id]
        if line in self._queues.paused:
            self._queues.paused.remove(line)
        self._queues.preempt(line)
        preempted.append(line)

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
        cached = self._cached_blocks(sequence)
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
        if _searches(sequence):
            self._pool.count_match(sequence.token_ids, cached)
        return num_tokens

    def _cached_blocks(self, sequence: RequestState) -> list[int]:
        """Return the blocks that the prefix cache has for a request."""
        if not _searches(sequence):
            return []
        return self._pool.match(sequence.adapter, sequence.token_ids, sequence.request.cache_salt)

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


def _searches(sequence: RequestState) -> bool:
    """Return whether a request may use the prefix cache, which has no log probabilities of a prompt."""
    return sequence.request.params.prompt_logprobs is None
