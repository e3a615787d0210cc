"""The objectives of a tenant's requests, and how many reach them."""

from __future__ import annotations

from collections import Counter

import pytest

from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError
from loraplex.core.request import FinishReason
from loraplex.engine.text_engine import TextDelta
from loraplex.server.metrics import RequestMeter, ServerMetrics, Traffic
from loraplex.server.tenants.objective import Objective, Reached, Target


def metered(
    clock: ManualClock,
    counts: Counter[Reached],
    *,
    ttft_s: float | None = 2.0,
    tpt_s: float | None = 0.1,
    metrics: ServerMetrics | None = None,
    adapter: str | None = "a",
) -> RequestMeter:
    return (metrics or ServerMetrics(clock)).meter(
        adapter=adapter,
        num_prompt_tokens=1,
        num_choices=1,
        arrival_s=clock.now_s(),
        objective=Objective(ttft_s, tpt_s, (counts,)),
    )


def delta(count: int, reason: FinishReason | None = None) -> list[TextDelta]:
    ids = (1,) * count
    return [TextDelta(choice=0, text="x", token_ids=ids, num_sampled=count, finish_reason=reason)]


@pytest.mark.parametrize(
    ("first_s", "each_s", "expected"),
    [
        (1.0, 0.05, {Reached(Target.TTFT, True): 1, Reached(Target.TPT, True): 1}),
        (3.0, 0.05, {Reached(Target.TTFT, False): 1, Reached(Target.TPT, True): 1}),
        (1.0, 0.5, {Reached(Target.TTFT, True): 1, Reached(Target.TPT, False): 1}),
    ],
)
def test_each_target_counts_by_itself(first_s: float, each_s: float, expected: dict[Reached, int]) -> None:
    clock, counts = ManualClock(), Counter[Reached]()
    meter = metered(clock, counts)
    clock.advance(first_s)
    meter.on_batch(delta(1))
    clock.advance(4 * each_s)
    meter.on_batch(delta(4, FinishReason.LENGTH))
    meter.close()
    assert counts == expected


@pytest.mark.parametrize(("sending_s", "found"), [(0.05, 0.25), (0.5, None)])
def test_the_time_per_token_is_the_engines_and_not_that_of_a_slow_client(
    sending_s: float, found: float | None
) -> None:
    clock = ManualClock()
    meter = metered(clock, Counter[Reached]())
    meter.on_batch(delta(1))
    begun_s = clock.now_s()
    clock.advance(sending_s)
    meter.sent(begun_s)
    clock.advance(1.0 - sending_s)
    meter.on_batch(delta(4, FinishReason.LENGTH))
    begun_s = clock.now_s()
    clock.advance(9.0)  # the client reads the end of the answer
    meter.sent(begun_s)
    assert meter.tpt_s == found


def test_a_failure_misses_a_first_token_and_a_client_that_leaves_does_not() -> None:
    clock, counts = ManualClock(), Counter[Reached]()
    left = metered(clock, counts)
    left.close()
    assert not counts
    failed = metered(clock, counts)
    failed.fail(EngineDeadError("died"))
    failed.close()
    assert counts == {Reached(Target.TTFT, False): 1}


def test_a_request_counts_for_its_tenant_and_for_its_adapter() -> None:
    clock, counts = ManualClock(), Counter[Reached]()
    metrics = ServerMetrics(clock)
    for adapter in ("a", "a", "b", None):
        meter = metered(clock, counts, metrics=metrics, adapter=adapter)
        meter.on_batch(delta(1, FinishReason.STOP))
        meter.close()
    reached = Reached(Target.TTFT, True)
    snapshot = metrics.snapshot()
    metered(clock, counts, metrics=metrics).on_batch(delta(1, FinishReason.STOP))
    assert counts == {reached: 5}
    assert metrics.traffic("a").num_reached == {reached: 3}
    assert snapshot.traffic("a").num_reached == {reached: 2}
    assert Traffic.sum_of(map(snapshot.find_traffic, ("a", "b", "c"))).num_reached == {reached: 3}


def test_without_a_target_nothing_is_counted() -> None:
    clock, counts = ManualClock(), Counter[Reached]()
    meter = metered(clock, counts, ttft_s=None)
    meter.on_batch(delta(1, FinishReason.STOP))
    meter.close()
    assert not counts
