"""Decides which waiting request has its adapter loaded next, and which one has to unpin its adapter.

A waiting request keeps its pin only while the memory is not needed for a request before it: where adapters
and KV blocks share memory, it loses the pin if such a request is short of memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from itertools import islice
from typing import Final

from loraplex.core.cold_start import ColdStart
from loraplex.perf.layer_pipeline import AssistPlan
from loraplex.scheduling.host_reads import HostReads
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import AdapterLoad, Chunk
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.start_policy import InFlight, StartPolicy
from loraplex.scheduling.step_features import decode_features, step_features
from loraplex.scheduling.waiting_queue import WaitingQueue

_NUM_TRIED: Final = 8
"""Popular adapters to try before each step."""
_EMPTY_SHARE: Final = 0.25
"""Share of the blocks (counted as if there were no adapters) that loads ahead of any request
leave empty."""


class AdapterPins:
    """Pins adapters for waiting requests and starts their loads.

    `prefetch_depth`: number of waiting requests whose adapters may start to load. `step_tokens`: most tokens
    of a prompt in one step. `refused`: the request whose adapter found no room, if any; requests behind it
    must not take that memory. `short`: the request whose tokens found no room. `reads`: versions to read into
    host memory before they can be loaded. `to_keep`: versions still to be loaded and kept. `starts`: decides
    whether steps may use an adapter while it is being copied from host memory. `returning`: waiting requests
    that hold KV blocks (`swapping`). `under_way`: the chunks of each step in flight. `on_load`: called with
    each request that a load is started for.
    """

    def __init__(self, memory: Memory, *, prefetch_depth: int, step_tokens: int) -> None:
        self._memory = memory
        self._table = memory.table
        self.reads = HostReads(memory.table)
        self._prefetch_depth = prefetch_depth
        self._step_tokens = step_tokens
        self.to_keep: deque[str] = deque()
        self._loads: list[AdapterLoad] = []
        self.refused: RequestState | None = None
        self.short: RequestState | None = None
        self._reads_more = True
        self.starts = StartPolicy(ColdStart.OVERLAP)
        self.returning: Collection[RequestState] = ()
        self.under_way: deque[Sequence[Chunk]] = deque()
        self.on_load: Callable[[RequestState], None] = lambda request: None

    def keep(self, version: str) -> None:
        """Load a version as soon as possible, and never evict it."""
        self.to_keep.append(version)

    def not_kept(self, version: str) -> None:
        """Stop trying to load a version to keep it: its weights cannot be read."""
        with contextlib.suppress(ValueError):
            self.to_keep.remove(version)

    def prefetch(self, waiting: WaitingQueue, running: Sequence[RequestState]) -> None:
        """Pin or start to load adapters of the first waiting requests, in order, while there is room."""
        self.refused = None
        self._reads_more = True
        self._bring_in_kept(running)
        for sequence in waiting.first(self._prefetch_depth):
            if sequence is self.short and not running:
                return  # loads for the requests behind it would take the memory it waits for, again and again
            version = sequence.adapter
            if version is None or sequence.pinned:
                continue
            absent = self._table.is_absent(version)
            if absent and not self._is_staged(version):
                continue  # it is being read, or will be when a reader is free
            # A load leaves each running request room for one more block; otherwise they would evict it again.
            while not self._table.acquire(version, spare_blocks=len(running)):
                # The only obstacle may be another load, or a copy of a KV block, which end soon.
                if self._is_copying or not self.unpin_youngest(waiting, behind=sequence):
                    self.refused = sequence
                    return  # no request overtakes: a large adapter must not starve behind small ones
            waiting.set_pinned(sequence, pinned=True)
            if sequence.adapter_hit is None:
                sequence.adapter_hit = not absent
            if absent:
                self._load(version, sequence, running)
            self.follow_moves(running)

    def load_popular(self, versions: Iterable[str], running: Sequence[RequestState]) -> None:
        """Load the first of these that is absent, if it fits memory that is unused. Cached blocks are kept,
        and a share of the empty ones (`_EMPTY_SHARE`)."""
        pool = self._memory.pool
        num_blocks = self._memory.max_tokens(adapter_bytes=0) // pool.block_size
        spare_blocks = pool.num_free - pool.num_empty + int(num_blocks * _EMPTY_SHARE)
        absent = (v for v in versions if v in self._table and self._table.is_absent(v))
        for version in islice(absent, _NUM_TRIED):
            if not self._table.can_load(version):
                self.reads.stage_ahead(version)
            elif self._table.load_ahead(version, spare_blocks):
                self._load(version)
                self.follow_moves(running)
                return

    @property
    def _is_copying(self) -> bool:
        return self._table.serving.num_loading > 0 or self._memory.pool.num_locked > 0

    def _is_staged(self, version: str) -> bool:
        """Return whether the device could load a version now. If not, read it when a reader is free; after a
        read that found no room, none begins for requests further back."""
        if self._table.can_load(version):
            return True
        if self._reads_more:
            self._reads_more = self.reads.fetch(version)
        return self._table.can_load(version)  # `fetch` may have stopped staging it

    def only_reads(self, waiting: WaitingQueue) -> bool:
        """Return whether every waiting request waits for a read into host memory, begun or not: until one of
        these reads ends, `prefetch` does nothing."""
        if not waiting:
            return True
        if waiting.has_candidates:
            return False
        versions, table = waiting.versions, self._table
        are_absent = versions.isdisjoint(table.serving.resident) and versions.isdisjoint(
            table.serving.loading
        )
        return are_absent and self.reads.holds_up_all(versions)

    def is_ready(self, sequence: RequestState) -> bool:
        """Return whether the request could run, as far as its adapter is concerned."""
        version = sequence.adapter
        return version is None or (sequence.pinned and self.is_in_memory(version))

    def is_in_memory(self, version: str) -> bool:
        """Return whether requests could run on a version now: it is resident, or streams in from host
        memory."""
        return version in self._table.serving.resident or version in self._table.streaming

    def is_arriving(self, sequence: RequestState) -> bool:
        """Return whether the request would wait for its adapter's layers while it runs."""
        return sequence.adapter in self._table.streaming

    def in_flight_for(self, versions: Set[str | None]) -> InFlight:
        """Return the copies that a step with these adapters would wait for. How much of the copies of earlier
        steps is done is not known: all of it is counted."""
        streaming = self._table.streaming
        started = {load.version for load in self._loads}
        used = {version for version in streaming if version in versions}
        assist_delays_s = self._table.assist_delays_s
        assisted = used & assist_delays_s.keys()
        awaited = used - assisted
        return InFlight(
            awaited_bytes=sum(streaming[version] for version in awaited),
            # What was started for this step and is not awaited by it is copied later.
            backlog_bytes=0
            if not awaited
            else sum(
                size
                for version, size in streaming.items()
                if version not in awaited and version not in started
            ),
            assisted_bytes=sum(streaming[version] for version in assisted),
            assist_delay_s=sum(assist_delays_s[version] for version in assisted),
        )

    def without_room(self, *, any_runs: bool) -> RequestState | None:
        """Return the first request whose memory could only come from the end of an overdue load, if there is
        one. `any_runs`: whether any running request will give back memory."""
        if not self._table.serving.overdue:
            return None
        if not self._memory.shared:
            return self.refused if self._table.serving.waits_for_overdue_only else None
        if any_runs or self._table.serving.num_loading > 0:
            return None
        waiting = [sequence for sequence in (self.refused, self.short) if sequence is not None]
        return min(waiting, key=lambda sequence: sequence.queue_position, default=None)

    def unpin_youngest(self, waiting: WaitingQueue, behind: RequestState | None = None) -> bool:
        """Unpin the adapter of the last request in the queue that holds one in shared memory. With `behind`,
        only requests behind that one are considered. Return False if there is none."""
        if not self._memory.shared:
            return False
        for sequence in reversed(waiting.pinned()):
            if behind is not None and sequence.queue_position <= behind.queue_position:
                return False
            version = sequence.adapter
            assert version is not None
            if version in self._table.serving.resident:
                self._table.unpin(version)
                waiting.set_pinned(sequence, pinned=False)
                return True
        return False

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the loads that were started since the last call."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def waits_for_any(self, versions: Iterable[str | None]) -> bool:
        """Return whether any of these is still being copied to the device."""
        streaming = self._table.streaming
        return bool(streaming) and any(version in streaming for version in versions)

    def _bring_in_kept(self, running: Sequence[RequestState]) -> None:
        while self.to_keep:
            version = self.to_keep[0]
            if version in self._table:
                absent = self._table.is_absent(version)
                if absent and not self._is_staged(version):
                    return
                if not self._table.keep(version):
                    return
                if absent:
                    self._load(version)
                    self.follow_moves(running)
            self.to_keep.popleft()

    def _load(
        self, version: str, first: RequestState | None = None, running: Sequence[RequestState] = ()
    ) -> None:
        """Start a load. `first`: the request that it is for."""
        if first is not None:
            self.on_load(first)
        load, source = self._memory.load_of(version), self._table.host_place(version)
        plan = AssistPlan()
        if source is not None and self.starts.streams:
            plan = plan if first is None else self._assist_plan(version, first, running)
            self._table.stream(version, assist_delay_s=plan.delay_s if plan.num_layers > 0 else None)
        self._loads.append(load._replace(source=source, assisted_layers=plan.num_layers))

    def _assist_plan(self, version: str, first: RequestState, running: Sequence[RequestState]) -> AssistPlan:
        num_bytes = self._table.known_bytes
        return self.starts.assist_plan(
            self._table.num_bytes(version),
            min(len(first.token_ids), self._step_tokens),
            num_groups=self._table.num_groups(version),
            is_scored=first.request.params.prompt_logprobs is not None,
            is_bus_free=not self._table.streaming,
            beside=decode_features(running, num_bytes),
            steps_before=[step_features(chunks, num_bytes) for chunks in self.under_way],
        )

    def follow_moves(self, running: Sequence[RequestState]) -> None:
        """Update the block ids of requests whose blocks were moved to make room for an adapter."""
        moved = self._memory.take_block_moves()
        for sequence in (*running, *self.returning) if moved else ():
            sequence.block_ids[:] = [moved.get(block, block) for block in sequence.block_ids]
