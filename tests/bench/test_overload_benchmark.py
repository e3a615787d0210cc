"""The benchmark of overload counts what is in time, what is late and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from fake_openai import FakeServer

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import load_tables, overload


def seen(ttft_s: float | None, *, status: int = 200, is_whole: bool = True, tenant: int = 0) -> overload.Seen:
    return overload.Seen(status=status, ttft_s=ttft_s, total_s=0.01, is_whole=is_whole, tenant=tenant)


def test_only_whole_answers_in_time_are_good() -> None:
    found = overload.summarized(
        [seen(0.5), seen(1.5), seen(0.5, is_whole=False), seen(None, status=429, is_whole=False)],
        counted_s=2.0,
        max_ttft_s=1.0,
    )
    assert (found["good"], found["answered"], found["refused"], found["failed"]) == (1, 2, 1, 1)
    assert (found["goodput_per_s"], found["refusal_p99_ms"]) == (0.5, 10.0)


def test_a_tenant_that_asks_for_too_much_is_not_among_the_others() -> None:
    refused = [seen(None, status=429, is_whole=False, tenant=number) for number in (0, 0, 1)]
    found = overload.summarized(
        [*refused, seen(0.5), seen(0.5, tenant=1), seen(0.5, tenant=2), seen(1.5, tenant=2)],
        counted_s=1.0,
        max_ttft_s=1.0,
    )
    assert (found["good"], found["refused"], found["others_in_time"]) == (3, 3, 0.5)
    alone = overload.summarized([seen(0.5)], counted_s=1.0, max_ttft_s=1.0)
    assert alone["others_in_time"] is None


def test_goodput_beyond_the_peak_is_compared_with_the_most_there_was() -> None:
    bound = {"peak": [{"goodput_per_s": 4.0}, {"goodput_per_s": 6.0}], "overload": [{"goodput_per_s": 4.5}]}
    assert overload.ratio({"peak": {"goodput_per_s": 3.0}}, bound) == 0.9
    assert overload.ratio({"peak": {"goodput_per_s": 9.0}}, bound) == 0.5


@pytest.mark.slow
def test_a_whole_measurement_runs_and_makes_a_table(fake: FakeServer) -> None:
    load = overload.Load(window_s=0.4, num_at_a_time=2, rounds=1)
    without = asyncio.run(overload.unbounded(fake.base_url, load=load, max_ttft_s=60.0))
    assert len(without["tried"]) == len(overload.RATES)
    rate = without["peak"]["rate"]
    bound = asyncio.run(overload.bounded(fake.base_url, rate=rate, load=load, max_ttft_s=60.0))
    assert bound["overload"][0]["rate"] == pytest.approx(2 * rate, abs=0.01)
    assert bound["overload"][0]["good"] == bound["overload"][0]["requests"] > 0
    results = {"unbounded": without, "bounded": bound, "ratio": overload.ratio(without, bound)}
    assert f"| {results['ratio']:.0%} |" in load_tables.overload_table({"results": results})


@pytest.mark.slow
def test_one_tenant_sends_all_that_is_too_much(fake: FakeServer) -> None:
    load = overload.Load(window_s=0.4, num_at_a_time=2, rounds=1)
    keys = [f"key-{number}" for number in range(overload.NUM_TENANTS)]
    bound = asyncio.run(overload.bounded(fake.base_url, rate=100.0, load=load, max_ttft_s=60.0, keys=keys))
    asked = Counter(headers["Authorization"] for headers in fake.headers)
    others = [asked[f"Bearer {key}"] for key in keys[1:]]
    assert asked[f"Bearer {keys[0]}"] > max(others)
    assert min(others) > 0
    assert {each["others_in_time"] for each in [*bound["peak"], *bound["overload"]]} == {1.0}
