"""Continuous batching: every step, decide which tokens of which requests run.

Running requests go first: each that decodes gets its next token, prompts get chunks of what a step may
compute beside that; what is left admits waiting ones, first come first served, as soon as their adapter is
in memory.
When KV memory runs out, the youngest running request gives its blocks back and is computed again later. Where
adapters share that memory, those that wait for their turn give up their hold on one before that.

A step may be decided while the one before is still under way: its tokens are counted on before they are
known. `update` tells them afterwards, in the order of the steps; what was computed for a request that has
ended by then is passed over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Set
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from loraplex.adapters.room import Tier
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, ContextLengthError, InvalidRequestError, UnknownModelError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.stats import EngineStats
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.adapter_pins import AdapterPins
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, Chunk, StepPlan, TokenUpdate
from loraplex.scheduling.popularity import Popularity
from loraplex.scheduling.sequence import Sequence
from loraplex.scheduling.start_policy import StartPolicy
from loraplex.scheduling.step_features import step_features
from loraplex.scheduling.work import StepWork

_LEAST_BLOCKS: Final = 2
"""Of KV memory beside adapters that stay: enough for a request."""
_NUM_POPULAR: Final = 64
"""Adapters of which the first that is not there is brought in ahead of its next request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step. `prefetch_depth`: how far down the queue adapters start to load. `cold_start`: what
    requests do until then; `num_workers`: processes that compute LoRA on CPUs. `loads_popular`:
    adapters that are asked for often are brought in before they are asked for again."""

    max_model_len: int
    work: StepWork = field(default_factory=StepWork)
    max_running: int = 256
    prefetch_depth: int = 64
    cold_start: ColdStart = ColdStart.OVERLAP
    num_workers: int = 0
    loads_popular: bool = False


class _ChunkUnderWay(NamedTuple):
    """Whose chunk it is, how often that had been preempted by then, and whether a token will come of it."""

    sequence: Sequence
    num_resets: int
    samples: bool


class Scheduler:
    """Owns the queues; shares the memory's books with nobody."""

    def __init__(self, config: SchedulerConfig, memory: Memory, costs: DriftWatch | None = None) -> None:
        """`costs`: what things take, which `ColdStart.AUTO` decides by."""
        self._config = config
        self._memory = memory
        self._pool = memory.pool
        self._residency = memory.residency
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._staging = memory.staging
        self._costs = costs
        self._popularity = Popularity()
        self._pins = AdapterPins(memory, prefetch_depth=config.prefetch_depth, max_running=config.max_running)
        self.choose_cold_start(config.cold_start)
        self._failures: list[TokenUpdate] = []
        self._under_way: deque[list[_ChunkUnderWay]] = deque()
        self._num_preemptions = 0

    # ---- what callers tell it

    def choose_cold_start(self, cold_start: ColdStart) -> None:
        """For adapters that are loaded from now on."""
        self._cold_start = cold_start
        self._pins.starts = self._starts = StartPolicy(cold_start, self._costs, self._config.num_workers)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises if it could never run."""
        num_prompt, limit = len(request.prompt_token_ids), self._config.max_model_len
        if num_prompt == 0:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if num_prompt >= limit:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens; with room for one more the context holds {limit}",
                param="prompt",
            )
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        if request.adapter is not None and request.adapter not in self._residency:
            raise UnknownModelError(f"adapter version {request.adapter} is not registered")
        capacity = self._max_tokens(request.adapter)
        if num_prompt + 1 > capacity:
            raise CapacityError(
                f"the prompt has {num_prompt} tokens, KV memory holds {capacity}{_beside(request.adapter)}; "
                f"{self._memory.advice}"
            )
        if request.adapter is not None:
            self._residency.enter(request.adapter)
            self._popularity.asked(request.adapter)
        sequence = Sequence(request)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Free all a request holds; unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._drop(sequence)

    def add_adapter(self, version: str, num_bytes: int) -> None:
        """Make a version known. Raises CapacityError if there could never be room for it."""
        if self._cold_start is ColdStart.CACHED and version not in self._residency:
            self._check_room_beside_kept(num_bytes)
            self._pins.keep(version)
        self._residency.add(version, num_bytes)
        if self._staging is not None:
            self._staging.add(version, num_bytes)

    def stage_ahead(self, version: str) -> None:
        """Read it to the host's memory before anybody asks for it, if there is room."""
        if self._staging is not None:
            self._staging.stage_ahead(version)

    def adapter_read(self, version: str, error: str | None = None) -> None:
        """A read ended: the version is in the host's memory, or the requests that wait for it fail."""
        assert self._staging is not None
        if error is None:
            self._staging.arrived(version)
            return
        self._staging.failed(version)
        self._pins.not_kept(version)
        self._popularity.forget(version)
        # Those who have it on the device, or on its way there, need no other.
        self._fail_all(version, error, pinned=False)

    def adapter_loaded(self, version: str) -> None:
        self._residency.loaded(version)
        self._pins.loaded(version)

    def adapter_failed(self, version: str, message: str) -> None:
        """A load failed: the requests that counted on it fail, with the reason."""
        self._residency.failed(version)
        self._pins.loaded(version)
        self._popularity.forget(version)
        self._fail_all(version, message, pinned=True)

    def _fail_all(self, version: str, message: str, *, pinned: bool) -> None:
        """Requests of a version; those that hold it in memory only if that is said."""
        for sequence in [s for s in self._sequences.values() if s.adapter == version]:
            if pinned or not sequence.pinned:
                self._fail(sequence, message, param="model")

    def remove_adapter(self, version: str) -> None:
        """No new requests on this version; memory is freed when the last one ends."""
        self._residency.remove(version)

    def take_removed_adapters(self) -> list[str]:
        """Versions whose removal was completed since the last call."""
        removed = self._residency.take_removed()
        for version in removed:
            self._pool.forget_adapter(version)
            if version not in self._residency:
                self._popularity.forget(version)
            if self._staging is not None and version not in self._residency:
                self._staging.remove(version)
        return removed

    # ---- what it decides

    def has_work(self) -> bool:
        ahead = self._staging is not None and self._staging.num_ahead > 0
        return bool(self._sequences or self._failures or self._pins.num_to_keep or ahead)

    def schedule(self) -> StepPlan:
        """Decide the next step. May be empty of chunks while adapters load."""
        preempted: list[Sequence] = []
        chunks, budget = self._schedule_running(preempted)
        self._pins.prefetch(self._waiting, self._running)
        if self._config.loads_popular and not self._waiting and self._residency.num_loading == 0:
            self._pins.load_popular(self._popularity.most_asked(_NUM_POPULAR), self._running)
        if self._staging is not None:
            self._staging.fetch_ahead()
        if not preempted:
            self._admit(chunks, budget)
        if chunks:
            self._memory.step_decided()
            self._under_way.append([self._advance(chunk) for chunk in chunks])
        reads = () if self._staging is None else self._staging.take_reads()
        used = {chunk.adapter for chunk in chunks}
        loads = tuple(replace(load, awaited=load.version in used) for load in self._pins.take_loads())
        return StepPlan(
            chunks=tuple(chunks),
            adapter_evictions=tuple(self._residency.take_evictions()),
            moves=tuple(self._memory.take_moves()),
            adapter_reads=reads,
            adapter_loads=loads,
            waits_for=self._waited_for(reads, loads),
            stalls=self._pins.waits_for_any(used),
            preempted=tuple(sequence.request_id for sequence in preempted),
        )

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Told of some steps: how long this one took."""
        known = all(chunk.adapter is None or chunk.adapter in self._residency for chunk in plan.chunks)
        if known and not plan.stalls:
            self._starts.observe_step(step_features(plan.chunks, self._residency.num_bytes), seconds)

    def live_chunks(self, plan: StepPlan) -> list[Chunk]:
        """Of the oldest step under way, the chunks whose requests have not ended in between."""
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

        Steps are told in the order they were decided. Requests that ended in between are passed over.
        """
        updates = []
        self._memory.step_landed()
        for chunk, under_way in zip(plan.chunks, self._under_way.popleft(), strict=True):
            sequence = under_way.sequence
            if not self._is_live(sequence):
                continue
            if sequence.num_resets == under_way.num_resets:
                self._publish(sequence, chunk.end)
            if not chunk.samples:
                continue
            sequence.num_unknown -= 1
            if failed and chunk.request_id in failed:
                self._fail(sequence, failed[chunk.request_id])
            else:
                updates.append(self._accept(sequence, sampled[chunk.request_id]))
        return updates

    def take_failures(self) -> list[TokenUpdate]:
        """Requests that ended with an error since the last call."""
        failures, self._failures = self._failures, []
        return failures

    # ---- running requests

    def _schedule_running(self, preempted: list[Sequence]) -> tuple[list[Chunk], float]:
        """Chunks of running requests, oldest first, and the budget left for prompts."""
        work = self._config.work
        decode_cost = sum(work.cost(s.num_computed, 1) for s in self._running if s.num_remaining == 1)
        budget = work.prefill_budget(decode_cost)
        chunks: list[Chunk] = []
        for sequence in list(self._running):
            if sequence in preempted or self._needs_no_more(sequence):
                continue
            decodes = sequence.num_remaining == 1
            num_tokens = 1 if decodes else self._within(budget, sequence)
            if num_tokens == 0 or not self._grow(sequence, sequence.num_computed + num_tokens, preempted):
                continue
            chunks.append(self._chunk(sequence, num_tokens))
            if not decodes:
                budget -= work.cost(sequence.num_computed, num_tokens)
        return chunks, budget

    def _needs_no_more(self, sequence: Sequence) -> bool:
        """Whether the tokens under way are the last ones, whatever they turn out to be."""
        if sequence.num_unknown == 0:
            return False
        limit, max_tokens = self._config.max_model_len, sequence.request.params.max_tokens
        if max_tokens is not None:
            limit = min(limit, sequence.num_prompt + max_tokens)
        return sequence.num_tokens >= limit

    def _within(self, budget: float, sequence: Sequence) -> int:
        return min(sequence.num_remaining, self._config.work.tokens_within(budget, sequence.num_computed))

    def _grow(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Blocks for `num_tokens`, taken from the youngest running requests if need be."""
        while True:
            missing = self._pool.blocks_for(num_tokens) - len(sequence.block_ids)
            blocks = self._pool.allocate(max(missing, 0))
            if blocks is not None:
                sequence.block_ids += blocks
                return True
            if self._pins.unpin_youngest(self._waiting):
                continue
            victim = self._running[-1]
            if victim is sequence and sequence.num_unknown > 0:
                return False  # the token under way may be its last: decided again when it is known
            if victim is sequence and len(self._running) == 1:
                if self._memory.shared and self._residency.num_loading > 0:
                    return False  # what loads for others holds memory that can be had when it is there
                # Alone and still short: the request has outgrown the whole of KV memory.
                capacity = self._max_tokens(sequence.adapter)
                room = f"KV memory holds {capacity} tokens{_beside(sequence.adapter)}"
                self._fail(sequence, f"{room}, too few for this request; {self._memory.advice}")
                return False
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.block_ids)
        sequence.reset()
        self._waiting.appendleft(sequence)
        self._num_preemptions += 1

    # ---- waiting requests

    def _admit(self, chunks: list[Chunk], budget: float) -> None:
        passed_over: list[Sequence] = []
        while self._waiting and budget >= 1 and len(self._running) < self._config.max_running:
            sequence = self._waiting.popleft()
            if not self._pins.is_ready(sequence) or sequence.num_unknown > 0:
                passed_over.append(sequence)
                if self._memory.shared and sequence is self._pins.refused:
                    break  # it waits for memory, which whoever overtook it would take
                continue
            if self._pins.is_arriving(sequence) and not self._may_join(sequence, chunks):
                passed_over.append(sequence)
                continue
            num_tokens = self._start(sequence, budget)
            if num_tokens == 0:
                passed_over.append(sequence)
                break
            self._running.append(sequence)
            chunks.append(self._chunk(sequence, num_tokens))
            budget -= self._config.work.cost(sequence.num_computed, num_tokens)
        self._waiting.extendleft(reversed(passed_over))

    def _may_join(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Whether a request whose adapter is on its way may run in a step with these."""
        own = Chunk(
            request_id=sequence.request_id,
            adapter=sequence.adapter,
            start=0,
            token_ids=sequence.token_ids,
            block_ids=[],
            samples=True,
        )
        used = {chunk.adapter for chunk in chunks}
        return self._starts.may_join(
            before=step_features(chunks, self._residency.num_bytes),
            after=step_features([*chunks, own], self._residency.num_bytes),
            coming_before=self._pins.coming_for(used),
            coming_after=self._pins.coming_for(used | {sequence.adapter}),
        )

    def _start(self, sequence: Sequence, budget: float) -> int:
        """Blocks for a first chunk, on top of what the prefix cache has; 0 if memory is short."""
        searches = sequence.request.params.prompt_logprobs is None
        cached = self._pool.match(sequence.adapter, sequence.token_ids) if searches else []
        self._pool.share(cached)
        num_cached = len(cached) * self._pool.block_size
        num_tokens = min(
            len(sequence.token_ids) - num_cached, self._config.work.tokens_within(budget, num_cached)
        )
        missing = self._pool.blocks_for(num_cached + num_tokens) - len(cached)
        blocks = self._pool.allocate(missing)
        while blocks is None and not self._running and self._pins.unpin_youngest(self._waiting):
            blocks = self._pool.allocate(missing)  # nobody else's end would ever make room
        if blocks is None:
            self._pool.release(cached)
            return 0
        sequence.block_ids = cached + blocks
        sequence.num_computed = num_cached
        sequence.num_published = len(cached)
        if sequence.num_cached is None:
            sequence.num_cached = num_cached
        if searches:
            self._pool.count_match(sequence.token_ids, cached)
        return num_tokens

    # ---- after a step

    def _accept(self, sequence: Sequence, token_id: int) -> TokenUpdate:
        """Append a sampled token, or end the request."""
        params = sequence.request.params
        num_output = sequence.num_output + 1
        stops = token_id in params.stop_token_ids or (
            not params.ignore_eos and token_id in sequence.request.eos_token_ids
        )
        if stops and num_output > params.min_tokens:
            self._drop(sequence)
            return TokenUpdate(
                request_id=sequence.request_id,
                finish_reason=FinishReason.STOP,
                stop_token_id=token_id,
                num_cached_tokens=sequence.num_cached or 0,
            )
        sequence.token_ids.append(token_id)
        full = len(sequence.token_ids) >= self._config.max_model_len
        finish_reason = None
        if full or (params.max_tokens is not None and num_output >= params.max_tokens):
            finish_reason = FinishReason.LENGTH
            self._drop(sequence)
        return TokenUpdate(
            request_id=sequence.request_id,
            token_id=token_id,
            finish_reason=finish_reason,
            num_cached_tokens=sequence.num_cached or 0,
        )

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        num_full = num_computed // self._pool.block_size
        if num_full > sequence.num_published:
            self._pool.publish(
                sequence.adapter, sequence.token_ids, sequence.block_ids, sequence.num_published, num_full
            )
            sequence.num_published = num_full

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        return Chunk(
            request_id=sequence.request_id,
            adapter=sequence.adapter,
            start=start,
            token_ids=sequence.token_ids[start:end],
            block_ids=sequence.block_ids,
            samples=end == sequence.num_tokens,
        )

    def _is_live(self, sequence: Sequence) -> bool:
        """Whether this very request is in the engine, and not another that was given its id since."""
        return self._sequences.get(sequence.request_id) is sequence

    def _advance(self, chunk: Chunk) -> _ChunkUnderWay:
        """Count on a chunk that is about to be computed."""
        sequence = self._sequences[chunk.request_id]
        sequence.num_computed = chunk.end
        sequence.num_unknown += chunk.samples
        return _ChunkUnderWay(sequence, sequence.num_resets, chunk.samples)

    def _fail(self, sequence: Sequence, message: str, *, param: str | None = None) -> None:
        self._drop(sequence)
        self._failures.append(
            TokenUpdate(
                request_id=sequence.request_id,
                finish_reason=FinishReason.ERROR,
                error=message,
                error_param=param,
            )
        )

    def _drop(self, sequence: Sequence) -> None:
        """Out of every queue, all memory and pins given back."""
        del self._sequences[sequence.request_id]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        if sequence.adapter is not None:
            self._residency.leave(sequence.adapter, pinned=sequence.pinned)
            sequence.pinned = False

    def _waited_for(self, reads: Many[AdapterRead], loads: Many[AdapterLoad]) -> frozenset[str]:
        """On demand, nobody goes on before what somebody waits for is there."""
        if self._cold_start is not ColdStart.ON_DEMAND:
            return frozenset()
        wanted = {sequence.adapter for sequence in self._waiting}
        begun = {read.version for read in reads} | {load.version for load in loads}
        return frozenset(begun & wanted)

    def _check_room_beside_kept(self, num_bytes: int) -> None:
        """Raises CapacityError if one more adapter that stays leaves no room for a request."""
        known = [row for row in self._residency.snapshot() if row.version in self._residency]
        kept_bytes = num_bytes + sum(row.num_bytes for row in known)
        no_room = kept_bytes > self._residency.budget_bytes
        if no_room or self._memory.max_tokens(kept_bytes) < _LEAST_BLOCKS * self._pool.block_size:
            raise CapacityError(
                f"there is no memory for all adapters at once, which --cold-start cached needs; "
                f"{self._memory.advice}, or choose another way to start"
            )

    # ---- what it shows

    @property
    def request_ids(self) -> Set[str]:
        """Requests that are in the engine."""
        return self._sequences.keys()

    def stats(self, num_steps: int) -> EngineStats:
        residency, on_host = self._residency, not self._memory.shared
        host = self._staging or residency
        staged = frozenset() if self._staging is None else self._staging.versions
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_kv_blocks=self._pool.num_blocks - self._pool.num_free + self._pool.num_obtainable,
            num_kv_blocks_used=self._pool.num_blocks - self._pool.num_free,
            prefix_cache_queries=self._pool.prefix_queries * self._pool.block_size,
            prefix_cache_hits=self._pool.prefix_hits * self._pool.block_size,
            num_preemptions=self._num_preemptions,
            num_steps=num_steps,
            host_adapter_bytes=host.used_bytes if self._staging or on_host else 0,
            host_adapter_budget_bytes=host.budget_bytes if self._staging or on_host else 0,
            device_adapter_bytes=0 if on_host else residency.used_bytes,
            device_arena_bytes=self._memory.shared_bytes,
            adapters=tuple(
                replace(adapter, tier=Tier.HOST)
                if adapter.tier == Tier.DISK and adapter.version in staged
                else adapter
                for adapter in residency.snapshot()
            ),
        )

    def _max_tokens(self, adapter: str | None) -> int:
        return self._memory.max_tokens(0 if adapter is None else self._residency.num_bytes(adapter))

    def check_integrity(self) -> None:
        """Assert every invariant that ties queues, blocks and pins together. For tests, after each step."""
        queued = [*self._waiting, *self._running]
        assert {s.request_id for s in queued} == self._sequences.keys()
        assert len(queued) == len(self._sequences)
        self._pool.check_integrity(s.block_ids for s in queued)
        unknown = Counter(id(c.sequence) for step in self._under_way for c in step if c.samples)
        assert all(s.num_unknown == unknown[id(s)] for s in queued), (
            "a token is counted on that nobody samples"
        )
        for sequence in self._waiting:
            assert not sequence.block_ids, "a waiting request holds blocks"
        for sequence in self._running:
            assert sequence.adapter is None or sequence.pinned, "a running request's adapter may vanish"
            assert 0 <= sequence.num_computed < sequence.num_tokens
            assert len(sequence.block_ids) >= self._pool.blocks_for(sequence.num_computed)
        self._memory.check_integrity()
        self._residency.check_integrity(
            pins=Counter(s.adapter for s in queued if s.adapter is not None and s.pinned),
            in_flight=Counter(s.adapter for s in queued if s.adapter is not None),
        )


def _beside(adapter: str | None) -> str:
    return "" if adapter is None else " beside the request's adapter"
