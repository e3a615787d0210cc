"""Continuous batching: every step, decide which tokens of which requests run.

Running requests go first: each decoding one gets its next token, prompts get chunks of what the step may
compute beside that. What is left admits waiting requests, first come first served, as soon as their adapter
is in memory and there is KV memory for their whole prompt. When KV memory runs out, the youngest running
request is preempted: it gives its blocks back and is computed again later, or copied to the host and back
(`swapping`). Where adapters share that memory, waiting requests lose the pins on theirs first.

A batching policy may leave running requests out of a step: these are paused. They keep their blocks and pins,
and are the first to be preempted.

A step may be decided while the one before is still in flight: its tokens are counted before they are known.
`update` reports them afterwards, in the order of the steps; results for a request that has ended by then are
ignored.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from itertools import takewhile
from typing import Final

from loraplex.core.errors import InvalidRequestError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.stats import EngineStats
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.adapter_planner import AdapterPlanner
from loraplex.scheduling.adapter_slots import AdapterSlots
from loraplex.scheduling.batching.batcher import Batcher
from loraplex.scheduling.batching.grouped import GroupedQueue
from loraplex.scheduling.batching.policy import ALL
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import BlockCopy, Chunk, StepPlan, TokenUpdate
from loraplex.scheduling.request_limits import check_request, room_in_words
from loraplex.scheduling.request_state import ChunkUnderWay, RequestState
from loraplex.scheduling.request_table import RequestTable
from loraplex.scheduling.scheduler_view import check_integrity, engine_stats
from loraplex.scheduling.swapping import SwapOrders, Swapping

_MAX_BEHIND_COPIES: Final = 16
"""Waiting requests that a step looks at although their prefix is being copied for another one: there may be
thousands of them."""


class Scheduler:
    """Owns the queues, and is the only one to change the memory's state."""

    def __init__(self, config: SchedulerConfig, memory: Memory, costs: DriftWatch | None = None) -> None:
        """`costs`: measured and predicted costs, which `ColdStart.AUTO` and swapping decide by."""
        self._config = config
        self._memory = memory
        self._pool = memory.pool
        self._table = memory.table
        self.batcher = Batcher(config, memory, costs)
        self._waiting = self.batcher.make_queue()
        self._running: list[RequestState] = []
        self._paused: list[RequestState] = []  # running requests that the step being decided leaves out
        self._batch = ALL
        self._is_stuck = False  # requests are paused, and nothing else runs or is on its way
        self._sequences = RequestTable()
        self.adapters = AdapterPlanner(config, memory, costs)
        self._pins = self.adapters.pins
        self._swapping: Swapping | None = None
        if memory.pool.host is not None:
            self._swapping = Swapping(memory, memory.pool.host, costs)
            self._pins.returning = self._swapping.returning
        self._failures: list[TokenUpdate] = []
        self._under_way: deque[list[ChunkUnderWay]] = deque()
        self._slots = AdapterSlots(config.max_adapters)
        self._is_settled = False  # the last step only decoded, and no waiting request can be admitted
        self._num_preemptions = 0
        self._num_arrived = 0

    # ---- requests, and reports from the executor

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raise if it could never run."""
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        check_request(request, self._config.max_model_len, self._memory)
        if request.adapter is not None:
            self.adapters.asked_for(request.adapter)
        sequence = RequestState(request, self._num_arrived, self.batcher.now_s)
        self._num_arrived += 1
        self._sequences.add(sequence)
        self._waiting.append(sequence)
        self._is_settled = False

    def cancel(self, request_id: str) -> None:
        """End a request and free all that it holds; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._drop(sequence)

    def num_output(self, request_id: str) -> int | None:
        """Return the number of output tokens of a request so far; None if it has ended or is not known."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.num_output

    def adapter_read(self, version: str, error: str | None = None) -> None:
        """Record that a read ended: the version is in host memory, or on an error, the requests waiting for
        it fail."""
        self._is_settled = False
        self.adapters.read(version, failed=error is not None)
        if error is not None:
            # Requests that have it on the device, or being copied there, do not need the read.
            self._fail_all(version, error, pinned=False)

    def adapter_loaded(self, version: str) -> None:
        self._is_settled = False
        self.adapters.loaded(version)

    def adapter_failed(self, version: str, message: str) -> None:
        """Record that a load failed: all requests on the version fail, with the reason."""
        self.adapters.failed(version)
        self._fail_all(version, message, pinned=True)

    def adapter_overdue(self, version: str, message: str) -> None:
        """Record that a read or load takes too long: the requests waiting for it fail. It may still end or
        fail, which is handled then. May be called again until it does."""
        self._is_settled = False
        self.adapters.overdue(version)
        for sequence in self._sequences.on_version(version):
            if sequence in self._waiting and not self._pins.is_in_memory(version):
                self._fail(sequence, message, param="model")

    def swap_ended(self, copies: Iterable[BlockCopy], *, out: bool, error: str | None = None) -> None:
        """Record that copies of KV blocks to the host (`out`) or to the device have ended, with or without an
        error. Keys and values that could not be copied are computed again."""
        assert self._swapping is not None
        self._is_settled = False
        ended = self._swapping.ended_out if out else self._swapping.ended_in
        ended(copies, failed=error is not None)

    def _fail_without_room(self) -> None:
        """Fail a request whose memory could only come from an overdue load: those behind it must not wait for
        that, too."""
        any_runs = bool(self._running or self._under_way or self._pool.num_locked)
        sequence = self._pins.without_room(any_runs=any_runs)
        if sequence is not None:
            self._fail(
                sequence,
                "there is no memory for the request beside adapters that do not come from disk; check the "
                "disk that holds them, then try again",
            )

    def _fail_all(self, version: str, message: str, *, pinned: bool) -> None:
        """Fail the requests on a version; those that have pinned it only if `pinned`."""
        for sequence in self._sequences.on_version(version):
            if pinned or not sequence.pinned:
                self._fail(sequence, message, param="model")

    # ---- decisions

    def has_work(self) -> bool:
        return bool(self._sequences or self._failures) or self.adapters.has_work()

    def schedule(self) -> StepPlan:
        """Decide the next step. It may have no chunks while adapters load."""
        preempted: list[RequestState] = []
        num_running = len(self._running)
        active = self._choose_batch()
        if self._config.prompts_first:
            chunks, budget = self._prompts_or_decodes(preempted)
        else:
            chunks, budget = self._schedule_running(active, preempted)
            self._bring_in()
            self._keep_order()
            if not preempted:
                self._admit(chunks, budget, preempted)
        if not preempted:
            self._fail_without_room()
        self._is_stuck = bool(self._paused) and not chunks and not preempted and not self._under_way
        all_decode = not preempted and len(self._running) == num_running == len(chunks)
        self._is_settled = all_decode and budget == self._config.work.prefill_budget(num_running)
        return self._plan(chunks, preempted)

    def _plan(self, chunks: list[Chunk], preempted: Iterable[RequestState] = ()) -> StepPlan:
        """Return the plan of a step with these chunks, and count them as computed."""
        versions = {chunk.adapter for chunk in chunks}
        return self._decided(tuple(chunks), versions, list(map(self._advance, chunks)), preempted)

    def _decided(
        self,
        chunks: tuple[Chunk, ...],
        versions: set[str | None],
        under_way: list[ChunkUnderWay],
        preempted: Iterable[RequestState],
    ) -> StepPlan:
        """Return the plan and record the step as in flight. `versions`: the adapters of the chunks, with None
        for the base model."""
        if chunks:
            self._memory.step_decided()
            self.adapters.step_decided(chunks)
            self.batcher.step_decided(chunks, versions)
            self._under_way.append(under_way)
        orders = self.adapters.take_orders(versions, self._waiting)
        merge, drops_merged = self.batcher.merged.take_orders()
        swaps = SwapOrders() if self._swapping is None else self._swapping.take_orders()
        return StepPlan(
            chunks=chunks,
            adapter_evictions=tuple(self._table.serving.take_evictions()),
            moves=tuple(self._memory.take_moves()),
            adapter_reads=orders.reads,
            adapter_loads=orders.loads,
            waits_for=orders.waits_for,
            stalls=orders.stalls,
            preempted=tuple(sequence.request_id for sequence in preempted),
            merge=merge,
            merged=self._batch.merged if chunks else None,
            drops_merged=drops_merged,
            swap_outs=swaps.outs,
            swap_ins=swaps.ins,
        )

    def live_chunks(self, plan: StepPlan) -> list[Chunk]:
        """Return the chunks of the oldest step in flight whose requests have not ended meanwhile."""
        return [
            chunk
            for chunk, under_way in zip(plan.chunks, self._under_way[0], strict=True)
            if self._is_live(under_way.sequence)
        ]

    def update(
        self, plan: StepPlan, sampled: Mapping[str, int], failed: Mapping[str, str] | None = None
    ) -> list[TokenUpdate]:
        """Account for an executed step: each chunk that samples has a token in `sampled`, or in `failed` the
        reason why it has none.

        Steps must be reported in the order they were decided. Requests that ended meanwhile are ignored.
        """
        updates = []
        self._memory.step_landed()
        self.adapters.step_landed()
        for chunk, under_way in zip(plan.chunks, self._under_way.popleft(), strict=True):
            sequence, num_resets, samples = under_way
            if not self._is_live(sequence):
                continue
            if sequence.num_resets == num_resets:
                self._publish(sequence, chunk.end)
            if not samples:
                continue
            sequence.num_unknown -= 1
            request_id = sequence.request_id
            if failed and request_id in failed:
                # A failure of one request and not of the whole step is due to its adapter.
                self._fail(sequence, failed[request_id], param="model" if sequence.adapter else None)
            else:
                updates.append(self._accept(sequence, sampled[request_id]))
        return updates

    def take_removed_adapters(self) -> list[str]:
        """Return the versions whose removal was completed since the last call."""
        removed = self.adapters.take_removed()
        for version in removed:
            if version not in self._table:
                self.batcher.forget(version)
        return removed

    def take_failures(self) -> list[TokenUpdate]:
        """Return the requests that ended with an error since the last call."""
        failures, self._failures = self._failures, []
        return failures

    # ---- running requests

    def _choose_batch(self) -> list[RequestState]:
        """Choose the requests that the step may run, and return the running ones among them."""
        if not self.batcher.pauses:
            return list(self._running)
        if self._is_stuck:  # nothing that the policy chose could run: let all go on for a step
            self._batch, active = self.batcher.choose_all(self._running)
        else:
            ready = filter(self._may_admit, self._waiting.ready(self._config.max_running))
            self._batch, active = self.batcher.choose(self._running, ready, self._sequences)
            self._pin_merged()
        self.follow_moves()  # merged weights may have needed the place of blocks
        kept = set(active)
        self._paused = [each for each in self._running if each not in kept]
        return active

    def _pin_merged(self) -> None:
        """Pin the merged adapter for the requests on it, wherever they wait."""
        version = self._batch.merged
        if version not in self._table.serving.resident or not self.batcher.displaces:
            return
        assert version is not None
        for each in self._sequences.on_version(version)[: self._config.max_running]:
            if each in self._waiting and not each.pinned and self._table.acquire(version):
                self._waiting.set_pinned(each, pinned=True)
                each.adapter_hit = True if each.adapter_hit is None else each.adapter_hit

    def follow_moves(self) -> None:
        """Update the block ids of requests whose blocks were moved."""
        self._pins.follow_moves(self._running)

    def _prompts_or_decodes(self, preempted: list[RequestState]) -> tuple[list[Chunk], float]:
        chunks: list[Chunk] = []
        self._bring_in()
        self._admit(chunks, self._config.work.max_tokens, preempted)
        return (chunks, 0.0) if chunks else self._schedule_running(list(self._running), preempted)

    def _schedule_running(
        self, running: list[RequestState], preempted: list[RequestState]
    ) -> tuple[list[Chunk], float]:
        """Return the chunks of these running requests, and the budget left for prompts."""
        work = self._config.work
        limit, block_size = self._config.max_model_len, self._pool.block_size
        remaining = [s.num_remaining for s in running]
        decode_cost = sum(
            [work.cost(s.num_computed, 1) for s, count in zip(running, remaining, strict=True) if count == 1]
        )
        budget = work.prefill_budget(decode_cost)
        chunks: list[Chunk] = []
        for sequence, num_remaining in zip(running, remaining, strict=True):
            if (preempted and sequence in preempted) or sequence.needs_no_more(limit):
                continue
            decodes, start = num_remaining == 1, sequence.num_computed
            num_tokens = 1 if decodes else work.chunk(num_remaining, start, budget)
            end = start + num_tokens
            is_short = end > len(sequence.block_ids) * block_size
            if num_tokens == 0 or (is_short and not self._grow(sequence, end, preempted)):
                continue
            chunks.append(sequence.next_chunk(num_tokens))
            if not decodes:
                budget -= work.cost(sequence.num_computed, num_tokens)
        return chunks, budget

    def _grow(self, sequence: RequestState, num_tokens: int, preempted: list[RequestState]) -> bool:
        """Allocate blocks up to `num_tokens`, preempting the youngest running requests if necessary."""
        while True:
            missing = self._pool.blocks_for(num_tokens) - len(sequence.block_ids)
            blocks = self._pool.allocate(max(missing, 0))
            if blocks is not None:
                sequence.block_ids += blocks
                return True
            if self._pool.num_free_soon > 0:
                return False  # blocks that are being copied to or from the host are free when that has ended
            if self._give_up_last() or self._pins.unpin_youngest(self._waiting) or self._give_back_merged():
                continue
            victim = self._paused.pop() if self._paused else self._running[-1]
            if victim is sequence and sequence.num_unknown > 0:
                return False  # the token in flight may be its last: decide again when it is known
            if victim is sequence and len(self._running) == 1:
                if self._memory.shared and self._table.serving.num_loading > 0:
                    return False  # adapters that load for other requests hold memory that is available soon
                if self._memory.shared and self.batcher.merged.version is not None:
                    return False  # the next step does not run on merged weights, and gives these back
                # Alone and still short: the request has outgrown KV memory.
                room = room_in_words(sequence.adapter, self._memory)
                self._fail(sequence, f"{room}, too few for this request; {self._memory.advice}")
                return False
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False

    def _give_back_merged(self) -> bool:
        """Give back the memory of merged weights, if this step does not run on them."""
        if self._batch.merged is None:
            return self.batcher.merged.give_back()
        self.batcher.merged.short_of_memory()
        return False

    def _preempt(self, sequence: RequestState) -> None:
        self._running.remove(sequence)
        self._slots.leave(sequence.adapter)
        self._swap_out(sequence)
        self._pool.release(sequence.block_ids)
        sequence.reset()
        self._waiting.append_front(sequence)
        self._num_preemptions += 1

    # ---- waiting requests

    def _bring_in(self) -> None:
        """Choose the order of waiting requests, where that is not the order of arrival, and start loads and
        reads for the first."""
        if isinstance(self._waiting, GroupedQueue):
            self._waiting.select(
                self._running,
                self._config.max_running - self._num_placed,
                self._config.work.max_tokens,
                self.batcher.now_s,
                lambda: self.batcher.end_pace(self._running),
            )
        self.adapters.bring_in(self._waiting, self._running)
        if self._pins.refused is not None:
            self._give_back_merged()

    def _may_admit(self, sequence: RequestState) -> bool:
        """Return whether a waiting request could run, as far as its adapter and its tokens are concerned."""
        return self._pins.is_ready(sequence) and sequence.num_unknown == 0

    def _admit(self, chunks: list[Chunk], budget: float, preempted: list[RequestState]) -> None:
        """Admit waiting requests, and add their chunks. `preempted`: paused requests that had to give up
        their memory, where nothing else runs, are added here."""
        self._pins.short = None
        # No request overtakes one that was refused memory for its adapter: it would take that memory.
        refused = self._pins.refused if self._memory.shared else None
        admitted: list[RequestState] = []
        num_promised: int | None = None
        num_behind_copies = 0
        for sequence in self._candidates():
            if budget < 1 or not self._has_place_for(sequence):
                break
            if refused is not None and sequence.queue_position > refused.queue_position:
                break
            if not self._may_admit(sequence):
                continue
            if self._pins.is_arriving(sequence) and not self.adapters.may_join(sequence, chunks):
                continue
            if not self._slots.has_room_for(sequence.adapter):
                continue
            if num_promised is None:
                num_promised = self._all_promised_blocks()
            if sequence in self._pins.returning:
                num_promised -= self._promised_blocks(sequence)
            if self._awaits_copies(sequence, num_promised):
                if sequence in self._pins.returning:
                    num_promised += self._promised_blocks(sequence)
                    continue
                num_behind_copies += 1
                if num_behind_copies == _MAX_BEHIND_COPIES:
                    break
                continue
            num_tokens = self._start(sequence, budget, num_promised)
            while num_tokens == 0 and self._preempt_paused(preempted):
                num_promised = self._all_promised_blocks()
                num_tokens = self._start(sequence, budget, num_promised)
            if num_tokens == 0:
                self._pins.short = sequence
                self._give_up_last(sequence.queue_position + 1)
                break
            admitted.append(sequence)
            self._running.append(sequence)
            num_promised += self._promised_blocks(sequence)
            self._slots.enter(sequence.adapter)
            chunks.append(sequence.next_chunk(num_tokens))
            budget -= self._config.work.cost(sequence.num_computed, num_tokens)
        for sequence in admitted:
            self._waiting.remove(sequence)
        if self._pins.short is not None:
            self._give_back_merged()

    def _candidates(self) -> Iterable[RequestState]:
        """Return the waiting requests that the step's batch allows, in the order in which they may run."""
        if not self.batcher.pauses:
            return self._waiting.candidates()
        ready = self._waiting.ready(self._config.max_running)
        if not self.batcher.displaces:  # nor does any request overtake another one
            return takewhile(lambda each: self._batch.allows(each.adapter), ready)
        ready.sort(key=lambda each: each.arrival)
        return self._batch.select(ready, len(ready))

    def _preempt_paused(self, preempted: list[RequestState]) -> bool:
        """Preempt the youngest paused request, if all running ones are paused, so that none would ever give
        back memory. Return False otherwise, and while copies are about to free some."""
        if not self._paused or len(self._paused) < len(self._running) or self._pool.num_free_soon > 0:
            return False
        preempted.append(self._paused.pop())
        self._preempt(preempted[-1])
        return True

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
        cached = self._pool.match(sequence.adapter, sequence.token_ids) if searches else []
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
        while blocks is None and not self._running and self._take_from_behind(sequence):
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
            self._waiting.admitted(sequence, self.batcher.now_s)
        if searches:
            self._pool.count_match(sequence.token_ids, cached)
        return num_tokens

    def _first_chunk(self, num_tokens: int, start: int, budget: float) -> int:
        """Return how many of `num_tokens` tokens a first chunk has; 0 if it does not fit the budget."""
        work = self._config.work
        if self._config.prompts_first:
            return num_tokens if num_tokens <= budget or budget >= work.max_tokens else 0
        return work.chunk(num_tokens, start, budget)

    def _take_from_behind(self, sequence: RequestState) -> bool:
        """Take blocks from a waiting request that holds some, this one or one behind it, or a pin from one
        behind it; return False if none has any."""
        return self._give_up_last(sequence.queue_position) or self._pins.unpin_youngest(
            self._waiting, sequence
        )

    # ---- the host tier of KV memory

    def _has_place_for(self, sequence: RequestState) -> bool:
        """Return whether a request may run beside those that run and the returning ones; one of these loses
        its place to a request before it."""
        returning, limit = self._pins.returning, self._config.max_running
        num_placed = self._num_placed
        if not returning or sequence in returning or num_placed + len(returning) < limit:
            return num_placed < limit
        return num_placed < limit and self._give_up_last(sequence.queue_position + 1)

    @property
    def _num_placed(self) -> int:
        """Number of `max_running` places that are taken; paused requests lose theirs if the policy displaces
        requests, as long as there are not too many of them."""
        if not self.batcher.displaces:
            return len(self._running)
        # An executor keeps state for so many requests at most.
        num_active, most = len(self._running) - len(self._paused), 2 * self._config.max_running
        return num_active if len(self._running) < most else self._config.max_running

    def _others_run(self, sequence: RequestState) -> bool:
        """Return whether other requests run, or will as soon as their keys and values are on the device."""
        returning = self._pins.returning
        return bool(self._running) or len(returning) > (sequence in returning)

    def _swap_out(self, sequence: RequestState) -> None:
        """Let a preempted request's full blocks be copied to the host: also those of steps in flight, which
        write them before the copy begins."""
        if self._swapping is not None:
            self._publish(sequence, min(sequence.num_computed, len(sequence.token_ids)))
            self._swapping.swap_out(sequence)

    def _awaits_copies(self, sequence: RequestState, num_promised: int) -> bool:
        """Return whether a request waits for copies from the host, which are begun here if there is
        memory."""
        return self._swapping is not None and self._swapping.fetch(
            sequence, num_running=len(self._running), num_promised=num_promised
        )

    def _give_up_last(self, first: float = -math.inf) -> bool:
        """See `Swapping.give_up_last`."""
        return self._swapping is not None and self._swapping.give_up_last(first)

    def _keep_order(self) -> None:
        """Take the blocks from returning requests that must not overtake one whose adapter has no room."""
        refused = self._pins.refused if self._memory.shared else None
        while refused is not None and self._give_up_last(refused.queue_position):
            pass

    # ---- after a step

    def _accept(self, sequence: RequestState, token_id: int) -> TokenUpdate:
        """Append a sampled token, or end the request."""
        params, token_ids = sequence.request.params, sequence.token_ids
        if sequence.stops_at(token_id):
            self._drop(sequence)
            return TokenUpdate(
                request_id=sequence.request_id,
                finish_reason=FinishReason.STOP,
                stop_token_id=token_id,
                num_cached_tokens=sequence.num_cached or 0,
                adapter_hit=sequence.adapter_hit,
            )
        token_ids.append(token_id)
        num_tokens, max_tokens = len(token_ids), params.max_tokens
        full = num_tokens >= self._config.max_model_len
        finish_reason = None
        if full or (max_tokens is not None and num_tokens - sequence.num_prompt >= max_tokens):
            finish_reason = FinishReason.LENGTH
            self._drop(sequence)
        return TokenUpdate(
            request_id=sequence.request_id,
            token_id=token_id,
            finish_reason=finish_reason,
            num_cached_tokens=sequence.num_cached or 0,
            adapter_hit=sequence.adapter_hit,
        )

    def _publish(self, sequence: RequestState, num_computed: int) -> None:
        num_full = num_computed // self._pool.block_size
        if num_full > sequence.num_published:
            self._pool.publish(
                sequence.adapter, sequence.token_ids, sequence.block_ids, sequence.num_published, num_full
            )
            sequence.num_published = num_full

    def _is_live(self, sequence: RequestState) -> bool:
        """Return whether this very request is in the engine, not another that was given its id since."""
        return self._sequences.get(sequence.request_id) is sequence

    def _advance(self, chunk: Chunk) -> ChunkUnderWay:
        """Count a chunk as computed that is about to be."""
        sequence, samples = self._sequences[chunk.request_id], chunk.samples
        sequence.num_computed = chunk.end
        sequence.num_unknown += samples
        return ChunkUnderWay(sequence, sequence.num_resets, samples)

    def _fail(self, sequence: RequestState, message: str, *, param: str | None = None) -> None:
        self._drop(sequence)
        self._failures.append(
            TokenUpdate(
                request_id=sequence.request_id,
                finish_reason=FinishReason.ERROR,
                error=message,
                error_param=param,
            )
        )

    def _drop(self, sequence: RequestState) -> None:
        """Remove a request from every queue, and give back its memory and pins."""
        self._sequences.remove(sequence)
        self._is_settled = False
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._slots.leave(sequence.adapter)
            self._waiting.ended(self.batcher.now_s)
        if self._swapping is not None:
            self._swapping.dropped(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        if sequence.adapter is not None:
            self._table.leave(sequence.adapter, pinned=sequence.pinned)
            sequence.pinned = False

    # ---- state

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def request_ids(self) -> Set[str]:
        """Ids of the requests in the engine."""
        return self._sequences.ids

    def stats(self, num_steps: int) -> EngineStats:
        return engine_stats(
            self._memory,
            batching=self.batcher.stats(),
            num_steps=num_steps,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=self._num_preemptions,
            adapters=self.adapters.snapshot(),
        )

    def check_integrity(self) -> None:
        """Assert every invariant that ties queues, blocks and pins together. For tests, after each step."""
        assert {s.request_id for s in (*self._waiting, *self._running)} == self._sequences.ids
        assert len(self._waiting) + len(self._running) == len(self._sequences)
        self._waiting.check_integrity()
        self.batcher.merged.check_integrity()
        self._sequences.check_integrity()
        unknown = Counter(id(c.sequence) for step in self._under_way for c in step if c.samples)
        check_integrity(self._waiting, self._running, self._memory, unknown, self._pins.returning)
        if self._swapping is not None:
            self._swapping.check_integrity()
