"""The demand of the last half hour, and the page that shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fixtures import Api

from loraplex.core.clock import ManualClock
from loraplex.server.recent_demand import RecentDemand

HALF_HOUR_S = 1800.0


def test_requests_and_lengths_are_counted_by_adapter() -> None:
    clock = ManualClock()
    demand = RecentDemand(clock)
    demand.arrived("a", num_choices=1, num_prompt_tokens=10)
    demand.arrived("b", num_choices=3, num_prompt_tokens=30)
    demand.arrived(None, num_choices=2, num_prompt_tokens=999)
    demand.answered(num_choices=3, num_output_tokens=60)
    clock.advance(20.0)
    found = demand.measured()
    assert found.num_asked == {"a": 1, "b": 3}
    assert (found.num_asked_of_base, found.seconds) == (2, 20.0)
    assert (found.prompt_tokens, found.output_tokens) == (10.0, 20.0)
    demand.forget("b")
    assert demand.measured().num_asked == {"a": 1}
    assert demand.measured().prompt_tokens == 10.0


def test_each_answer_counts_with_its_prompt(make_api: Callable[..., Api]) -> None:
    api = make_api()
    body = {"model": "poet", "max_tokens": 4}
    prompts = ["one two three four", "five"]
    lengths = [api.post("/tokenize", {"prompt": each}).json()["count"] for each in prompts]
    assert api.post("/v1/completions", {**body, "prompt": prompts, "n": 3}).status_code == 200
    api.served.deps.metrics.clock.advance(1.0)
    found = api.get("/v1/demand").json()
    assert {row["name"]: row["requests"] for row in found["data"]} == {"pirate": 0, "poet": 6}
    assert found["prompt_tokens"] == pytest.approx(sum(lengths) / 2)
    assert found["output_tokens"] > 0
    alone = {**body, "prompt": prompts[0]}
    for _ in range(2):
        assert api.post("/v1/completions", alone).status_code == 200
    expected = (3 * sum(lengths) + 2 * lengths[0]) / 8
    assert api.get("/v1/demand").json()["prompt_tokens"] == pytest.approx(expected)


def test_nothing_is_known_before_the_first_request() -> None:
    found = RecentDemand(ManualClock()).measured()
    assert (found.num_asked, found.prompt_tokens, found.output_tokens) == ({}, None, None)


@given(st.lists(st.floats(0.0, 2000.0), max_size=60))
def test_what_is_older_than_half_an_hour_is_forgotten(pauses_s: list[float]) -> None:
    clock = ManualClock()
    demand = RecentDemand(clock)
    arrivals_s = []
    for pause_s in pauses_s:
        clock.advance(pause_s)
        demand.arrived("a", num_choices=1, num_prompt_tokens=1)
        arrivals_s.append(clock.now_s())
    found = demand.measured()
    assert min(clock.now_s(), HALF_HOUR_S - 60) <= found.seconds <= HALF_HOUR_S
    since_s = clock.now_s() - found.seconds
    known = sum(at_s >= since_s - 1e-6 for at_s in arrivals_s)
    assert found.num_asked["a"] == pytest.approx(known, abs=1), "up to one at the very edge of a minute"
    assert len(demand._counts) <= 30
