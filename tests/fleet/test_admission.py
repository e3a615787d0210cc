"""Predicted first tokens against requests counted by hand and against the twin, and which requests are
refused."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from fleet_views import (
    COSTS,
    ELSEWHERE_S,
    HOST_S,
    MEAN_TOKENS,
    REQUESTS,
    Fleet,
    fleet_of,
    request_of,
    set_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.modules import MODULES
from loraplex.core.shape import ModelShape
from loraplex.fleet.admission import Admission, Admitted, Forecast
from loraplex.fleet.answer_length import AnswerLength
from loraplex.fleet.first_token import forecast
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.set_costs import RequestSets, StepSetCosts
from loraplex.perf.subject import Subject
from loraplex.twin.outcome import RequestOutcome
from loraplex.twin.replay import OwnEngines, ReplayOptions
from loraplex.workload.jsonl import WorkloadRequest

STEP_TOKENS = 64
NOBODY = Admitted()


def by_hand(fleet: Fleet, request: RoutedRequest, replica: int) -> float:
    """Compute the same by iterating over requests; with `rank-proportional` costs, whose sets are plain
    sums."""
    costs, limits = fleet.view.costs, fleet.view.load.limits[replica]
    here, queue = fleet.requests(replica), fleet.queue(replica)
    shown = min(len(here), limits.max_running) / max(len(here), 1)
    batch = set_of(here)
    batch_s = float(costs.decode_s(_scaled(batch, shown))[0])
    half = [(each, 1.0) for each in here]
    for each in queue:
        half.remove((each, 1.0))
        half.append((each, 0.5))
    num_decoding = sum(share for _, share in half)
    kept = min(limits.max_running / num_decoding, 1.0) if num_decoding else 1.0
    decoding = batch._replace(
        num_requests=np.array([num_decoding * kept]),
        sum_ranks=np.array([sum(each.rank * share for each, share in half) * kept]),
    )
    budget = max(STEP_TOKENS - num_decoding * kept, STEP_TOKENS / 4)
    tokens = sum(each.prompt_tokens for each in queue) + request.prompt_tokens
    num_steps = math.ceil(tokens / budget)
    read_s = float(costs.prefill_s(set_of([*queue, request]))[0])
    read_s += num_steps * float(costs.decode_s(decoding)[0])
    too_many = max(len(here) + 1 - limits.max_running, 0) / limits.max_running
    kv_tokens = sum(each.prompt_tokens + MEAN_TOKENS for each in [*here, request])
    too_large = max(kv_tokens / limits.kv_tokens - 1, 0)
    load_s = 0.0
    if request.adapter is not None and replica not in fleet.view.tiers.on_device(request.adapter):
        load_s = HOST_S
        if replica not in fleet.view.tiers.on_host(request.adapter):
            load_s += ELSEWHERE_S
    return read_s + MEAN_TOKENS * batch_s * max(too_many, too_large) + load_s


def _scaled(sets: RequestSets, share: float) -> RequestSets:
    return sets._replace(num_requests=sets.num_requests * share, sum_ranks=sets.sum_ranks * share)


@given(
    sent=st.lists(st.tuples(REQUESTS, st.integers(0, 2), st.booleans()), max_size=40),
    request=REQUESTS,
    replica=st.integers(0, 2),
    homes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.booleans()), max_size=6),
)
def test_a_forecast_is_what_counting_by_hand_says(
    sent: list[tuple[RoutedRequest, int, bool]],
    request: RoutedRequest,
    replica: int,
    homes: list[tuple[int, int, bool]],
) -> None:
    fleet = fleet_of(3)
    for each, place, is_running in sent:
        fleet.send(each, place, is_running=is_running)
    for place, adapter, on_device in homes:
        (fleet.view.tiers.loaded if on_device else fleet.view.tiers.staged)(place, adapter)
    before = fleet.snapshot()
    found = forecast(request, fleet.view, replica, admitted=NOBODY, step_tokens=STEP_TOKENS)
    assert found.ttft_s == pytest.approx(by_hand(fleet, request, replica))
    assert found.is_idle == (not fleet.requests(replica))
    assert found.alone_s <= found.ttft_s
    assert fleet.snapshot() == before, "looking changes nothing"


@given(st.lists(REQUESTS, max_size=12), REQUESTS)
def test_more_before_a_request_never_brings_its_first_token_sooner(
    waiting: list[RoutedRequest], request: RoutedRequest
) -> None:
    fleet = fleet_of(1, costs=COSTS["rank-proportional"])
    last_s = 0.0
    for each in waiting:
        found = forecast(request, fleet.view, 0, admitted=NOBODY, step_tokens=STEP_TOKENS)
        assert found.ttft_s >= last_s
        last_s = found.ttft_s
        fleet.send(each, 0)


def test_requests_that_no_replica_was_sent_count_as_shared_by_those_that_accept() -> None:
    fleet, sent = fleet_of(3, down=[2]), fleet_of(3, down=[2])
    for replica in (0, 1):
        sent.send(request_of(None, 320), replica)
    admitted = Admitted(num_requests=2, prompt_tokens=640)
    for each in (fleet, sent):  # sent or not, these two are before it
        found = forecast(request_of(None), each.view, 0, admitted=admitted, step_tokens=STEP_TOKENS)
        assert not found.is_idle
        assert found == forecast(request_of(None), sent.view, 0, admitted=NOBODY, step_tokens=STEP_TOKENS)


# ---- the twin: the scheduler itself, step by step


SHAPE = ModelShape(
    family="llama",
    num_layers=4,
    hidden_size=256,
    intermediate_size=768,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=4000,
    max_position=4096,
)


def engine_model(step_tokens: int, kv_tokens: int) -> CostModel:
    subject = Subject(machine="any", device="cpu", model="small", dtype="float32", num_layers=4)
    memory = EngineMemory(
        max_context=4096,
        token_bytes=8192,
        block_tokens=16,
        arena_bytes=None,
        kv_tokens=kv_tokens,
        host_bytes=1 << 30,
        table_bytes=0,
        rank_bytes=dict.fromkeys(MODULES, 8192),
        step_tokens=step_tokens,
    )
    model = default_cost_model(subject, SHAPE, num_cores=2)
    return replace(model, memory=memory)


class NoMoves:
    def from_host_s(self, adapter: int) -> float:
        return 0.0

    def from_elsewhere_s(self, adapter: int) -> float:
        return 0.0


def predicted_and_simulated(seed: int) -> tuple[float, float]:
    """Measure the first token of a request that arrives at an engine with random requests in flight."""
    rng = random.Random(seed)
    step_tokens, max_running = rng.choice([64, 512]), rng.choice([8, 64])
    model = engine_model(step_tokens, kv_tokens := rng.choice([20_000, 200_000]))
    options = ReplayOptions(num_adapters=4, ranks=(8,), max_running=max_running)
    engines = OwnEngines(model, options, longest=2000)
    twin = engines.make()
    for number in range(4):
        engines.register(twin, number)
    sent: list[RequestOutcome] = []

    def arrive(now_s: float, output_tokens: int) -> WorkloadRequest:
        twin.advance(now_s)
        return WorkloadRequest(
            arrival_s=now_s,
            adapter=rng.randrange(4),
            prompt_tokens=rng.randint(10, 400),
            output_tokens=output_tokens,
        )

    now_s, rate = 0.0, rng.choice([5, 10, 20, 40])
    for _ in range(rng.randint(1, 40)):
        now_s += rng.expovariate(rate)
        sent.append(twin.offer(arrive(now_s, rng.randint(20, 120))))
    last = arrive(now_s + rng.expovariate(rate), 50)
    load = FleetLoad([ReplicaLimits(max_running=max_running, kv_tokens=kv_tokens)], AnswerLength(70.0))
    for number, each in enumerate(sent):
        # The step in flight ends later than now, and its result has not been reported yet.
        if each.finish_s is None or each.finish_s > last.arrival_s:
            load.sent(number, RoutedRequest(each.request.adapter, 8, each.request.prompt_tokens), 0)
            if each.first_token_s is not None and each.first_token_s <= last.arrival_s:
                load.first_token(number)
    costs = StepSetCosts(model, rank_bytes=engines.rank_bytes)
    view = FleetView(load=load, tiers=AdapterTiers(), costs=costs, moves=NoMoves())
    request = RoutedRequest(last.adapter, 8, last.prompt_tokens)
    found = forecast(request, view, 0, admitted=NOBODY, step_tokens=step_tokens)
    outcome = twin.offer(last)
    twin.advance(math.inf)
    assert outcome.ttft_s is not None
    return found.ttft_s, outcome.ttft_s


def test_forecasts_are_near_what_the_scheduler_does() -> None:
    ratios = sorted(predicted / simulated for predicted, simulated in map(predicted_and_simulated, range(60)))
    assert 0.8 < ratios[len(ratios) // 2] < 1.3
    assert ratios[3] > 0.7
    assert ratios[-6] < 2.0


# ---- the bound


def busy(ttft_s: float, alone_s: float = 0.1) -> Forecast:
    return Forecast(ttft_s, alone_s, is_idle=False)


def test_what_is_predicted_too_late_is_refused_until_it_fits() -> None:
    admission = Admission(2.0)
    assert admission.retry_after_s(busy(2.0)) is None
    assert admission.retry_after_s(busy(3.5)) == pytest.approx(1.5)
    assert admission.retry_after_s(busy(1.5), waited_s=1.0) == pytest.approx(0.5)


def test_a_request_longer_than_the_bound_is_for_an_idle_replica() -> None:
    admission = Admission(2.0)
    assert admission.retry_after_s(busy(9.0, alone_s=5.0)) == pytest.approx(4.0)
    assert admission.retry_after_s(Forecast(5.0, 5.0, is_idle=True)) is None


@settings(max_examples=examples(15, 30))
@given(st.floats(0.05, 20.0), st.integers(0, 1000))
def test_predictions_are_corrected_to_hold_for_most_requests(factor: float, seed: int) -> None:
    rng, admission = random.Random(seed), Admission(1.0)
    for _ in range(200):
        true_s = rng.uniform(0.5, 2.0)
        admission.observe(true_s / factor, true_s * rng.lognormvariate(0, 0.2))
    assert 1.0 < admission.correction / factor < 2.0
    within = [rng.lognormvariate(0, 0.2) * factor <= admission.correction for _ in range(400)]
    assert sum(within) > 300


def test_one_request_that_waited_for_a_restart_does_not_close_the_server() -> None:
    admission = Admission(1.0)
    for _ in range(40):
        admission.observe(0.8, 0.8)
    admission.observe(0.8, 500.0)
    assert admission.correction < 2.0
    for _ in range(60):
        admission.observe(0.8, 0.8)
    assert admission.correction < 1.3


def test_times_far_below_the_bound_decide_nothing() -> None:
    admission = Admission(1.0)
    for _ in range(100):
        admission.observe(0.001, 0.02)
    assert admission.correction == 1.0
    for _ in range(100):  # a correction that refuses too much is unlearned from admitted requests
        admission.observe(0.5, 5.0)
    assert admission.correction > 5.0
    for _ in range(200):
        admission.observe(0.5, 0.5)
    assert admission.correction < 1.5
