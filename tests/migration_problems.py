"""Migration problems for tests: by hand, by hypothesis and at random, with costs in plain Python."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from loraplex.fleet.migration.columns import TOTAL_WEIGHT
from loraplex.fleet.migration.problem import (
    MigrationAdapter,
    MigrationCosts,
    MigrationProblem,
    MigrationReplica,
    MigrationRequest,
)
from loraplex.perf.line import Line

PREFILL = Line(latency_s=0.002, unit_s=2e-5)


def request(
    request_id: int, replica: int, *, adapter: int | None = None, tokens: int = 100, seconds: float = 1.0
):
    return MigrationRequest(
        request_id=request_id, adapter=adapter, replica=replica, kv_tokens=tokens, expected_s=seconds
    )


def costs(**changed: float) -> MigrationCosts:
    return MigrationCosts(prefill=PREFILL, **{"swap_s_per_token": 1e-5, **changed})


def replicas(num: int, **fields) -> tuple[MigrationReplica, ...]:
    return tuple(
        MigrationReplica(replica=each, **{"kv_capacity_tokens": 100_000, **fields}) for each in range(num)
    )


@st.composite
def tiny_problems(draw: st.DrawFn) -> MigrationProblem:
    """Problems whose placements can all be tried: limits of every kind, some of them too tight to be met."""
    num_replicas, num_adapters = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    some_adapters = st.frozensets(st.integers(0, num_adapters - 1)) if num_adapters else st.just(frozenset())
    held = [
        MigrationReplica(
            replica=10 + index,
            kv_capacity_tokens=draw(st.integers(1, 12)),
            host_kv_tokens=draw(st.sampled_from([None, None, 0, 5])),
            adapters=draw(some_adapters),
            max_adapters=draw(st.sampled_from([None, 1, 2])),
            gives=draw(st.integers(0, 3)) > 0,
            receives=draw(st.integers(0, 3)) > 0,
        )
        for index in range(num_replicas)
    ]
    adapter = st.none() | st.integers(0, num_adapters - 1) if num_adapters else st.none()
    requests = [
        MigrationRequest(
            request_id=index,
            adapter=draw(adapter),
            replica=10 + draw(st.integers(0, num_replicas - 1)),
            kv_tokens=draw(st.integers(0, 6)),
            expected_s=draw(st.integers(0, 20)) / 4,
            stays=draw(st.integers(0, 3)) == 0,
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    adapters = [
        MigrationAdapter(adapter=each, load_s=draw(st.integers(0, 8)) / 4, kv_tokens=draw(st.integers(0, 3)))
        for each in range(num_adapters)
    ]
    prices = MigrationCosts(
        prefill=Line(latency_s=draw(st.integers(0, 2)) / 8, unit_s=draw(st.integers(0, 2)) / 8),
        swap_s_per_token=draw(st.integers(0, 4)) / 4,
        gamma=draw(st.sampled_from([1.0, 1.25])),
        eta_s=draw(st.integers(0, 2)) / 4,
    )
    return MigrationProblem(
        replicas=tuple(held), requests=tuple(requests), adapters=tuple(adapters), costs=prices
    )


def large_problem(seed: int, *, num_replicas: int = 8, num_requests: int = 500, num_adapters: int = 32):
    """The first half of the replicas has most of the requests, which may go to the other half."""
    rng = random.Random(seed)
    half = num_replicas // 2
    requests = []
    for index in range(num_requests):
        replica = rng.randrange(half) if rng.random() < 0.7 else rng.randrange(half, num_replicas)
        adapter = min(int(rng.paretovariate(0.9)) - 1, num_adapters - 1)
        requests.append(
            request(
                index,
                replica,
                adapter=adapter,
                tokens=rng.randrange(50, 2000),
                seconds=rng.expovariate(10),
            )
        )
    return MigrationProblem(
        replicas=tuple(
            MigrationReplica(
                replica=each,
                kv_capacity_tokens=80_000,
                adapters=frozenset(one.adapter for one in requests if one.replica == each),
                gives=each < half,
                receives=each >= half,
            )
            for each in range(num_replicas)
        ),
        requests=tuple(requests),
        adapters=tuple(MigrationAdapter(adapter=each, load_s=0.02) for each in range(num_adapters)),
        costs=costs(gamma=1.02),
    )


def all_placements(problem: MigrationProblem) -> Iterator[tuple[int, ...]]:
    """Every placement in which requests are where they may be; a place is a position in problem.replicas."""
    choices = []
    for one in problem.requests:
        [source] = [each for each in problem.replicas if each.replica == one.replica]
        choices.append(
            [
                place
                for place, each in enumerate(problem.replicas)
                if each is source or (source.gives and each.receives and not one.stays)
            ]
        )
    for placement in itertools.product(*choices):
        if all(
            len(_adapters_on(problem, placement, place)) <= _limit(problem, place)
            for place in range(len(problem.replicas))
        ):
            yield placement


def relaxed_objective(problem: MigrationProblem, placement: Sequence[int]) -> float:
    """The objective of a placement whose memory beyond a capacity is swapped token by token."""
    swapped = []
    for place, replica in enumerate(problem.replicas):
        tokens = sum(one.kv_tokens for one in _requests_on(problem, placement, place))
        beyond = tokens + _adapter_tokens(problem, placement, place) - replica.kv_capacity_tokens
        swapped.append(max(beyond, 0))
    return _objective(problem, placement, swapped)


def exact_objective(problem: MigrationProblem, placement: Sequence[int]) -> float:
    """The objective of a placement that swaps whole requests as well as can be; infinite if none fits."""
    swapped = [
        _fewest_swapped(problem, placement, place, replica) for place, replica in enumerate(problem.replicas)
    ]
    return _objective(problem, placement, swapped)


def best_exact_objective(problem: MigrationProblem) -> float:
    return min(exact_objective(problem, placement) for placement in all_placements(problem))


def stay_placement(problem: MigrationProblem) -> tuple[int, ...]:
    place = {each.replica: index for index, each in enumerate(problem.replicas)}
    return tuple(place[one.replica] for one in problem.requests)


def _objective(problem: MigrationProblem, placement: Sequence[int], swapped_tokens: Sequence[float]) -> float:
    run_s = []
    for place, replica in enumerate(problem.replicas):
        seconds = problem.costs.swap_s_per_token * swapped_tokens[place] if swapped_tokens[place] else 0.0
        for one in _requests_on(problem, placement, place):
            stays = one.replica == replica.replica
            prefill_s = problem.costs.prefill.seconds(one.kv_tokens)
            seconds += one.expected_s if stays else problem.costs.gamma * one.expected_s + prefill_s
        for adapter in _adapters_on(problem, placement, place):
            seconds += problem.costs.eta_s
            seconds += 0.0 if adapter in replica.adapters else problem.adapters[adapter].load_s
        run_s.append(seconds if swapped_tokens[place] < math.inf else math.inf)
    return max(run_s) + TOTAL_WEIGHT * sum(run_s)


def _fewest_swapped(
    problem: MigrationProblem, placement: Sequence[int], place: int, replica: MigrationReplica
) -> float:
    tokens = [one.kv_tokens for one in _requests_on(problem, placement, place)]
    room = replica.kv_capacity_tokens - _adapter_tokens(problem, placement, place)
    host_room = math.inf if replica.host_kv_tokens is None else replica.host_kv_tokens
    fitting = [
        host
        for swapped in itertools.product([False, True], repeat=len(tokens))
        if (host := sum(itertools.compress(tokens, swapped))) <= host_room and sum(tokens) - host <= room
    ]
    return min(fitting, default=math.inf)


def _requests_on(problem: MigrationProblem, placement: Sequence[int], place: int) -> list[MigrationRequest]:
    return [one for one, at in zip(problem.requests, placement, strict=True) if at == place]


def _adapters_on(problem: MigrationProblem, placement: Sequence[int], place: int) -> set[int]:
    return {one.adapter for one in _requests_on(problem, placement, place) if one.adapter is not None}


def _adapter_tokens(problem: MigrationProblem, placement: Sequence[int], place: int) -> int:
    return sum(problem.adapters[each].kv_tokens for each in _adapters_on(problem, placement, place))


def _limit(problem: MigrationProblem, place: int) -> float:
    most = problem.replicas[place].max_adapters
    return math.inf if most is None else max(most, len(_adapters_on(problem, stay_placement(problem), place)))
