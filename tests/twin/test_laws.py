"""Laws of any queue: nothing is lost, Little's law holds, and more load is not less served."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
from twins import own_twin, random_workload, slot_twin

from loraplex.core.cold_start import ColdStart
from loraplex.twin.outcome import Outcome
from loraplex.twin.simulator import Simulator
from loraplex.workload.jsonl import WorkloadRequest

TWINS: list[Callable[..., Simulator]] = [own_twin, slot_twin]
SIZES = [100, pytest.param(200, marks=pytest.mark.slow)]
"""Numbers of requests."""


def run(make: Callable[..., Simulator], workload: list[WorkloadRequest]) -> Outcome:
    simulator = make(num_blocks=90)
    outcome = simulator.run(workload)
    simulator.scheduler.check_integrity()
    assert not simulator.scheduler.has_work()
    return outcome


@pytest.mark.parametrize("make", TWINS)
@pytest.mark.parametrize("num_requests", SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_every_request_is_served_once_and_in_order(
    make: Callable[..., Simulator], num_requests: int, seed: int
) -> None:
    workload = random_workload(seed, num_requests=num_requests)
    outcome = run(make, workload)
    assert [each.request for each in outcome.requests] == workload
    for each in outcome.requests:
        assert each.first_token_s is not None
        assert each.finish_s is not None
        assert each.request.arrival_s < each.first_token_s <= each.finish_s <= outcome.duration_s


@pytest.mark.parametrize("make", TWINS)
@pytest.mark.parametrize("num_requests", SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_conserved(make: Callable[..., Simulator], num_requests: int, seed: int) -> None:
    workload = random_workload(seed, num_requests=num_requests)
    outcome = run(make, workload)
    summary = outcome.summary()
    assert summary["num_served"] == len(workload)
    served = summary["output_tok_s"] * outcome.duration_s
    assert served == pytest.approx(sum(each.output_tokens for each in workload))
    assert summary["input_tok_s"] * outcome.duration_s == pytest.approx(
        sum(each.prompt_tokens for each in workload)
    )
    # Every token but a request's first comes some time after another, and of a leap as many as it has steps.
    num_gaps = sum(num_steps * num_tokens for _, _, num_steps, num_tokens in outcome.gaps)
    assert num_gaps == sum(each.output_tokens - 1 for each in workload)


@pytest.mark.parametrize("make", [own_twin, slot_twin, partial(own_twin, ahead=True)])
@pytest.mark.parametrize("rps", [0.5, 10.0, 100.0])
@pytest.mark.parametrize("num_requests", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_littles_law(make: Callable[..., Simulator], rps: float, num_requests: int, seed: int) -> None:
    """Requests inside, on average, are the rate they come at times the time they stay; they are counted by
    steps, from idle to overload."""
    outcome = run(make, random_workload(seed, num_requests=num_requests, rps=rps))
    stays_s = sum((each.finish_s or 0.0) - each.request.arrival_s for each in outcome.requests)
    inside = outcome.mean_running + outcome.mean_waiting
    assert inside == pytest.approx(stays_s / outcome.duration_s, rel=1e-6)
    assert outcome.mean_waiting > -1e-9


@pytest.mark.parametrize("make", [own_twin, partial(own_twin, ahead=True)])
def test_an_engine_that_is_idle_runs_nothing(make: Callable[..., Simulator]) -> None:
    """Requests a minute apart: each runs from the step that reads its prompt to its end, and no longer."""
    workload = [
        WorkloadRequest(arrival_s=60.0 * (number + 1), prompt_tokens=50, output_tokens=40, adapter=0)
        for number in range(5)
    ]
    outcome = run(make, workload)
    answers_s = sum((each.finish_s or 0.0) - (each.first_token_s or 0.0) for each in outcome.requests)
    assert answers_s < outcome.mean_running * outcome.duration_s < 1.5 * answers_s
    summary = outcome.summary()
    assert summary["itl_s"]["p99"] < 0.1
    assert not summary["starved"]


@pytest.mark.parametrize("make", TWINS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_below_saturation_more_load_is_more_throughput(make: Callable[..., Simulator], seed: int) -> None:
    served = [
        run(make, random_workload(seed, num_requests=300, rps=rps)).summary()["output_tok_s"]
        for rps in (0.5, 1.0, 2.0, 4.0)
    ]
    assert served == sorted(served)
    assert served[-1] > 6 * served[0]


@pytest.mark.parametrize("make", TWINS)
def test_an_overloaded_twin_ends_and_says_so(make: Callable[..., Simulator]) -> None:
    simulator = make(num_blocks=40, max_running=2)
    outcome = simulator.run(random_workload(3, num_requests=2000, rps=100.0), until_s=20.0)
    summary = outcome.summary()
    assert outcome.duration_s == 20.0
    assert summary["starved"]
    assert outcome.timeline().waiting[-1] > 1000
    assert 0 < summary["num_served"] < 2000


@pytest.mark.parametrize("make", TWINS)
@pytest.mark.parametrize("until_s", [math.inf, 5.0])
def test_a_short_run_that_keeps_up_is_not_starved(make: Callable[..., Simulator], until_s: float) -> None:
    """Though its last answers, or those under way when it is cut off, weigh much in it."""
    workload = random_workload(5, num_requests=8, rps=1.5)
    simulator = make(num_blocks=90)
    assert not simulator.run(workload, until_s).summary()["starved"]


def test_a_few_at_once_are_no_overload() -> None:
    workload = [
        WorkloadRequest(arrival_s=0.01 * number, prompt_tokens=20, output_tokens=80, adapter=0)
        for number in range(3)
    ]
    assert not own_twin(num_blocks=90).run(workload).summary()["starved"]


@pytest.mark.parametrize("make", TWINS)
@pytest.mark.parametrize("num_requests", SIZES)
def test_the_same_workload_ends_the_same(make: Callable[..., Simulator], num_requests: int) -> None:
    workload = random_workload(7, num_requests=num_requests)
    assert run(make, workload).summary() == run(make, workload).summary()


def test_what_is_loaded_for_others_does_not_keep_the_first_from_starting() -> None:
    """Its adapter is there, and all memory for its tokens goes to adapters of those behind it."""
    twin = own_twin(
        num_adapters=11,
        num_blocks=40,
        max_running=20,
        max_step_tokens=512,
        shared=True,
        cold_start=ColdStart.PIPELINED,
        ahead=True,
    )
    outcome = twin.run(random_workload(984787, num_adapters=11, rps=20.0), until_s=120.0)
    assert outcome.summary()["num_served"] == 60
