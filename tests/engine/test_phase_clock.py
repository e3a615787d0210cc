"""Times that an engine reports of a traced request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.phase_clock import PhaseClock
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, Chunk, StepPlan


class Watch:
    """A clock that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def clock(watch: Watch) -> PhaseClock:
    return PhaseClock(watch)


@pytest.fixture
def at(watch: Watch) -> Callable[[float], None]:
    def move(now_s: float) -> None:
        watch.now_s = now_s

    return move


def request(request_id: str, adapter: str | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=[1], params=SamplingParams(), adapter=adapter
    )


def step_with(*request_ids: str) -> StepPlan:
    return StepPlan(chunks=tuple(Chunk(each, None, 0, [1], [], True) for each in request_ids))


def test_times_count_back_from_the_first_token(clock: PhaseClock, at: Callable[[float], None]) -> None:
    at(10)
    clock.queued(request("a", "v"))
    clock.queued(request("b"))
    at(11)
    clock.decided(StepPlan(adapter_reads=(AdapterRead("v", 0),)))
    at(13)
    clock.loaded({"v"})
    clock.decided(StepPlan(adapter_loads=(AdapterLoad("v"),)))
    at(14)
    clock.loaded({"v", "other"})
    clock.decided(step_with("a"))
    at(15)
    clock.decided(step_with("a", "b"))
    at(16)
    times = clock.take("a")
    assert times is not None
    assert (times.queued_s, times.load_begun_s, times.load_ended_s, times.started_s) == (6, 5, 2, 2)
    assert clock.take("a") is None, "reported once"
    times = clock.take("b")
    assert times is not None
    assert (times.queued_s, times.load_begun_s, times.load_ended_s, times.started_s) == (6, None, None, 1)
    assert not clock


def test_a_load_that_was_under_way_counts_from_the_requests_arrival(
    clock: PhaseClock, at: Callable[[float], None]
) -> None:
    clock.decided(StepPlan(adapter_loads=(AdapterLoad("v"),)))
    at(2)
    clock.queued(request("a", "v"))
    at(5)
    clock.loaded({"v"})
    at(6)
    times = clock.take("a")
    assert times is not None
    assert (times.load_begun_s, times.load_ended_s, times.started_s) == (4, 1, None)


def test_a_load_that_outlasts_the_first_token_has_no_end(
    clock: PhaseClock, at: Callable[[float], None]
) -> None:
    """CPU workers compute meanwhile."""
    clock.queued(request("a", "v"))
    clock.decided(step_with("a")._replace(adapter_loads=(AdapterLoad("v"),)))
    at(1)
    times = clock.take("a")
    assert times is not None
    assert (times.load_begun_s, times.load_ended_s) == (1, None)


def test_what_is_forgotten_leaves_nothing(clock: PhaseClock) -> None:
    assert not clock
    clock.queued(request("a"))
    assert clock
    clock.forget("a")
    assert not clock
    assert clock.take("a") is None
