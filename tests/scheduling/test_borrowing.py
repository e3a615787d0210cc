"""A tenant runs a bounded amount beyond its share while others use the engine."""

from __future__ import annotations

from collections import Counter

import pytest

from loraplex.core.due_places import DuePlaces
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.core.shape import ModelShape
from loraplex.core.tenants import TenantPolicy
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.drift import DriftWatch
from loraplex.perf.subject import Subject, shape_key
from loraplex.scheduling.borrowing import Borrowing
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.fair_share import FairShare, RequestCosts
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.step_features import decode_features
from loraplex.scheduling.work import StepWork

SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position=64,
)
COSTS = DriftWatch(
    default_cost_model(
        Subject(machine="one", device="cpu", model=shape_key(SHAPE), dtype="float32", num_layers=2),
        SHAPE,
        num_cores=2,
    )
)


def request_of(tenant: str, request_id: str = "r", output: int = 30) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        params=SamplingParams(max_tokens=output, ignore_eos=True),
        tenant=tenant,
    )


def sequences(**counts: int) -> list[RequestState]:
    return [RequestState(request_of(tenant)) for tenant, count in counts.items() for _ in range(count)]


def borrowing_of(bound: float | None = 0.0, costs: DriftWatch | None = None, **means: int) -> Borrowing:
    memory = SeparateMemory(num_blocks=100, block_size=4, adapter_bytes=0)
    fair = FairShare(RequestCosts(None, memory.table.known_bytes))
    fair.set_policies([TenantPolicy(name="big", share=3.0)])
    places = DuePlaces(fair.share)
    ask_for(places, 0.0, **means)
    return Borrowing(bound, fair, places, memory, costs)


def ask_for(places: DuePlaces, since_s: float, **counts: int) -> None:
    """Let tenants have so many requests, for long enough to be the mean, and decide who is bounded."""
    for tenant, count in counts.items():
        places.change(tenant, count, since_s)
    places.observe(since_s + 999.0)


@pytest.mark.parametrize(
    ("tenant", "num_running", "may"),
    [
        ("many", 4, True),  # as many as each of the others asks for
        ("many", 5, False),
        ("one", 40, True),  # it does not ask for more than its share
        ("stranger", 40, True),
    ],
)
def test_a_tenant_that_asks_for_too_much_runs_what_it_is_due(
    tenant: str, num_running: int, may: bool
) -> None:
    made = borrowing_of(many=100, one=5, other=5)
    assert made.may_run(RequestState(request_of(tenant)), sequences(**{tenant: num_running})) is may


def test_what_a_tenant_is_due_grows_with_its_share() -> None:
    made = borrowing_of(big=100, one=5)
    asked = RequestState(request_of("big"))
    assert made.may_run(asked, sequences(big=14))
    assert not made.may_run(asked, sequences(big=15))


def test_alone_it_runs_all_it_has() -> None:
    made = borrowing_of(many=100)
    assert made.may_run(RequestState(request_of("many")), sequences(many=60))


def test_more_runs_as_long_as_steps_stay_within_the_bound() -> None:
    running, asked = sequences(many=9, one=5), RequestState(request_of("many"))
    without_any = borrowing_of(0.0, COSTS, many=100, one=5)
    with_some = borrowing_of(10.0, COSTS, many=100, one=5)
    assert not without_any.may_run(asked, running)
    assert with_some.may_run(asked, running)


@pytest.mark.parametrize(("part", "may"), [(0.5, True), (1.01, False), (10.0, True)])
def test_nobody_borrows_what_makes_others_miss_their_time_per_token(part: float, may: bool) -> None:
    running, asked = sequences(many=9, one=5), RequestState(request_of("many"))
    num_bytes, step_s = (lambda version: 0), COSTS.model.step_s
    # With what it is due, five requests, and no more.
    due_s = step_s(decode_features(running[4:], num_bytes))
    for each in running[9:]:
        each.slo_tpt_s = part * due_s  # half: missed anyway
    made = borrowing_of(None, COSTS, many=100, one=5)
    assert made.may_run(asked, running) is may
    assert made.may_run(asked, running[:9]), "nobody has an objective"


def test_who_is_refused_what_it_asks_for_stays_bounded_until_it_asks_for_its_share() -> None:
    made = borrowing_of(many=100, one=5)
    asked, running = RequestState(request_of("many")), sequences(many=5)
    ask_for(made.places, 2000.0, many=-92)
    assert not made.may_run(asked, running)
    ask_for(made.places, 3000.0, many=-3)
    assert made.may_run(asked, running)
    ask_for(made.places, 4000.0, many=3)
    assert made.may_run(asked, running), "a burst"


def test_what_was_not_asked_for_during_a_pause_counts_as_a_burst() -> None:
    places = DuePlaces(lambda tenant: 1.0)
    ask_for(places, 0.0, a=1, b=1)
    places.change("a", 39, 2000.0)
    places.observe(2000.0)
    assert places.due("a") is None, "it has asked for one until now"
    places.observe(2010.0)
    assert places.due("a") == pytest.approx(1.0)
    places.change("a", -40, 2010.0)
    places.observe(2070.0)
    places.change("a", 40, 2070.0)
    places.observe(2070.0)
    assert places.due("a") is None, "it has asked for nothing for a minute"


def test_who_is_bounded_waits_behind_the_others_and_starves_nobody() -> None:
    config = SchedulerConfig(
        max_model_len=64, work=StepWork(max_tokens=64), max_running=40, prefetch_depth=4, max_borrowing=0.0
    )
    memory = SeparateMemory(num_blocks=400, block_size=4, adapter_bytes=0)
    scheduler = Scheduler(config, memory, COSTS, clock=Ticks())
    scheduler.add(request_of("one", "first"))
    ended: list[str] = []
    for number in range(300):
        if number < 100:
            scheduler.add(request_of("many", f"many{number}"))
        if number % 10 == 0 and number < 100:
            scheduler.add(request_of("one", f"one{number}"))
        plan = scheduler.schedule()
        if not plan.chunks:
            break
        updates = scheduler.update(plan, {each.request_id: 5 for each in plan.chunks if each.samples})
        ended += [each.request_id for each in updates if each.finish_reason is not None]
        scheduler.check_integrity()
        if 40 <= number < 100:
            waiting = Counter(each.request.tenant for each in scheduler._waiting)
            assert waiting["one"] == 0
            assert waiting["many"] > 0
    assert len(ended) == 111, "once the others have gone, all of it runs"


class Ticks:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 1.0
        return self._now_s
