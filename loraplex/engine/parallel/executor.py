"""The executor of shard 0, which also drives the executors of the other shards: all do the same at the same
time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest
from loraplex.engine.executor import AdapterEvent, Executor, Flight, LoadOrder, StepResult, SwapEvent
from loraplex.engine.grammars import AnswerGrammar
from loraplex.engine.parallel.shard_plans import PlanSender
from loraplex.engine.parallel.workers import Workers
from loraplex.engine.peers import ReadCounts
from loraplex.scheduling.plan import AdapterRead, BlockCopy, Move, StepPlan

_LOCAL: Final = 0
"""The shard of this process."""
_ASK_AGAIN_S: Final = 1.0
"""Seconds between the workers' checks for overdue reads, while there is one."""


class _Load(NamedTuple):
    """A version that is being loaded, or only read."""

    version: str
    read: bool


@dataclass(kw_only=True, slots=True)
class _Progress:
    """The shards' reports of a load: an error, or None. `copied`: as reported by shard 0. `local_end_s`: when
    it ended in shard 0. `is_overdue`: it is overdue in some shard."""

    said: dict[int, str | None] = field(default_factory=dict)
    copied: tuple[int, float] | None = None
    local_end_s: float | None = None
    is_overdue: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelFlight:
    """The local flight; flights of the workers need no landing."""

    local: Flight
    workers: Workers

    @property
    def runs_ahead(self) -> bool:
        return self.local.runs_ahead

    def land(self) -> StepResult:
        with self.workers.blamed():
            result = self.local.land()
        self.workers.raise_if_ended()
        return result


