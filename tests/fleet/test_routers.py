"""Every router chooses the replica that an iteration over all replicas and their requests finds to be
best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from examples import examples
from fleet_views import (
    COSTS,
    ELSEWHERE_S,
    HOST_S,
    MEAN_TOKENS,
    RANKS,
    REQUESTS,
    Fleet,
    candidates_of,
    fleet_of,
    fleets,
    request_of,
    set_of,
    with_room,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.errors import CapacityError
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.plan import Plan
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.affinity import AffinityRouter
from loraplex.fleet.routers.auto import CROWDED, HEADROOM, SIMILAR, TOLERANCE, AutoRouter
from loraplex.fleet.routers.first_fit import FirstFitRouter
from loraplex.fleet.routers.most_idle import MostIdleRouter
from loraplex.fleet.routers.named import ROUTERS, router_named
from loraplex.fleet.routers.pending_time import PendingTimeRouter
from loraplex.fleet.routers.rank_aware import RankAwareRouter
from loraplex.fleet.routers.router import Turns
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.set_costs import PaddedSetCosts, RankSetCosts, RequestSets, SetSamples

Key = tuple[float, ...]
"""The lower, the better; the first number decides, then the second."""

FEW = settings(max_examples=examples(20, 40))


def best_of(fleet: Fleet, request: RoutedRequest, key: Callable[[int], Key]) -> list[int]:
    return best_among(candidates_of(fleet, request), key)


def best_among(replicas: Sequence[int], key: Callable[[int], Key]) -> list[int]:
    keys = {replica: key(replica) for replica in replicas}
    return [replica for replica, value in keys.items() if value == min(keys.values())]


# ---- each policy against its docstring


@FEW
@given(fleets(costs=COSTS), REQUESTS)
def test_rank_aware_slows_other_requests_down_least(fleet: Fleet, request: RoutedRequest) -> None:
    costs, slo_s = fleet.view.costs, fleet.view.slo_s

    def key(replica: int) -> Key:
        exists, queue = fleet.requests(replica), fleet.queue(replica)
        decode_s = costs.decode_s(set_of([*exists, request]))[0]
        # A prompt joins a step that runs anyway.
        queue_s, least_s = (
            costs.prefill_s(set_of(each))[0] for each in (queue, [request._replace(prompt_tokens=1)])
        )
        longer_s = costs.prefill_s(set_of([*queue, request]))[0]
        added_prefill_s = max(longer_s - max(queue_s, least_s), 0.0)
        added_decode_s = decode_s - costs.decode_s(set_of(exists))[0]
        breaks = slo_s is not None and decode_s > slo_s
        cost = added_prefill_s / MEAN_TOKENS + added_decode_s
        return (breaks, cost * len(exists), len(exists))

    candidates = with_room(fleet, request, candidates_of(fleet, request))
    assert RankAwareRouter().choose(request, fleet.view) in best_among(candidates, key)


@settings(max_examples=examples(100, 300))
@given(fleets(costs=COSTS), REQUESTS)
def test_auto_costs_the_fleet_least_near_the_adapter(fleet: Fleet, request: RoutedRequest) -> None:
    costs, load, slo_s, tiers = fleet.view.costs, fleet.view.load, fleet.view.slo_s, fleet.view.tiers
    adapter, plan, found, step_s = request.adapter, fleet.view.plan, {}, {}
    on_device, on_host = (
        (frozenset(), frozenset()) if adapter is None else (tiers.on_device(adapter), tiers.on_host(adapter))
    )
    # A plan says where an adapter is at home, but any replica may serve it.
    for replica in with_room(fleet, request, np.flatnonzero(load.accepts).tolist()):
        exists, queue = fleet.requests(replica), fleet.queue(replica)
        decode_s = costs.decode_s(set_of([*exists, request]))[0]
        queue_s, least_s = (
            costs.prefill_s(set_of(each))[0] for each in (queue, [request._replace(prompt_tokens=1)])
        )
        prefill_s = max(costs.prefill_s(set_of([*queue, request]))[0] - max(queue_s, least_s), 0.0)
        most = load.limits[replica].max_running
        load_s = 0.0 if adapter is None or replica in on_device else HOST_S
        load_s += 0.0 if adapter is None or replica in on_device | on_host else ELSEWHERE_S
        step_s[replica] = decode_s * (1 + max(len(exists) + 1 - most, 0) / most)
        own_s = step_s[replica] + (queue_s + load_s) / MEAN_TOKENS
        others_s = len(exists) * (prefill_s / MEAN_TOKENS + decode_s - costs.decode_s(set_of(exists))[0])
        found[replica] = (slo_s is not None and own_s > slo_s, own_s + others_s)
    allowed = {each: cost for each, (breaks, cost) in found.items() if not breaks} or {
        each: cost for each, (_, cost) in found.items()
    }
    cheapest_s = min(allowed.values())
    num_waiting = {each: len(fleet.queue(each)) for each in allowed}
    crowded = CROWDED if load.num_slots is None else 0.0
    # A replica whose cost is within rounding of the cheapest may count either way.
    similar, surely_similar = (
        [each for each, cost in allowed.items() if cost <= cheapest_s * (1 + SIMILAR) * sure]
        for sure in (1 + 1e-9, 1 - 1e-9)
    )
    near, surely_near = (
        {
            each
            for each, cost in allowed.items()
            if cost * (1 + crowded * max(num_waiting[each] - fewest, 0))
            <= cheapest_s * (1 + TOLERANCE) * sure
            if slo_s is None or step_s[each] <= HEADROOM * slo_s * sure
        }
        for sure, fewest in (
            (1 + 1e-9, min(num_waiting[each] for each in surely_similar)),
            (1 - 1e-9, min(num_waiting[each] for each in similar)),
        )
    )
    chosen = AutoRouter().choose(request, fleet.view)
    planned = frozenset() if plan is None or adapter is None else frozenset(plan.replicas[adapter])
    # If engines have slots, each is planned for an adapter.
    meant = frozenset() if load.num_slots is None else planned & on_device
    for homes in (meant, on_device, on_host, planned):
        if surely_near & homes:
            assert chosen in near & homes
            assert num_waiting[chosen] <= min(num_waiting[each] for each in surely_near & homes)
            return
        if near & homes:
            return
    assert chosen in similar
    assert num_waiting[chosen] <= min(num_waiting[each] for each in surely_similar)


@pytest.mark.parametrize(("max_adapters", "expected"), [(2, {2}), (None, {0, 2})])
def test_auto_leaves_slots_to_those_that_the_plan_means_them_for(
    max_adapters: int | None, expected: set[int]
) -> None:
    limits = ReplicaLimits(max_running=8, kv_tokens=4096, max_adapters=max_adapters)
    plan = Plan.of_homes(np.full(len(RANKS), 2))
    fleet, router = fleet_of(3, limits=[limits] * 3, plan=plan), AutoRouter()
    for replica in (0, 2):
        fleet.view.tiers.loaded(replica, 1)
    assert {router.choose(request_of(1), fleet.view) for _ in range(4)} == expected


def test_auto_takes_turns_where_replicas_are_about_as_good() -> None:
    """Otherwise all prompts would interrupt the cheapest one."""
    fleet, router = fleet_of(3, costs=COSTS["steps"]), AutoRouter()
    for replica, number in enumerate((4, 5, 5)):
        for _ in range(number):
            fleet.send(request_of(None), replica, is_running=True)
    assert sorted(router.choose(request_of(None), fleet.view) for _ in range(3)) == [0, 1, 2]
    fleet.send(request_of(None), 0)
    assert {router.choose(request_of(None), fleet.view) for _ in range(3)} == {1, 2}, "a prompt waits at 0"


def test_auto_leaves_an_adapter_where_too_many_prompts_wait() -> None:
    """Each of them would delay the requests that decode there."""
    limits = ReplicaLimits(max_running=16, kv_tokens=4096)
    fleet, router = fleet_of(3, costs=COSTS["steps"], limits=[limits] * 3), AutoRouter()
    for replica in range(3):
        for _ in range(8):
            fleet.send(request_of(None), replica, is_running=True)
    fleet.view.tiers.loaded(0, 1)
    chosen = []
    for _ in range(4):
        chosen.append(router.choose(request_of(1), fleet.view))
        fleet.send(request_of(None), 0)
    assert chosen[0] == 0
    assert chosen[-1] != 0


@FEW
@given(fleets(), REQUESTS)
def test_most_idle_has_the_fewest_requests(fleet: Fleet, request: RoutedRequest) -> None:
    expected = best_of(fleet, request, lambda replica: (len(fleet.requests(replica)),))
    assert MostIdleRouter().choose(request, fleet.view) in expected


@FEW
@given(fleets(costs=COSTS), REQUESTS)
def test_pending_time_begins_soonest(fleet: Fleet, request: RoutedRequest) -> None:
    costs, load, tiers = fleet.view.costs, fleet.view.load, fleet.view.tiers

    def load_s(replica: int) -> float:
        if request.adapter is None or replica in tiers.on_device(request.adapter):
            return 0.0
        return HOST_S if replica in tiers.on_host(request.adapter) else HOST_S + ELSEWHERE_S

    def key(replica: int) -> Key:
        exists, most = fleet.requests(replica), load.limits[replica].max_running
        too_many = max(len(exists) + 1 - most, 0)
        answer_s = MEAN_TOKENS * costs.decode_s(set_of(exists).at_most(np.full(1, most)))[0]
        waits_s = costs.prefill_s(set_of(fleet.queue(replica)))[0] + answer_s * too_many / most
        return (waits_s + load_s(replica), len(exists))

    assert PendingTimeRouter().choose(request, fleet.view) in best_of(fleet, request, key)


@FEW
@given(fleets(), REQUESTS, st.integers(1, 4))
def test_first_fit_takes_the_first_with_room(fleet: Fleet, request: RoutedRequest, max_batch: int) -> None:
    def has_room(replica: int) -> bool:
        limits, requests = fleet.view.load.limits[replica], fleet.requests(replica)
        kv_tokens = sum(each.prompt_tokens + MEAN_TOKENS for each in [*requests, request])
        return len(requests) < min(max_batch, limits.max_running) and kv_tokens <= limits.kv_tokens

    fitting = [replica for replica in candidates_of(fleet, request) if has_room(replica)]
    idle = best_of(fleet, request, lambda replica: (len(fleet.requests(replica)),))
    chosen = FirstFitRouter(max_batch).choose(request, fleet.view)
    assert chosen == fitting[0] if fitting else chosen in idle


@FEW
@given(fleets(), REQUESTS)
def test_affinity_adds_up_three_scores(fleet: Fleet, request: RoutedRequest) -> None:
    queues = [len(fleet.queue(replica)) for replica in candidates_of(fleet, request)]

    def adapter_score(replica: int) -> float:
        if request.adapter is None:
            return 0.0
        here = [each for each in fleet.sent if each.replica == replica and each.request.adapter is not None]
        mine = [each for each in here if each.request.adapter == request.adapter]
        most = fleet.view.load.limits[replica].max_adapters
        if any(each.is_running for each in mine):
            return 1.0
        if most is None or len({each.request.adapter for each in here}) < most:
            return 0.8
        return 0.6 if mine else 0.0

    def key(replica: int) -> Key:
        # Rounded, because the order in which three fractions are added does not matter.
        queue_score = (max(queues) - len(fleet.queue(replica))) / max(max(queues) - min(queues), 1)
        kv_tokens = sum(each.prompt_tokens + MEAN_TOKENS for each in fleet.requests(replica))
        kv_score = 1 - min(kv_tokens / fleet.view.load.limits[replica].kv_tokens, 1)
        return (-round(adapter_score(replica) + queue_score + kv_score, 9),)

    assert AffinityRouter().choose(request, fleet.view) in best_of(fleet, request, key)


# ---- all of them


@settings(max_examples=examples(80, 200))
@given(fleets(costs=COSTS), st.lists(REQUESTS, min_size=1, max_size=5), st.sampled_from(sorted(ROUTERS)))
def test_looking_changes_nothing_and_one_seed_has_one_result(
    fleet: Fleet, requests: list[RoutedRequest], name: str
) -> None:
    before = fleet.snapshot()
    first, second = router_named(name, 3), router_named(name, 3)
    choices = [first.choose(each, fleet.view) for each in requests]
    assert choices == [second.choose(each, fleet.view) for each in requests]
    assert fleet.snapshot() == before
    fleet.view.load.check_integrity()
    for request, chosen in zip(requests, choices, strict=True):
        assert type(chosen) is int
        # `auto` may leave the plan.
        accepting = np.flatnonzero(fleet.view.load.accepts).tolist()
        assert chosen in (accepting if name == "auto" else candidates_of(fleet, request))


@pytest.mark.parametrize("name", ROUTERS)
def test_all_replicas_down_is_said_in_words(name: str) -> None:
    fleet = fleet_of(2, down=[0, 1])
    with pytest.raises(CapacityError, match="no replica of the fleet accepts requests now; wait"):
        router_named(name).choose(request_of(0), fleet.view)


@pytest.mark.parametrize("name", sorted(set(ROUTERS) - {"first-fit", "rendezvous"}))
def test_every_replica_gets_its_turn_among_equals(name: str) -> None:
    """First-fit and rendezvous hashing have their own fixed order."""
    fleet, router = fleet_of(5, down=[2]), router_named(name)
    chosen = Counter(router.choose(request_of(0), fleet.view) for _ in range(400))
    assert set(chosen) == {0, 1, 3, 4}
    least = 70 if "random" in name else 100
    assert min(chosen.values()) >= least


@pytest.mark.parametrize("name", ["round-robin", "most-idle", "rank-aware", "pending-time", "affinity"])
def test_adapters_on_different_replicas_do_not_take_each_others_turns(name: str) -> None:
    plan = Plan.with_equal_shares([[0, 1], [2, 3], *[[0]] * 6])
    fleet, router = fleet_of(4, plan=plan), router_named(name)
    chosen = Counter(router.choose(request_of(number % 2), fleet.view) for number in range(40))
    assert chosen == {0: 10, 1: 10, 2: 10, 3: 10}


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=60))
def test_no_replica_is_passed_over_for_longer_than_all_others_take(rounds: list[set[int]]) -> None:
    """This holds for any candidates: a replica that is among the equals of six picks is picked by then."""
    turns, passed = Turns(), Counter[int]()
    for candidates in rounds:
        chosen = turns.pick(np.array(sorted(candidates)))
        assert chosen in candidates
        passed.update(candidates - {chosen})
        passed[chosen] = 0
        assert max(passed.values()) < 6


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=8))
def test_costs_decide_one_after_the_other(costs: list[tuple[int, int, int]]) -> None:
    candidates = np.arange(len(costs)) * 2 + 1
    columns = [np.array(column) for column in zip(*costs, strict=True)]
    best = {int(candidates[place]) for place, cost in enumerate(costs) if cost == min(costs)}
    turns = Turns()
    assert {turns.pick(candidates, *columns) for _ in range(len(best))} == best


def test_a_burst_spreads_before_anything_has_started() -> None:
    """Requests count from the moment they are sent."""
    for name in ("most-idle", "rank-aware", "pending-time"):
        fleet, router = fleet_of(4), router_named(name)
        for number in range(8):
            fleet.send(request_of(number), router.choose(request_of(number), fleet.view))
        assert fleet.view.load.everything.num_requests.tolist() == [2, 2, 2, 2], name


@pytest.mark.parametrize("name", ["rank-aware", "auto"])
def test_a_replica_without_kv_memory_is_chosen_only_if_all_are(name: str) -> None:
    """A long prompt fills a replica that would be the cheapest: the other one has more requests."""
    fleet = fleet_of(2, limits=[ReplicaLimits(max_running=8, kv_tokens=4096)] * 2)
    fleet.send(request_of(0, 3900), 0, is_running=True)
    for _ in range(6):
        fleet.send(request_of(0, 64), 1, is_running=True)
    assert router_named(name).choose(request_of(0, 64), fleet.view) == 1
    assert router_named(name).choose(request_of(0, 4000), fleet.view) == 0


def test_rank_aware_counts_an_adapter_once() -> None:
    """Among requests of the same rank and length: where the adapter is in flight, the step has no additional
    one."""
    fleet = fleet_of(2, costs=COSTS["steps"])
    for adapter, replica in ((0, 0), (4, 1)):
        fleet.send(request_of(adapter), replica, is_running=True)
    assert {RankAwareRouter().choose(request_of(4), fleet.view) for _ in range(3)} == {1}
    assert {RankAwareRouter().choose(request_of(0), fleet.view) for _ in range(3)} == {0}


# ---- CaraServe's toy example


def toy_choices(
    form: type[PaddedSetCosts | RankSetCosts], measured_ms: list[float], slo_ms: float | None
) -> set[int]:
    """Return which of two servers gets a request of rank 64: server 1 (0 here) has 24 requests of rank 32,
    server 2 has 16 of rank 64. Eq. 2 is fitted to the latencies of both in the figure."""
    columns = [[24, 16], [24 * 32, 16 * 64], [32, 64], [24, 16], [24, 16], [24, 16]]
    sets = RequestSets(*(np.array(column) for column in columns))
    costs = form.fit(
        SetSamples(sets, np.array(measured_ms) / 1e3), SetSamples(sets, np.ones(2)), by_request=False
    )
    load = FleetLoad([ReplicaLimits(max_running=64, kv_tokens=1 << 20)] * 2)
    for server, rank, number in ((0, 32, 24), (1, 64, 16)):
        for adapter in range(number):
            load.sent((server, adapter), RoutedRequest(adapter, rank, 1), server)
            load.first_token((server, adapter))
    view = fleet_of().view
    view = FleetView(
        load=load,
        tiers=AdapterTiers(),
        costs=costs,
        moves=view.moves,
        slo_s=None if slo_ms is None else slo_ms / 1e3,
    )
    router = RankAwareRouter()
    return {router.choose(RoutedRequest(99, 64, 1), view) for _ in range(4)}


BGMV, MBGMV = (PaddedSetCosts, [34.8, 35.8]), (RankSetCosts, [35.3, 35.9])


@pytest.mark.parametrize(
    ("kernels", "slo_ms", "server"),
    [
        (BGMV, 36.1, 1),  # 38.05 and 36.05 ms: server 1 breaks it
        (MBGMV, 36.0, 0),  # 35.45 and 36.05 ms: server 2 breaks it
        (BGMV, 36.0, 1),  # both break it: the cheaper, 0.25 ms x 16 against 3.25 ms x 24
        (MBGMV, None, 1),  # 0.15 ms each: x 16 against x 24
        (BGMV, None, 1),
        (MBGMV, 36.1, 1),
        (MBGMV, 35.4, 1),
    ],
)
def test_the_toy_example_of_caraserve(
    kernels: tuple[type[PaddedSetCosts | RankSetCosts], list[float]], slo_ms: float | None, server: int
) -> None:
    assert toy_choices(*kernels, slo_ms) == {server}
