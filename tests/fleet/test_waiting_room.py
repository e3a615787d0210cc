"""Whom a full server refuses first: by share, priority and objective."""

from __future__ import annotations

import pytest
from fleet_views import COSTS, fleet_of, request_of

from loraplex.core.tenants import BATCH_PRIORITY, NOBODY, Caller, TenantPolicy
from loraplex.fleet.admission import Admitted, Bounded, Forecast
from loraplex.fleet.first_token import forecast
from loraplex.fleet.load import ReplicaLimits
from loraplex.fleet.waiting_room import WaitingRoom

BUSY = Forecast(ttft_s=5.0, alone_s=1.0, is_idle=False)
A, B, BATCH = Caller(tenant="a"), Caller(tenant="b"), Caller(tenant="batch")
POLICIES = [
    TenantPolicy(name="a", share=1.0),
    TenantPolicy(name="b", share=3.0),
    TenantPolicy(name="batch", priority=1),
]


def room_of(*waiting: tuple[Caller, int, int], max_requests: int = 100) -> WaitingRoom:
    """Return a room with so many waiting requests of so many tokens."""
    room = WaitingRoom(max_requests)
    room.set_policies(POLICIES)
    for caller, count, num_tokens in waiting:
        room.enter(caller, count)
        room.encoded(caller, [num_tokens] * count)
    return room


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (A, 4000),  # all of its own: b has none that are due before
        (B, 400 / 3),  # one of its own, for which a is due a third of that
        (BATCH, 4000),  # everything
        (Caller(tenant="new", priority=5), 100),  # a is due as much as it asks for
    ],
)
def test_only_what_is_served_before_a_request_counts(caller: Caller, expected: float) -> None:
    room = room_of((A, 40, 100))
    part = room.before(caller, num_tokens=400 if caller is B else 100).part_before
    assert part == pytest.approx(expected / 4000)


def test_a_request_waits_for_those_of_its_tenant_with_a_lower_priority_alone() -> None:
    room = room_of((A, 10, 100), (Caller(tenant="a", priority=2), 30, 100))
    assert room.before(A).part_before == pytest.approx(0.25)
    assert room.before(Caller(tenant="a", priority=-1)).part_before == 0.0
    assert room.before(Caller(tenant="a", priority=2)).part_before == 1.0


def test_without_tenants_everything_is_before_a_request() -> None:
    room = WaitingRoom(100, 2.0)
    assert room.before(NOBODY) == Admitted(0, 0, 1.0)
    room.enter(NOBODY, 3)
    room.encoded(NOBODY, [10, 20])
    assert room.before(NOBODY, others=1, other_tokens=5) == Admitted(3, 35, 1.0)


def test_the_stricter_of_the_limits_holds() -> None:
    room = WaitingRoom(100, 4.0)
    room.set_policies([TenantPolicy(name="a", slo_ttft=2.0), TenantPolicy(name="b", slo_ttft=9.0)])
    assert room.limit_s(A) == (2.0, True)
    assert room.limit_s(B) == (4.0, False)
    assert room.limit_s(NOBODY) == (4.0, False)
    assert room.limit_s(Caller(tenant="b", slo_ttft_s=1.0)) == (1.0, True)
    verdict = room.judge(BUSY, A)
    assert verdict is not None
    assert verdict.retry_after_s == 3.0
    assert WaitingRoom(100).judge(BUSY, NOBODY) is None


def test_predictions_are_corrected_by_the_tenants_own_requests() -> None:
    room = room_of()
    room.set_policies([TenantPolicy(name="a", slo_ttft=8.0), TenantPolicy(name="b", slo_ttft=8.0)])
    for _ in range(9):
        room.came(BUSY, 10.0, A)  # twice what was predicted
        room.came(BUSY, 5.0, B)
    late, right = room.judge(BUSY, A), room.judge(BUSY, B)
    assert late is not None
    assert right is not None
    assert (late.seconds, right.seconds) == (pytest.approx(10.0), pytest.approx(5.0))
    assert right.retry_after_s is None
    room.set_policies(POLICIES)  # which keeps what was learned
    again = room.judge(BUSY, Caller(tenant="a", slo_ttft_s=8.0))
    assert again is not None
    assert again.seconds == pytest.approx(10.0)


