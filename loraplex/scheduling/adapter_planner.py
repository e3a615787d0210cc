"""The scheduler's decisions about adapters, as step plans hold them. The adapter table records where adapters
are."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final, NamedTuple

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.core.stats import AdapterStats
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.adapter_pins import AdapterPins
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, Chunk, StepPlan
from loraplex.scheduling.popularity import Popularity
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.start_policy import StartPolicy
from loraplex.scheduling.step_features import step_features
from loraplex.scheduling.waiting_queue import WaitingQueue

_LEAST_BLOCKS: Final = 2
"""KV blocks that must remain beside kept adapters: enough for one request."""
_NUM_POPULAR: Final = 64
"""Number of popular adapters that may be loaded ahead of their next request."""


class Orders(NamedTuple):
    """The reads, loads and waits decided since the last step, as a plan holds them."""

    reads: tuple[AdapterRead, ...]
    loads: tuple[AdapterLoad, ...]
    waits_for: frozenset[str]
    stalls: bool


class AdapterPlanner:
    """A scheduler's adapters. `pins`: adapters pinned for requests."""

    def __init__(self, config: SchedulerConfig, memory: Memory, costs: DriftWatch | None) -> None:
        """`costs`: measured and predicted costs, which `ColdStart.AUTO` decides by."""
        self._config = config
        self._memory = memory
        self._table = memory.table
        self._costs = costs
        self._popularity = Popularity()
        self._num_workers = config.num_workers
        self.pins = AdapterPins(
            memory, prefetch_depth=config.prefetch_depth, step_tokens=config.work.max_tokens
        )
        self.choose_cold_start(config.cold_start)

    def choose_cold_start(self, cold_start: ColdStart) -> None:
        """Set the policy for adapters that are loaded from now on."""
        self._cold_start = cold_start
        self.pins.starts = StartPolicy(cold_start, self._costs, self._num_workers)

    def set_num_workers(self, num_workers: int) -> None:
        """Record how many CPU workers are ready: those that start, or have died, assist with nothing."""
        if num_workers != self._num_workers:
            self._num_workers = num_workers
            self.choose_cold_start(self._cold_start)

    # ---- which are known

    def add(self, version: str, num_bytes: int, source: AdapterSpec | None = None) -> None:
        """Register a version and where its files are. Raises CapacityError if it could never fit."""
        if self.pins.starts.keeps_all and version not in self._table:
            self._check_room_beside_kept(num_bytes)
            self.pins.keep(version)
        self._table.add(version, num_bytes, source)

    def remove(self, version: str) -> None:
        """Accept no new requests on this version; its memory is freed when the last one ends."""
        self._table.remove(version)

    def take_removed(self) -> list[str]:
        """Return the versions whose removal was completed since the last call."""
        removed = self._table.take_removed()
        for version in removed:
            self._memory.pool.forget_adapter(version)
            if version not in self._table:
                self._popularity.forget(version)
        return removed

    def asked_for(self, version: str) -> None:
        """Record that a queued request needs this version."""
        self._table.enter(version)
        self._popularity.asked(version)

    def snapshot(self) -> tuple[AdapterStats, ...]:
        """Return the stats of every version, each with the tier nearest to use that holds it."""
        return tuple(self._table.snapshot())

    # ---- which are brought in

    def stage_ahead(self, version: str) -> None:
        """Read a version into host memory before any request asks for it, if there is room."""
        self.pins.reads.stage_ahead(version)

    def unstage(self, version: str) -> None:
        """Evict the copy in host memory unless a load uses it; the next request that needs it has it read
        again."""
        self._table.unstage(version)

    def has_work(self) -> bool:
        """Return whether there is something to load or read that no request waits for."""
        return bool(self.pins.to_keep or self.pins.reads.ahead)

    def bring_in(self, waiting: WaitingQueue, running: Sequence[RequestState]) -> None:
        """Start loads and reads: for waiting requests in queue order, then for popular adapters, then
        ahead."""
        self.pins.prefetch(waiting, running)
        if self._config.loads_popular and not waiting and self._table.serving.num_loading == 0:
            self.pins.load_popular(self._popularity.most_asked(_NUM_POPULAR), running)
        self.pins.reads.fetch_ahead()

    def take_orders(self, used: Set[str | None], waiting: WaitingQueue) -> Orders:
        """Return the decisions since the last call. `used`: adapters of the step being decided, with None for
        the base model; empty if there is no step."""
        reads = self.pins.reads.take()
        holds_steps = self.pins.starts.holds_steps
        loads = tuple(
            load._replace(
                awaited=load.version in used,
                behind=bool(used) and load.version not in used and not holds_steps,
            )
            for load in self.pins.take_loads()
        )
        waits_for: frozenset[str] = frozenset()
        if holds_steps:
            begun = {read.version for read in reads} | {load.version for load in loads}
            waits_for = frozenset(version for version in begun if version in waiting.versions)
        return Orders(reads, loads, waits_for, self.pins.waits_for_any(used))

    def read(self, version: str, *, failed: bool) -> None:
        """Record that a read into host memory ended."""
        if not failed:
            self._table.read_ended(version)
            return
        self._table.read_failed(version)
        self.pins.not_kept(version)
        self._popularity.forget(version)

    def overdue(self, version: str) -> None:
        """Record that a read, or a load from disk, takes too long: no request waits for it any more."""
        if self._table.overdue(version):
            self.pins.not_kept(version)

    def loaded(self, version: str) -> None:
        self._table.loaded(version)

    def failed(self, version: str) -> None:
        """Record that a load failed."""
        self._table.failed(version)
        self._popularity.forget(version)

    # ---- who may count on one

    def may_join(self, sequence: RequestState, chunks: Sequence[Chunk]) -> bool:
        """Return whether a request whose adapter is still being copied may run in a step with these
        chunks."""
        own = Chunk(
            request_id=sequence.request_id,
            adapter=sequence.adapter,
            start=0,
            token_ids=sequence.token_ids,
            block_ids=[],
            samples=True,
        )
        if not self.pins.starts.decides:
            return self.pins.starts.streams
        used, num_bytes = {chunk.adapter for chunk in chunks}, self._table.known_bytes
        return self.pins.starts.may_join(
            before=step_features(chunks, num_bytes),
            after=step_features([*chunks, own], num_bytes),
            in_flight_before=self.pins.in_flight_for(used),
            in_flight_after=self.pins.in_flight_for(used | {sequence.adapter}),
            steps_before=[step_features(step, num_bytes) for step in self.pins.under_way],
        )

    def step_decided(self, chunks: Sequence[Chunk]) -> None:
        self.pins.under_way.append(chunks)

    def step_landed(self) -> None:
        """Record that the oldest decided step has landed."""
        self.pins.under_way.popleft()

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Record how long this step took; only some steps are measured."""
        known = all(chunk.adapter is None or chunk.adapter in self._table for chunk in plan.chunks)
        if known and not plan.stalls:
            features = step_features(plan.chunks, self._table.num_bytes)
            self.pins.starts.observe_step(features.on_merged_weights() if plan.merged else features, seconds)

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """Record how long copies to the device took."""
        self.pins.starts.observe_copy(num_bytes, seconds)

    def _check_room_beside_kept(self, num_bytes: int) -> None:
        """Raise CapacityError if one more kept adapter leaves no room for a request."""
        known = [row for row in self._table.snapshot() if row.version in self._table]
        kept_bytes = num_bytes + sum(row.num_bytes for row in known)
        least_tokens = _LEAST_BLOCKS * self._memory.pool.block_size
        if (
            kept_bytes > self._table.serving.room.budget_bytes
            or self._memory.max_tokens(kept_bytes) < least_tokens
        ):
            raise CapacityError(
                "there is no memory for all adapters at once, which --cold-start cached needs; "
                f"{self._memory.adapter_advice}, or choose another way to start"
            )
