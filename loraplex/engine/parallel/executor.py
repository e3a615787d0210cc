"""The executor of shard 0, and through it those of the others: all do the same at the same time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest
from loraplex.engine.executor import AdapterEvent, Executor, Flight, LoadOrder, StepResult
from loraplex.engine.parallel.workers import Workers
from loraplex.scheduling.plan import AdapterRead, Move, StepPlan

_LOCAL: Final = 0
"""The shard of this process."""


class _Load(NamedTuple):
    """A version that is being loaded, or read only."""

    version: str
    read: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelFlight:
    """The local flight; those of the workers need no landing."""

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
    """An Executor. `poll_adapters`, `launch` and landing raise EngineDeadError once a process has ended."""

    def __init__(self, *, local: Executor, workers: Workers, release: Callable[[], None]) -> None:
        """`release` ends the workers and whatever else was started with them."""
        self._local = local
        self._workers = workers
        self._release = release
        # Of each read or load under way: what the shards have said of it, an error or None.
        self._loads: dict[_Load, dict[int, str | None]] = {}
        self._copied: dict[_Load, tuple[int, float]] = {}  # by shard 0, which stands for all

    def begin(self, request: EngineRequest) -> None:
        params = request.params
        if params.seed is None:  # chosen here, so that all shards draw alike
            request = replace(request, params=replace(params, seed=secrets.randbits(63)))
        self._everywhere("begin", request)

    def preempt(self, request_id: str) -> None:
        self._everywhere("preempt", request_id)

    def end(self, request_id: str) -> None:
        self._everywhere("end", request_id)

    def adapter_bytes(self, spec: AdapterSpec) -> int:
        """In each process; all shards are of one size."""
        return self._local.adapter_bytes(spec)

    def read_adapter(self, sources: Sequence[AdapterSpec], read: AdapterRead) -> None:
        self._loads[_Load(read.version, read=True)] = {}
        self._everywhere("read_adapter", sources, read)

    def load_adapters(self, loads: Sequence[LoadOrder]) -> None:
        for order in loads:
            self._loads[_Load(order.load.version, read=False)] = {}
        self._everywhere("load_adapters", loads)

    def move(self, moves: Sequence[Move]) -> None:
        self._everywhere("move", moves)

    def evict_adapter(self, version: str) -> None:
        self._everywhere("evict_adapter", version)

    @property
    def num_pending_loads(self) -> int:
        return len(self._loads)

    def poll_adapters(self, timeout_s: float) -> Sequence[AdapterEvent]:
        """An adapter is there when every shard has it."""
        waits_locally = self._local.num_pending_loads > 0
        events = [(_LOCAL, event) for event in self._local.poll_adapters(timeout_s if waits_locally else 0.0)]
        events += self._workers.take_events(0.0 if events or waits_locally else timeout_s)
        for shard, event in events:
            load = _Load(event.version, read=event.read)
            self._loads[load][shard] = event.error
            if shard == _LOCAL and event.copied is not None:
                self._copied[load] = event.copied
        num_shards = len(self._workers.pids) + 1
        complete = [load for load, said in self._loads.items() if len(said) == num_shards]
        return [self._settle(load) for load in complete]

    def overdue_adapters(self, deadline_s: float) -> Sequence[str]:
        """Of this process: all shards read the same files. The others are asked only so that they replace
        the threads that hang."""
        overdue = self._local.overdue_adapters(deadline_s)
        if overdue:
            self._workers.call("overdue_adapters", deadline_s)
        return overdue

    def launch(self, plan: StepPlan) -> ParallelFlight:
        self._workers.raise_if_ended()
        with self._workers.blamed():
            flight = self._everywhere("launch", plan)
        return ParallelFlight(local=flight, workers=self._workers)

    def expect(self, spec: AdapterSpec) -> None:
        self._everywhere("expect", spec)

    @property
    def num_required(self) -> int:
        """Of shard 0; the others capture the same."""
        return self._local.num_required

    def prepare(self) -> bool:
        self._workers.raise_if_ended()
        with self._workers.blamed():
            return bool(self._everywhere("prepare"))

    def check_integrity(self, request_ids: Set[str], adapters: Set[str]) -> None:
        loaded = {
            load.version
            for load, said in self._loads.items()
            if not load.read and said.get(_LOCAL, "pending") is None
        }
        self._local.check_integrity(request_ids, adapters | loaded)
        if not self._loads:  # else a worker may have more than it has told
            self._workers.call("check_integrity", set(request_ids), set(adapters), wants_answer=True)
            self._workers.wait_done()

    def close(self) -> None:
        try:
            self._local.close()
        finally:
            self._release()

    def _everywhere(self, method: str, *args: Any) -> Any:
        """The workers first: they are to be at it while this process is."""
        self._workers.call(method, *args)
        return getattr(self._local, method)(*args)

    def _settle(self, load: _Load) -> AdapterEvent:
        """It ended everywhere. If a load failed anywhere, those who have the adapter drop it; what was read
        is overwritten by others."""
        said = self._loads.pop(load)
        error = next((error for _, error in sorted(said.items()) if error is not None), None)
        if error is not None and not load.read:
            for shard in (shard for shard, failure in said.items() if failure is None):
                if shard == _LOCAL:
                    self._local.evict_adapter(load.version)
                else:
                    self._workers.call("evict_adapter", load.version, only=shard)
        copied = self._copied.pop(load, None)
        return AdapterEvent(version=load.version, error=error, read=load.read, copied=copied)