def test_a_tenant_with_nothing_waiting_is_not_refused_for_what_was_once_slow() -> None:
    room = room_of()
    for _ in range(9):
        room.came(BUSY, 50.0, Caller(tenant="a", slo_ttft_s=8.0))
    caller = Caller(tenant="a", slo_ttft_s=8.0)
    first = room.judge(BUSY, caller)
    assert first is not None
    assert first.retry_after_s is None
    room.enter(caller, 1)
    room.encoded(caller, [5])
    second = room.judge(BUSY, caller)
    assert second is not None
    assert second.retry_after_s is not None


def test_an_idle_replica_refuses_nobody_whatever_the_objective() -> None:
    verdict = room_of().judge(BUSY._replace(is_idle=True), Caller(slo_ttft_s=0.1))
    assert verdict is not None
    assert verdict.retry_after_s is None


def test_no_tenant_takes_the_places_that_others_have_a_right_to() -> None:
    room = room_of(max_requests=100)  # 50 are reserved: 10 for a, 30 for b, 10 for batch
    assert room.has_place_for("a", 60)
    assert not room.has_place_for("a", 61)
    room.enter(A, 60)
    assert not room.has_place_for("a", 1)
    assert not room.has_place_for("stranger", 1)
    assert room.has_place_for("b", 30)
    assert not room.has_place_for("b", 31)
    room.enter(B, 30)
    assert room.has_place_for("batch", 10)
    room.leave(A, None)
    assert room.has_place_for("a", 1)


def test_one_tenant_alone_and_nobody_may_take_every_place() -> None:
    room = WaitingRoom(10)
    assert room.has_place_for("", 10)
    assert not room.has_place_for("", 11)
    room.set_policies([TenantPolicy(name="a")])
    assert room.has_place_for("a", 10)


def test_the_counts_are_back_at_nothing_when_everybody_has_left() -> None:
    room = room_of((A, 2, 10), (B, 1, 7))
    room.enter(A, 1)
    for caller, num_tokens in ((A, 10), (B, 7), (A, None), (A, 10)):
        room.leave(caller, num_tokens)
    assert (room.num_requests, room.num_encoded, room.num_tokens) == (0, 0, 0)
    assert room.has_place_for("b", 80)
    assert room.before(A).part_before == 1.0


def test_less_is_predicted_for_whoever_is_served_before_others() -> None:
    fleet, request = fleet_of(1), request_of(None, 50)
    for number in range(12):
        fleet.send(request_of(None, 100), 0, is_running=number < 4)
    times = [
        forecast(request, fleet.view, 0, admitted=Admitted(part_before=part), step_tokens=64).ttft_s
        for part in (0.0, 0.5, 1.0)
    ]
    assert times[0] < times[1] < times[2]


def test_lines_of_batches_are_before_no_live_request() -> None:
    lines = Caller(tenant="b", priority=BATCH_PRIORITY)
    room = room_of((lines, 10, 100), (A, 10, 100))
    assert room.before(A, num_tokens=100).part_before == pytest.approx(0.5)
    assert room.before(Caller(tenant="new"), num_tokens=100).part_before == pytest.approx(0.05)
    assert room.before(Caller(tenant="a", priority=BATCH_PRIORITY), num_tokens=9000).part_before == 1.0


def test_lines_of_batches_have_no_objectives() -> None:
    room = WaitingRoom(100, 2.0)
    room.set_policies([TenantPolicy(name="a", slo_ttft=1.0, slo_tpt=0.01)])
    assert not room.is_limited(Caller(tenant="a", priority=BATCH_PRIORITY, slo_ttft_s=0.1, slo_tpt_s=0.1))


# ---- tenants that may borrow only so much