class ParallelExecutor:
    """An Executor over all shards. `poll_adapters`, `launch` and landing raise EngineDeadError once a process
    has ended."""

    def __init__(self, *, local: Executor, workers: Workers, release: Callable[[], None]) -> None:
        """`release` ends the workers and everything else that was started with them."""
        self._local = local
        self._workers = workers
        self._release = release
        self._plans = PlanSender()
        self._loads: dict[_Load, _Progress] = {}  # in flight
        self._num_overdue = 0
        self._asked_s = 0.0  # when workers last checked for overdue reads

    def begin(self, request: EngineRequest, grammar: AnswerGrammar | None = None) -> None:
        params = request.params
        if params.seed is None:  # chosen here, so that all shards sample the same tokens
            request = replace(request, params=params.changed(seed=secrets.randbits(63)))
        self._everywhere("begin", request, grammar)

    def preempt(self, request_id: str) -> None:
        self._plans.forget(request_id)
        self._everywhere("preempt", request_id)

    def end(self, request_id: str) -> None:
        self._plans.forget(request_id)
        self._everywhere("end", request_id)

    def adapter_bytes(self, spec: AdapterSpec) -> int:
        """Return the bytes that a version takes in each process; all shards have the same size."""
        return self._local.adapter_bytes(spec)

    def read_adapter(self, sources: Sequence[AdapterSpec], read: AdapterRead) -> None:
        self._loads[_Load(read.version, read=True)] = _Progress()
        self._everywhere("read_adapter", sources, read)

    def load_adapters(self, loads: Sequence[LoadOrder]) -> None:
        for order in loads:
            self._loads[_Load(order.load.version, read=False)] = _Progress()
        self._everywhere("load_adapters", loads)

    def move(self, moves: Sequence[Move]) -> None:
        if any(move.version is None for move in moves):
            self._plans.forget_contents()
        self._everywhere("move", moves)

    def swap(self, outs: Sequence[BlockCopy], ins: Sequence[BlockCopy]) -> None:
        raise AssertionError("refused with tensor parallelism")

    def poll_swaps(self) -> Sequence[SwapEvent]:
        return ()

    def evict_adapter(self, version: str) -> None:
        self._everywhere("evict_adapter", version)

    @property
    def why_not_merged(self) -> str | None:
        return self._local.why_not_merged

    def merge_bytes(self, spec: AdapterSpec) -> int | None:
        """Return the bytes of each process; all shards have the same size."""
        return self._local.merge_bytes(spec)

    def merge_adapter(self, version: str, place: int | None) -> None:
        """Merge in every shard its part of the adapter into its part of the model."""
        self._everywhere("merge_adapter", version, place)

    def drop_merged(self) -> None:
        self._everywhere("drop_merged")

    @property
    def read_counts(self) -> ReadCounts:
        """Return the counts of shard 0; the others read the same."""
        return self._local.read_counts

    @property
    def num_pending_loads(self) -> int:
        pending = len(self._loads) - self._num_overdue
        if pending == 0 and self._num_overdue > 0:  # an overdue load may have ended after all, in some shard
            return int(self._local.num_pending_loads > 0 or self._workers.has_events)
        return pending

    def poll_adapters(self, timeout_s: float) -> Sequence[AdapterEvent]:
        """Return the reads and loads that ended in every shard."""
        waits_locally = self._local.num_pending_loads > 0
        events = [(_LOCAL, event) for event in self._local.poll_adapters(timeout_s if waits_locally else 0.0)]
        events += self._workers.take_events(0.0 if events or waits_locally else timeout_s)
        for shard, event in events:
            progress = self._loads[_Load(event.version, read=event.read)]
            progress.said[shard] = event.error
            if shard == _LOCAL:
                progress.copied, progress.local_end_s = event.copied, time.monotonic()
        num_shards = len(self._workers.pids) + 1
        complete = [load for load, progress in self._loads.items() if len(progress.said) == num_shards]
        return [self._settle(load) for load in complete]

    def overdue_adapters(self, deadline_s: float) -> Sequence[str]:
        """Return the versions that are overdue in this process, and those that another shard has not
        completed `deadline_s` after this one. The workers check for themselves only to replace threads that
        hang."""
        if not self._loads:
            return ()
        now_s, hang_here = time.monotonic(), set(self._local.overdue_adapters(deadline_s))
        for load, progress in self._loads.items():
            waits_for_others = progress.local_end_s is not None and now_s - progress.local_end_s >= deadline_s
            if not progress.is_overdue and (load.version in hang_here or waits_for_others):
                progress.is_overdue = True
                self._num_overdue += 1
        if self._num_overdue > 0 and now_s - self._asked_s >= _ASK_AGAIN_S:
            self._asked_s = now_s
            # Workers may have begun a little later; treating a read as overdue too early does no harm.
            self._workers.call("overdue_adapters", max(deadline_s - _ASK_AGAIN_S, 0.0))
        return [load.version for load, progress in self._loads.items() if progress.is_overdue]

    def launch(self, plan: StepPlan) -> ParallelFlight:
        self._workers.raise_if_ended()
        with self._workers.blamed():
            self._workers.call("launch", self._plans.pack(plan))
            flight = self._local.launch(plan)
        return ParallelFlight(local=flight, workers=self._workers)

    def expect(self, spec: AdapterSpec) -> None:
        self._everywhere("expect", spec)

    @property
    def num_required(self) -> int:
        """Return the number of shard 0; the others capture the same."""
        return self._local.num_required

    def prepare(self) -> bool:
        self._workers.raise_if_ended()
        with self._workers.blamed():
            return bool(self._everywhere("prepare"))

    def check_integrity(self, request_ids: Set[str], adapters: Set[str]) -> None:
        loaded = {
            load.version
            for load, progress in self._loads.items()
            if not load.read and progress.said.get(_LOCAL, "pending") is None
        }
        self._local.check_integrity(request_ids, adapters | loaded)
        if not self._loads:  # otherwise a worker may have loaded more than it has reported
            self._workers.call("check_integrity", set(request_ids), set(adapters), wants_answer=True)
            self._workers.wait_done()

    def close(self) -> None:
        try:
            self._local.close()
        finally:
            self._release()

    def _everywhere(self, method: str, *args: Any) -> Any:
        """Call a method in every shard, the workers first, so that they run at the same time as this
        process."""
        self._workers.call(method, *args)
        return getattr(self._local, method)(*args)

    def _settle(self, load: _Load) -> AdapterEvent:
        """Report a load that ended in every shard. If it failed in any, the shards that have the adapter drop
        it; memory of a read is overwritten by later reads."""
        progress = self._loads.pop(load)
        said = progress.said
        self._num_overdue -= progress.is_overdue
        error = next((error for _, error in sorted(said.items()) if error is not None), None)
        if error is not None and not load.read:
            for shard in (shard for shard, failure in said.items() if failure is None):
                if shard == _LOCAL:
                    self._local.evict_adapter(load.version)
                else:
                    self._workers.call("evict_adapter", load.version, only=shard)
        return AdapterEvent(version=load.version, error=error, read=load.read, copied=progress.copied)
