"""Goodput under overload, on the twin of an engine: admitted requests get their first token in time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
from test_admission import NoMoves, engine_model

from loraplex.fleet.admission import Admission, Admitted, Forecast
from loraplex.fleet.answer_length import AnswerLength
from loraplex.fleet.first_token import forecast
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import Corrections
from loraplex.perf.set_costs import StepSetCosts
from loraplex.twin.engine_twin import AdapterEvent
from loraplex.twin.outcome import RequestEvent
from loraplex.twin.replay import OwnEngines, ReplayOptions
from loraplex.workload.jsonl import WorkloadRequest

MAX_TTFT_S = 3.0
SLOWNESS = 4.0
"""Factor by which the engine is slower, so that few requests overload it and few have to be simulated."""
RATES = (3.0, 4.0, 5.0)
NUM_ADAPTERS, STEP_TOKENS, KV_TOKENS = 4, 128, 40_000


class Sent(NamedTuple):
    request: WorkloadRequest
    predicted: Forecast


class Server:
    """A twin, and the knowledge of a server in front of it: requests that it sent, and what it saw of
    them."""

    def __init__(self, *, believed: float, is_bounded: bool) -> None:
        """`believed`: factor by which the engine is assumed to be slower than it is."""
        model = replace(engine_model(STEP_TOKENS, KV_TOKENS), corrections=Corrections(step=SLOWNESS))
        self._engines = OwnEngines(
            model, ReplayOptions(num_adapters=NUM_ADAPTERS, ranks=(8,), max_running=32), longest=1000
        )
        self._twin = self._engines.make()
        for number in range(NUM_ADAPTERS):
            self._engines.register(self._twin, number)
        self._events: list[RequestEvent] = []
        adapter_events: list[AdapterEvent] = []
        self._twin.watch(self._events, adapter_events)
        self._sent: dict[str, Sent] = {}
        self._started: set[str] = set()
        wrong = replace(model, corrections=Corrections(step=SLOWNESS * believed))
        self._view = FleetView(
            load=FleetLoad([ReplicaLimits(max_running=32, kv_tokens=KV_TOKENS)], AnswerLength(64.0)),
            tiers=AdapterTiers(),
            costs=StepSetCosts(wrong, rank_bytes=self._engines.rank_bytes),
            moves=NoMoves(),
        )
        self._admission = Admission(MAX_TTFT_S) if is_bounded else None
        self.in_time: list[float] = []
        """Times at which requests ended whose first token was in time."""
        self._late: set[str] = set()

    def see(self, now_s: float) -> None:
        """Record everything that could be observed by now."""
        self._twin.advance(now_s)
        load = self._view.load
        seen = [event for event in self._events if event.at_s <= now_s]
        self._events[:] = [event for event in self._events if event.at_s > now_s]
        for at_s, request_id, reason in seen:
            request, predicted = self._sent[request_id]
            if request_id not in self._started:
                self._started.add(request_id)
                load.first_token(request_id)
                ttft_s = at_s - request.arrival_s
                if self._admission is not None:
                    self._admission.observe(predicted.ttft_s, ttft_s)
                if ttft_s > MAX_TTFT_S:
                    self._late.add(request_id)
            if reason is not None:
                load.ended(request_id, request.output_tokens)
                if request_id not in self._late:
                    self.in_time.append(at_s)

    def come(self, request: WorkloadRequest) -> None:
        self.see(request.arrival_s)
        routed = RoutedRequest(request.adapter, 8, request.prompt_tokens)
        predicted = forecast(routed, self._view, 0, admitted=Admitted(), step_tokens=STEP_TOKENS)
        if self._admission is not None and self._admission.retry_after_s(predicted) is not None:
            return
        request_id = str(self._twin.num_offered)
        self._twin.offer(request)
        self._sent[request_id] = Sent(request, predicted)
        self._view.load.sent(request_id, routed, 0)


def goodput(rate: float, *, believed: float = 1.0, is_bounded: bool = True) -> float:
    """Return the requests per second whose first token was in time, after a warm-up."""
    rng, now_s, until_s, warm_s = random.Random(7), 0.0, 90.0, 30.0
    server = Server(believed=believed, is_bounded=is_bounded)
    while (now_s := now_s + rng.expovariate(rate)) < until_s:
        server.come(
            WorkloadRequest(
                arrival_s=now_s,
                adapter=rng.randrange(NUM_ADAPTERS),
                prompt_tokens=rng.randint(20, 200),
                output_tokens=rng.randint(10, 60),
            )
        )
    server.see(until_s)
    return sum(warm_s <= at_s for at_s in server.in_time) / (until_s - warm_s)


@pytest.fixture(scope="module")
def peak() -> tuple[float, float]:
    """Return the rate with the most goodput, and that goodput."""
    found = {rate: goodput(rate) for rate in RATES}
    best = max(found, key=lambda rate: found[rate])
    return best, found[best]


@pytest.mark.parametrize("believed", [0.3, 1.0, 4.0])
def test_goodput_stays_near_the_peak_at_twice_its_rate(peak: tuple[float, float], believed: float) -> None:
    rate, most = peak
    assert goodput(2 * rate, believed=believed) > 0.95 * most


def test_without_a_bound_hardly_anything_is_in_time(peak: tuple[float, float]) -> None:
    rate, most = peak
    assert goodput(2 * rate, is_bounded=False) < 0.2 * most