def bounded_room(bound: float | None, *policies: TenantPolicy) -> WaitingRoom:
    """Return a room in which `many` asks for far more than `one`, and runs as much as it is due."""
    room = WaitingRoom(1000, max_borrowing=bound)
    room.set_policies(policies)
    for tenant, num_running, num_waiting in (("many", 5, 40), ("one", 5, 0)):
        caller = Caller(tenant=tenant)
        room.enter(caller, num_running + num_waiting)
        room.encoded(caller, [10] * (num_running + num_waiting))
        for _ in range(num_running):
            room.began(caller, 10)
    room.observe(1000.0)
    return room


def test_a_bounded_tenant_waits_for_its_own_requests_and_for_all_of_the_others() -> None:
    room = bounded_room(0.0)
    many, one = Caller(tenant="many"), Caller(tenant="one")
    assert room.before(many).bounded == Bounded("many", 45, 5.0, 0.0)
    assert room.before(one).bounded is None
    assert room.before(one, num_tokens=1000).part_before == 0.0
    room.enter(one, 4)
    room.encoded(one, [10] * 4)
    assert room.before(many, num_tokens=1).part_before == 1.0
    for _ in range(5):
        room.ended(one)
    for _ in range(4):
        room.leave(one, 10)
    room.observe(3000.0)
    assert room.before(many).bounded is None, "nobody else uses the engine"
    assert bounded_room(None).before(many).bounded is None


def test_an_objective_of_others_for_the_time_per_token_bounds_too() -> None:
    found = bounded_room(None, TenantPolicy(name="one", slo_tpt=0.02)).before(Caller(tenant="many")).bounded
    assert found == Bounded("many", 45, 5.0, None, (0.02,))


def test_a_tenant_at_its_bound_is_predicted_to_wait_for_a_place() -> None:
    limits = [ReplicaLimits(max_running=64, kv_tokens=1 << 20)]
    fleet, request = fleet_of(1, limits=limits, costs=COSTS["steps"]), request_of(None, 50)
    for number in range(40):
        fleet.send(request_of(None, 100), 0, is_running=number < 10)

    def ttft_s(bounded: Bounded | None) -> float:
        admitted = Admitted(part_before=0.0, bounded=bounded)
        return forecast(request, fleet.view, 0, admitted=admitted, step_tokens=64).ttft_s

    free_s = ttft_s(None)
    assert ttft_s(Bounded("many", 3, 5.0, 0.0)) == free_s
    waits_s = [ttft_s(Bounded("many", num_before, 5.0, 0.0)) for num_before in (8, 16, 32)]
    assert free_s < waits_s[0] < waits_s[1] < waits_s[2]
    assert ttft_s(Bounded("many", 32, 5.0, 100.0)) < waits_s[2], "a wide bound lets it run more"
    assert ttft_s(Bounded("many", 32, 5.0, None)) == free_s
    tpt_s = forecast(request, fleet.view, 0, admitted=Admitted(), step_tokens=64).tpt_s
    by_pace_s = [ttft_s(Bounded("many", 32, 5.0, None, (tpt_s * part / 100,))) for part in range(1, 200)]
    met = next(number for number, wait_s in enumerate(by_pace_s) if wait_s > free_s)
    assert met > 0
    assert set(by_pace_s[:met]) == {free_s}, "an objective that is missed anyway bounds nothing"
    assert by_pace_s[met] == waits_s[2], "one that is just met lets it run what it is due, and no more"
    assert by_pace_s[-1] < waits_s[2]


