"""Continuous batching: every step, decide which tokens of which requests run.

Running requests go first: each decoding one gets its next token, prompts get chunks of what the step may
compute beside that. What is left admits waiting requests, first come first served, as soon as their adapter
is in memory and there is KV memory for their whole prompt (`admission`). When KV memory runs out, others give
theirs back, and at last the youngest running request is preempted: it is computed again later, or copied to
the host and back (`memory_pressure`).

A batching policy may leave running requests out of a step: these are paused. They keep their blocks and pins,
and are the first to be preempted.

A step may be decided while the one before is still in flight: its tokens are counted before they are known.
`update` reports them afterwards, in the order of the steps; results for a request that has ended by then are
ignored.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set

from loraplex.core.clock import Clock, ManualClock
from loraplex.core.errors import InvalidRequestError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.stats import EngineStats
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.adapter_planner import AdapterPlanner
from loraplex.scheduling.admission import Admission
from loraplex.scheduling.batching.batcher import Batcher
from loraplex.scheduling.borrowing import Borrowing
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.fair_share import FairShare, RequestCosts
from loraplex.scheduling.fair_victims import kept_first
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.memory_pressure import MemoryPressure
from loraplex.scheduling.plan import BlockCopy, Chunk, StepPlan, TokenUpdate
from loraplex.scheduling.request_limits import check_request
from loraplex.scheduling.request_queues import RequestQueues
from loraplex.scheduling.request_state import ChunkUnderWay, RequestState
from loraplex.scheduling.scheduler_view import engine_stats
from loraplex.scheduling.swapping import SwapOrders, Swapping
from loraplex.scheduling.victims import predicted_reloads


class Scheduler:
    """Owns the queues; it and its parts are the only ones to change the memory's state."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        costs: DriftWatch | None = None,
        *,
        request_costs: DriftWatch | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`costs`: measured and predicted costs, which `ColdStart.AUTO`, swapping and batching decide
        by. `request_costs`: what tenants are charged and victims valued by, if not by these. `clock`: by
        which requests wait for their SLO; without one, none is ever lost."""
        self._config = config
        self._memory = memory
        self._pool = memory.pool
        self._table = memory.table
        self.batcher = Batcher(config, memory, costs)
        self.adapters = AdapterPlanner(config, memory, costs)
        self._pins = self.adapters.pins
        self._swapping: Swapping | None = None
        if memory.pool.host is not None:
            self._swapping = Swapping(memory, memory.pool.host, costs)
            self._pins.returning = self._swapping.returning
        request_costs = request_costs or costs
        if request_costs is not None:
            memory.table.predict_reloads(predicted_reloads(request_costs))
        self.fair = FairShare(RequestCosts(request_costs, memory.table.known_bytes))
        self._clock = clock or ManualClock()
        self._pins.on_load = self.fair.loads
        self._queues = RequestQueues(
            memory, self.batcher, self._swapping, config.max_adapters, self.fair, self._clock
        )
        self._sequences = self._queues.table
        self._waiting = self._queues.waiting
        self._running = self._queues.running
        self._pressure = MemoryPressure(memory, self.batcher, self._pins, self._queues, self._swapping)
        self._borrowing = Borrowing(
            config.max_borrowing, self.fair, self._queues.places, memory, request_costs
        )
        self._admission = Admission(
            config,
            memory,
            self.batcher,
            self.adapters,
            self._queues,
            self._pressure,
            self._swapping,
            self._borrowing,
        )
        self._waiting.holds_back = self._holds_back
        self._under_way: deque[list[ChunkUnderWay]] = deque()
        self._is_stuck = False  # requests are paused, and nothing else runs or is on its way
        self._num_arrived = 0

    # ---- requests, and reports from the executor

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raise if it could never run."""
        self.accept(request)
        self.queue(request)

    def accept(self, request: EngineRequest) -> None:
        """Keep the adapter of a request that is to be queued later; raise if it could never run."""
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        check_request(request, self._config.max_model_len, self._memory)
        if request.adapter is not None:
            self.adapters.asked_for(request.adapter)

    def give_up(self, request: EngineRequest) -> None:
        """Forget a request that was accepted, and will not be queued."""
        if request.adapter is not None:
            self._table.leave(request.adapter, pinned=False)

    def queue(self, request: EngineRequest) -> None:
        """Queue a request that was accepted."""
        sequence = RequestState(request, self._num_arrived, self.batcher.now_s, self._clock.now_s())
        sequence.slo_ttft_s, sequence.slo_tpt_s = self.fair.slo_ttft_s(request), self.fair.slo_tpt_s(request)
        self._num_arrived += 1
        self._queues.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request and free all that it holds; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._queues.drop(sequence)

    def num_output(self, request_id: str) -> int | None:
        """Return the number of output tokens of a request so far; None if it has ended or is not known."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.num_output

    def adapter_read(self, version: str, error: str | None = None) -> None:
        """Record that a read ended: the version is in host memory, or on an error, the requests waiting for
        it fail."""
        self._queues.is_settled = False
        self.adapters.read(version, failed=error is not None)
        if error is not None:
            # Requests that have it on the device, or being copied there, do not need the read.
            self._fail_all(version, error, pinned=False)

    def adapter_loaded(self, version: str) -> None:
        self._queues.is_settled = False
        self.adapters.loaded(version)

    def adapter_failed(self, version: str, message: str) -> None:
        """Record that a load failed: all requests on the version fail, with the reason."""
        self.adapters.failed(version)
        self._fail_all(version, message, pinned=True)

    def adapter_overdue(self, version: str, message: str) -> None:
        """Record that a read or load takes too long: the requests waiting for it fail. It may still end or
        fail, which is handled then. May be called again until it does."""
        self._queues.is_settled = False
        self.adapters.overdue(version)
        for sequence in self._sequences.on_version(version):
            if sequence in self._waiting and not self._pins.is_in_memory(version):
                self._queues.fail(sequence, message, param="model")

    def swap_ended(self, copies: Iterable[BlockCopy], *, out: bool, error: str | None = None) -> None:
        """Record that copies of KV blocks to the host (`out`) or to the device have ended, with or without an
        error. Keys and values that could not be copied are computed again."""
        assert self._swapping is not None
        self._queues.is_settled = False
        ended = self._swapping.ended_out if out else self._swapping.ended_in
        ended(copies, failed=error is not None)

    def _fail_without_room(self) -> None:
        """Fail a request whose memory could only come from an overdue load: those behind it must not wait for
        that, too."""
        any_runs = bool(self._running or self._under_way or self._pool.num_locked)
        sequence = self._pins.without_room(any_runs=any_runs)
        if sequence is not None:
            self._queues.fail(
                sequence,
                "there is no memory for the request beside adapters that do not come from disk; check the "
                "disk that holds them, then try again",
            )

    def _fail_all(self, version: str, message: str, *, pinned: bool) -> None:
        """Fail the requests on a version; those that have pinned it only if `pinned`."""
        for sequence in self._sequences.on_version(version):
            if pinned or not sequence.pinned:
                self._queues.fail(sequence, message, param="model")

    # ---- decisions

    def has_work(self) -> bool:
        return bool(self._sequences or self._queues.failures) or self.adapters.has_work()

    def schedule(self) -> StepPlan:
        """Decide the next step. It may have no chunks while adapters load."""
        preempted: list[RequestState] = []
        num_running = len(self._running)
        self._share_out()
        active = self._choose_batch()
        if self._config.prompts_first:
            chunks, budget = self._prompts_or_decodes(preempted)
        else:
            chunks, budget = self._schedule_running(active, preempted)
            self._admission.bring_in()
            self._pressure.keep_order()
            if not preempted:
                self._admission.admit(chunks, budget, preempted)
        if not preempted:
            self._fail_without_room()
        self._is_stuck = bool(self._queues.paused) and not chunks and not preempted and not self._under_way
        all_decode = not preempted and len(self._running) == num_running == len(chunks)
        self._queues.is_settled = all_decode and budget == self._config.work.prefill_budget(num_running)
        return self._plan(chunks, preempted)

    def _share_out(self) -> None:
        """Charge tenants for what they got so far, and put the running requests into the order in which they
        keep their memory, if that may be short in this step. Does nothing while only the order of arrival
        counts."""
        if not self.fair.is_shared:
            return
        self.fair.settle(self._running)
        if self._borrowing.is_bounded:
            self._queues.places.observe(self._clock.now_s())
        most_blocks = len(self._running) + self._pool.blocks_for(self._config.work.max_tokens)
        if self._pool.num_obtainable < most_blocks:
            self._running[:] = kept_first(self._running, self.fair)

    def _holds_back(self, sequence: RequestState) -> bool:
        """Return whether the tenant of a waiting request may not run more now."""
        return self._borrowing.is_bounded and not self._borrowing.may_run(sequence, self._running)

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
            merged=self.batcher.batch.merged if chunks else None,
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
        publish = self._queues.publish
        self._memory.step_landed()
        self.adapters.step_landed()
        for chunk, under_way in zip(plan.chunks, self._under_way.popleft(), strict=True):
            sequence, num_resets, samples = under_way
            if not self._is_live(sequence):
                continue
            if sequence.num_resets == num_resets:
                publish(sequence, chunk.end)
            if not samples:
                continue
            sequence.num_unknown -= 1
            request_id = sequence.request_id
            if failed and request_id in failed:
                # A failure of one request and not of the whole step is due to its adapter.
                self._queues.fail(sequence, failed[request_id], param="model" if sequence.adapter else None)
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
        return self._queues.take_failures()

    # ---- running requests

    def _choose_batch(self) -> list[RequestState]:
        """Choose the requests that the step may run, and return the running ones among them."""
        if not self.batcher.pauses:
            return list(self._running)
        self.batcher.begin()
        if self._is_stuck:  # nothing that the policy chose could run: let all go on for a step
            active = self.batcher.choose_all(self._running)
        else:
            if not self._running:  # no request needs memory first: those that arrived may run merged
                self._admission.bring_in()
            active = self.batcher.choose(self._running, self._admission.ready(), self._sequences)
            self._pin_merged()
        self.follow_moves()  # merged weights may have needed the place of blocks
        kept = set(active)
        self._queues.paused = [each for each in self._running if each not in kept]
        return active

    def _pin_merged(self) -> None:
        """Pin the merged adapter for the requests on it, wherever they wait."""
        version = self.batcher.batch.merged
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
        self._admission.bring_in()
        self._admission.admit(chunks, self._config.work.max_tokens, preempted)
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
            if num_tokens == 0 or (is_short and not self._pressure.grow(sequence, end, preempted)):
                continue
            chunks.append(sequence.next_chunk(num_tokens))
            if not decodes:
                budget -= work.cost(sequence.num_computed, num_tokens)
        return chunks, budget

    # ---- after a step

    def _accept(self, sequence: RequestState, token_id: int) -> TokenUpdate:
        """Append a sampled token, or end the request."""
        params, token_ids = sequence.request.params, sequence.token_ids
        if sequence.stops_at(token_id):
            self._queues.drop(sequence)
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
            self._queues.drop(sequence)
        return TokenUpdate(
            request_id=sequence.request_id,
            token_id=token_id,
            finish_reason=finish_reason,
            num_cached_tokens=sequence.num_cached or 0,
            adapter_hit=sequence.adapter_hit,
        )

    def _is_live(self, sequence: RequestState) -> bool:
        """Return whether this very request is in the engine, not another that was given its id since."""
        return self._sequences.get(sequence.request_id) is sequence

    def _advance(self, chunk: Chunk) -> ChunkUnderWay:
        """Count a chunk as computed that is about to be."""
        sequence, samples = self._sequences[chunk.request_id], chunk.samples
        sequence.num_computed = chunk.end
        sequence.num_unknown += samples
        return ChunkUnderWay(sequence, sequence.num_resets, samples)

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
            num_preemptions=self._queues.num_preemptions,
            adapters=self.adapters.snapshot(),
        )

    def check_integrity(self) -> None:
        """Assert every invariant that ties queues, blocks and pins together. For tests, after each step."""
        self.batcher.check_integrity()
        self._queues.check_integrity(
            Counter(id(c.sequence) for step in self._under_way for c in step if c.samples)
        )
