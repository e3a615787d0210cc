"""Requests whose adapters come by way of the host's memory: who is read when, and who fails with whom."""

from __future__ import annotations

import pytest

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.plan import StepPlan
from loraplex.scheduling.scheduler import Scheduler

PAGE = 4096


def scheduler_of(
    *,
    host_pages: int,
    cold_start: ColdStart = ColdStart.OVERLAP,
    num_pages: int = 60,
    max_model_len: int = 100,
    **sizes: int,
) -> Scheduler:
    arena = Arena(num_pages=num_pages, page_bytes=PAGE, block_size=4, host_bytes=host_pages * PAGE)
    scheduler = Scheduler(SchedulerConfig(max_model_len=max_model_len, cold_start=cold_start), arena)
    for version, size in sizes.items():
        scheduler.adapters.add(version, size * PAGE)
    return scheduler


def ask(scheduler: Scheduler, request_id: str, adapter: str | None, *, tokens: int = 2) -> None:
    scheduler.add(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=[1, 2, 3],
            params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            adapter=adapter,
        )
    )


def land(scheduler: Scheduler, plan: StepPlan) -> set[str]:
    """Who ended."""
    if not plan.chunks:
        return set()
    updates = scheduler.update(plan, {c.request_id: 5 for c in plan.chunks if c.samples})
    return {update.request_id for update in updates if update.finish_reason is not None}


def test_a_large_adapter_is_read_although_small_ones_keep_coming() -> None:
    # Each of the small ones is asked for once, so that there is always one to read.
    small = {f"small{number}": 3 for number in range(60)}
    scheduler = scheduler_of(host_pages=10, large=8, **small)
    for name in ("small0", "small1", "large"):
        ask(scheduler, name, name)
    reading: list[str] = []
    ended: set[str] = set()
    for turn in range(400):
        plan = scheduler.schedule()
        scheduler.check_integrity()
        reading += [read.version for read in plan.adapter_reads]
        for load in plan.adapter_loads:
            scheduler.adapter_loaded(load.version)
        ended |= land(scheduler, plan)
        if reading and turn % 3 == 0:  # reads end one at a time
            scheduler.adapter_read(reading.pop(0))
        if 2 + turn < len(small):
            ask(scheduler, f"small{2 + turn}", f"small{2 + turn}")
        if "large" in ended:
            break
    assert "large" in ended
    assert len(ended) < len(small) // 2, "it had to wait for most of those who came after it"


def test_a_read_that_fails_does_not_touch_those_who_have_the_adapter() -> None:
    scheduler = scheduler_of(host_pages=4, a=2, b=4)
    ask(scheduler, "runs", "a", tokens=50)
    scheduler.adapter_read(scheduler.schedule().adapter_reads[0].version)
    scheduler.adapter_loaded(scheduler.schedule().adapter_loads[0].version)
    land(scheduler, scheduler.schedule())
    scheduler.adapters.stage_ahead("b")
    land(scheduler, plan := scheduler.schedule())
    assert not plan.adapter_reads, "there is no free memory for it"
    ask(scheduler, "pushes a out of the host", "b")
    land(scheduler, plan := scheduler.schedule())
    assert [read.version for read in plan.adapter_reads] == ["b"]
    scheduler.adapter_read("b", "its file is gone")
    assert [failure.request_id for failure in scheduler.take_failures()] == ["pushes a out of the host"]
    scheduler.adapters.stage_ahead("a")
    land(scheduler, plan := scheduler.schedule())
    assert [read.version for read in plan.adapter_reads] == ["a"]
    scheduler.adapter_read("a", "its file is gone")
    assert scheduler.take_failures() == []
    assert [chunk.request_id for chunk in scheduler.schedule().chunks] == ["runs"]


def test_a_cached_adapter_stays_also_if_a_request_brought_it_in() -> None:
    scheduler = scheduler_of(host_pages=40, cold_start=ColdStart.CACHED, a=4, b=4, c=4)
    for name in "cab":
        ask(scheduler, name, name)
    for _ in range(30):
        plan = scheduler.schedule()
        for read in plan.adapter_reads:
            scheduler.adapter_read(read.version)
        for load in plan.adapter_loads:
            scheduler.adapter_loaded(load.version)
        land(scheduler, plan)
        scheduler.check_integrity()
    assert not scheduler.has_work()
    assert scheduler._table.serving.resident == {"a", "b", "c"}
    assert scheduler._table.serving.idle.num_bytes == 0, "one of them could be evicted"


def test_cached_needs_no_more_room_beside_adapters_than_a_request() -> None:
    # The context is as long as all of the memory would hold.
    scheduler = scheduler_of(host_pages=40, cold_start=ColdStart.CACHED, num_pages=20, max_model_len=80)
    scheduler.adapters.add("a", 17 * PAGE)
    with pytest.raises(CapacityError, match="--cold-start cached needs"):
        scheduler.adapters.add("b", 2 * PAGE)


def test_on_demand_nobody_waits_for_what_nobody_asked_for() -> None:
    scheduler = scheduler_of(host_pages=40, cold_start=ColdStart.ON_DEMAND, a=4, b=4)
    scheduler.adapters.stage_ahead("a")
    ask(scheduler, "base", None, tokens=9)
    plan = scheduler.schedule()
    assert [read.version for read in plan.adapter_reads] == ["a"]
    assert plan.waits_for == frozenset()
    ask(scheduler, "b", "b")
    assert scheduler.schedule().waits_for == {"b"}
