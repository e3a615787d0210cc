"""Messages to the shards' executors, and results of their answers; no processes, no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.executor import AdapterEvent, Executor, LoadOrder
from loraplex.engine.parallel.executor import ParallelExecutor
from loraplex.engine.parallel.workers import Workers
from loraplex.scheduling.plan import AdapterLoad

SPEC = AdapterSpec(version="v", path=Path("v"), modules=(), num_params=0)
LOAD = AdapterLoad(version="v")


class FakeLocal:
    """Remembers calls; loads end, or hang, as the test says."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[AdapterEvent] = []
        self.hung: list[str] = []

    @property
    def num_pending_loads(self) -> int:
        return len(self.events)

    def overdue_adapters(self, deadline_s: float) -> list[str]:
        return self.hung

    def poll_adapters(self, timeout_s: float) -> list[AdapterEvent]:
        events, self.events = self.events, []
        return events

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.calls.append((method, *args))


class FakeWorkers:
    """Shards 1 and 2."""

    def __init__(self) -> None:
        self.pids = {1: 101, 2: 102}
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[tuple[int, AdapterEvent]] = []

    def call(self, method: str, *args: Any, only: int | None = None) -> None:
        self.calls.append((only, method, *args))

    @property
    def has_events(self) -> bool:
        return bool(self.events)

    def take_events(self, timeout_s: float) -> list[tuple[int, AdapterEvent]]:
        events, self.events = self.events, []
        return events


@pytest.fixture
def parts() -> tuple[ParallelExecutor, FakeLocal, FakeWorkers]:
    local, workers = FakeLocal(), FakeWorkers()
    executor = ParallelExecutor(
        local=cast(Executor, local), workers=cast(Workers, workers), release=lambda: None
    )
    return executor, local, workers


def test_an_adapter_is_there_when_the_last_shard_has_it(
    parts: tuple[ParallelExecutor, FakeLocal, FakeWorkers],
) -> None:
    executor, local, workers = parts
    executor.load_adapters([LoadOrder([SPEC], LOAD)])
    assert local.calls == [("load_adapters", [LoadOrder([SPEC], LOAD)])]
    assert workers.calls == [(None, "load_adapters", [LoadOrder([SPEC], LOAD)])]
    loaded = AdapterEvent(version="v")
    workers.events = [(2, loaded)]
    assert executor.poll_adapters(0.0) == []
    local.events = [loaded]
    assert executor.poll_adapters(0.0) == []
    assert executor.num_pending_loads == 1
    workers.events = [(1, loaded)]
    assert executor.poll_adapters(0.0) == [loaded]
    assert executor.num_pending_loads == 0


def test_an_adapter_that_one_shard_cannot_load_is_dropped_by_those_who_have_it(
    parts: tuple[ParallelExecutor, FakeLocal, FakeWorkers],
) -> None:
    executor, local, workers = parts
    executor.load_adapters([LoadOrder([SPEC], LOAD)])
    local.events = [AdapterEvent(version="v")]
    workers.events = [(1, AdapterEvent(version="v", error="gone")), (2, AdapterEvent(version="v"))]
    assert executor.poll_adapters(0.0) == [AdapterEvent(version="v", error="gone")]
    assert local.calls[1:] == [("evict_adapter", "v")]
    assert workers.calls[1:] == [(2, "evict_adapter", "v")]


def test_a_request_without_a_seed_gets_one_for_all_shards(
    parts: tuple[ParallelExecutor, FakeLocal, FakeWorkers],
) -> None:
    executor, local, workers = parts
    asked = EngineRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(), tenant="acme", priority=2
    )
    executor.begin(asked)
    [(_, request, grammar)] = local.calls
    assert request.params.seed is not None
    assert (request.tenant, request.priority) == ("acme", 2)
    assert workers.calls == [(None, "begin", request, grammar)]


def test_a_load_that_hangs_is_pending_again_when_it_has_ended_in_any_shard(
    parts: tuple[ParallelExecutor, FakeLocal, FakeWorkers],
) -> None:
    executor, local, workers = parts
    assert executor.overdue_adapters(60.0) == ()
    executor.load_adapters([LoadOrder([SPEC], LOAD)])
    assert executor.overdue_adapters(60.0) == []
    local.hung = ["v"]
    assert executor.overdue_adapters(60.0) == executor.overdue_adapters(60.0) == ["v"]
    assert workers.calls[1:] == [(None, "overdue_adapters", 59.0)], "workers are not asked in each step"
    assert executor.num_pending_loads == 0
    local.hung, local.events = [], [AdapterEvent(version="v")]
    assert executor.num_pending_loads == 1
    assert executor.poll_adapters(0.0) == []
    assert executor.num_pending_loads == 0
    assert executor.overdue_adapters(60.0) == ["v"], "the others do not have it yet"
    workers.events = [(1, AdapterEvent(version="v")), (2, AdapterEvent(version="v"))]
    assert executor.num_pending_loads == 1
    assert executor.poll_adapters(0.0) == [AdapterEvent(version="v")]
    assert executor.num_pending_loads == 0
    assert executor.overdue_adapters(60.0) == ()


def test_a_load_that_hangs_in_another_shard_alone_is_overdue(
    parts: tuple[ParallelExecutor, FakeLocal, FakeWorkers],
) -> None:
    executor, local, workers = parts
    executor.load_adapters([LoadOrder([SPEC], LOAD)])
    assert executor.overdue_adapters(0.0) == [], "this shard is still at it"
    local.events = [AdapterEvent(version="v")]
    workers.events = [(1, AdapterEvent(version="v"))]
    assert executor.poll_adapters(0.0) == []
    assert executor.overdue_adapters(3600.0) == []
    assert executor.overdue_adapters(0.0) == ["v"]
    assert executor.num_pending_loads == 0
    workers.events = [(2, AdapterEvent(version="v", error="gone"))]
    assert executor.poll_adapters(0.0) == [AdapterEvent(version="v", error="gone")]
    assert executor.num_pending_loads == 0