def wait_beyond_free_s(num_each: list[tuple[int, int]], replica: int, num_before: int) -> float:
    """Return how much longer a bounded tenant waits on a replica than one that is free. `num_each`: its
    requests, and those of others, that run on each replica."""
    limits = [ReplicaLimits(max_running=64, kv_tokens=1 << 20)] * len(num_each)
    fleet, request = fleet_of(len(num_each), limits=limits, costs=COSTS["steps"]), request_of(None, 50)
    for number, (own, others) in enumerate(num_each):
        for tenant in ["many"] * own + ["one"] * others:
            fleet.send(request_of(None, 100, tenant), number, is_running=True)
    bounded_s, free_s = (
        forecast(
            request, fleet.view, replica, admitted=Admitted(part_before=0.0, bounded=each), step_tokens=64
        ).ttft_s
        for each in (Bounded("many", num_before, 10.0, 0.0), None)
    )
    return bounded_s - free_s


def test_a_tenant_at_its_bound_waits_for_its_requests_on_the_replica_that_it_gets() -> None:
    """Each replica bounds it by what is there: were those of all replicas taken to be shared evenly, requests
    of the tenant would gather where the others have few, and the bound would be released elsewhere."""

    def wait_s(replica: int, num_before: int) -> float:
        return wait_beyond_free_s([(20, 4), (2, 36)], replica, num_before)

    assert wait_s(0, 22) > 0, "it is due one of its twenty there"
    assert wait_s(1, 22) == 0, "and nine there, of which it has two"
    assert 0 < wait_s(0, 11) < wait_s(0, 22), "half of them come after this one"
    assert wait_s(1, 60) > 0, "those not sent yet are shared evenly"


def test_nothing_bounds_a_tenant_where_nobody_else_is() -> None:
    """An engine bounds no tenant that uses it alone."""
    assert wait_beyond_free_s([(20, 0), (2, 40)], replica=0, num_before=22) == 0
    assert wait_beyond_free_s([(20, 1), (2, 39)], replica=0, num_before=22) > 0
    assert wait_beyond_free_s([(20, 0), (2, 0)], replica=0, num_before=22) > 0, "the others are not sent yet"


def test_objectives_of_running_requests_bound_whosever_they_are() -> None:
    """Those of an adapter are the requests' own: their tenant may have none."""
    room, many = bounded_room(None), Caller(tenant="many")
    own = Caller(tenant="one", slo_tpt_s=0.02)
    room.enter(own, 1)
    room.encoded(own, [10])
    assert room.before(many).bounded is None, "it waits"
    room.began(own, 10)
    assert room.before(many).bounded == Bounded("many", 45, 5.0, None, (0.02,))
    assert room.before(own).bounded is None
    room.ended(own)
    assert room.before(many).bounded is None


# ---- objectives for the time per token


def test_who_would_be_too_slow_is_refused_whatever_its_first_token() -> None:
    room = WaitingRoom(100)
    room.set_policies([TenantPolicy(name="a", slo_tpt=0.05), TenantPolicy(name="b")])
    slow = Forecast(ttft_s=0.1, alone_s=0.1, is_idle=False, tpt_s=0.06)
    found = room.judge(slow, A)
    assert found is not None
    assert (found.retry_after_s, found.seconds, found.limit_s, found.is_pace) == (1.0, 0.06, 0.05, True)
    assert room.judge(slow, B) is None
    assert room.judge(slow._replace(tpt_s=0.04), A) is None
    assert room.judge(slow._replace(is_idle=True), A) is None
    assert room.judge(slow, Caller(tenant="a", slo_tpt_s=0.07)) is None
    assert room.is_limited(A)
    assert not room.is_limited(B)


def test_predicted_times_per_token_are_corrected_and_that_is_unlearned() -> None:
    room = WaitingRoom(100)
    room.set_policies([TenantPolicy(name="a", slo_tpt=0.05)])
    fast = Forecast(ttft_s=0.1, alone_s=0.1, is_idle=False, tpt_s=0.03)
    for _ in range(9):
        room.paced(fast, 0.06, A)  # prompts of others come between
    assert room.judge(fast, A) is None, "of a tenant that has nothing here, one is tried"
    room.enter(A, 1)
    assert room.judge(fast, A) is None, "that one itself"
    room.encoded(A, [5])
    found = room.judge(fast, A)
    assert found is not None
    assert found.seconds == pytest.approx(0.06)
