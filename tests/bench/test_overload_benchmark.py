"""The benchmark of overload counts what is in time, what is late and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from fake_openai import FakeServer

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import overload


def seen(ttft_s: float | None, *, status: int = 200, is_whole: bool = True) -> overload.Seen:
    return overload.Seen(status=status, ttft_s=ttft_s, total_s=0.01, is_whole=is_whole)


def test_only_whole_answers_in_time_are_good() -> None:
    found = overload.summarized(
        [seen(0.5), seen(1.5), seen(0.5, is_whole=False), seen(None, status=429, is_whole=False)],
        counted_s=2.0,
        max_ttft_s=1.0,
    )
    assert (found["good"], found["answered"], found["refused"], found["failed"]) == (1, 2, 1, 1)
    assert (found["goodput_per_s"], found["refusal_p99_ms"]) == (0.5, 10.0)


def test_goodput_beyond_the_peak_is_compared_with_that_at_the_peak() -> None:
    measured = {
        "peak": [{"goodput_per_s": 4.0}, {"goodput_per_s": 6.0}],
        "overload": [{"goodput_per_s": 4.5}],
    }
    assert overload.ratio(measured) == 0.9


def test_a_whole_measurement_runs(fake: FakeServer) -> None:
    load = overload.Load(window_s=0.5, num_at_a_time=2, rounds=1)
    found = asyncio.run(overload.bounded(fake.base_url, load=load, max_ttft_s=60.0))
    assert len(found["tried"]) == len(overload.RATES)
    assert found["overload"][0]["rate"] == pytest.approx(2 * found["peak"][0]["rate"], abs=0.01)
    assert found["overload"][0]["good"] == found["overload"][0]["requests"] > 0
