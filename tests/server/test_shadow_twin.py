"""The shadow twin: requests of the last minutes, replayed, and the figures shown."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_client_harness import run
from prometheus_client import generate_latest

from loraplex.core.batching import Batching
from loraplex.core.clock import ManualClock
from loraplex.core.cold_start import ColdStart
from loraplex.core.engine_policy import EnginePolicy
from loraplex.perf.cost_model import CostModel, with_copies_at_most
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.profile_json import profile_to_json
from loraplex.server import shadow_twin
from loraplex.server.recent_requests import RecentRequests
from loraplex.server.shadow_messages import Figures, Replayed, SeenRequest, Window
from loraplex.server.shadow_replay import figures, replay
from loraplex.server.shadow_twin import ReplayEnd, ShadowTwin, TwinFigures, TwinSubject
from loraplex.server.twin_metrics import twin_families
from loraplex.twin.replay import OwnEngines, ReplayOptions
from loraplex.workload.jsonl import WorkloadRequest

NUM_REPLICAS = 2
RANKS = [8, 0, 64]


def profile() -> CostModel:
    found = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(found, CostModel)
    return found


def seen(sent_s: float, first_s: float | None, last_s: float | None, num_output: int = 11) -> SeenRequest:
    return SeenRequest(0, 0, 100, num_output, sent_s, first_s, last_s)


def test_figures_are_of_what_came_within_the_window() -> None:
    requests = [
        seen(90.0, 95.0, 105.0),  # ten tokens in ten seconds, half of them before
        seen(102.0, 103.0, 108.0),
        seen(104.0, 107.0, 117.0),  # three of ten seconds within
        seen(106.0, None, None, num_output=0),
        seen(107.0, 108.5, 108.5, num_output=1),
    ]
    found = figures(requests, 100.0, 110.0)
    assert found.tokens_per_s == pytest.approx((5 + 11 + 4 + 1) / 10)
    assert found.ttft_s == pytest.approx((1.0 + 3.0 + 1.5) / 3)
    assert found.itl_s == pytest.approx(15.0 / 20)
    assert figures([], 0.0, 10.0) == Figures(tokens_per_s=0.0, ttft_s=None, itl_s=None)


def twin_run(costs: CostModel) -> list[SeenRequest]:
    """Requests that were served by engines exactly as their profile predicts."""
    rng, found = random.Random(3), []
    for replica in range(NUM_REPLICAS):
        options = ReplayOptions(num_adapters=len(RANKS), ranks=tuple(RANKS), rank_bytes=2000, max_running=64)
        engines = OwnEngines(costs, options, longest=2000)
        simulator = engines.make()
        for number in range(len(RANKS)):
            engines.register(simulator, number)
        simulator.stage_all()
        now_s = 1000.0
        for number in range(120):
            now_s += rng.expovariate(6.0) if number else 0.0
            asked = WorkloadRequest(
                arrival_s=now_s - 1000.0,
                adapter=rng.randrange(len(RANKS)),
                prompt_tokens=rng.randint(20, 800),
                output_tokens=rng.randint(5, 120),
            )
            simulator.advance(asked.arrival_s)
            found.append((replica, now_s, simulator.offer(asked)))
        simulator.advance(1e9)
    return [
        SeenRequest(
            replica,
            each.request.adapter,
            each.request.prompt_tokens,
            each.request.output_tokens,
            sent_s,
            1000.0 + (each.first_token_s or 0.0),
            1000.0 + (each.finish_s or 0.0),
        )
        for replica, sent_s, each in sorted(found, key=lambda one: one[1])
    ]


def window_of(costs: CostModel, requests: list[SeenRequest], **changes: Any) -> Window:
    last_s = max(each.last_s or 0.0 for each in requests)
    fields: dict[str, Any] = {
        "costs": profile_to_json(costs),
        "policy": EnginePolicy(),
        "max_running": 64,
        "rank_params": 1000.0,
        "ranks": RANKS,
        "requests": requests,
        "since_s": requests[len(requests) // 4].sent_s,
        "until_s": last_s,
    }
    return Window(**fields | changes)


def test_an_engine_that_is_as_its_profile_says_is_predicted_as_it_is() -> None:
    costs = profile()
    requests = twin_run(costs)
    replayed = replay(window_of(costs, requests))
    assert replayed.error is None
    assert replayed.predicted is not None
    assert replayed.predicted.tokens_per_s == pytest.approx(replayed.measured.tokens_per_s)
    assert replayed.predicted.ttft_s == pytest.approx(replayed.measured.ttft_s)
    assert replayed.predicted.itl_s == pytest.approx(replayed.measured.itl_s)
    assert replayed.num_requests == len(requests) - len(requests) // 4


def test_a_slower_engine_than_the_profile_says_is_seen() -> None:
    costs = profile()
    slow = replace(costs, corrections=replace(costs.corrections, step=2.0))
    replayed = replay(window_of(costs, twin_run(slow)))
    assert replayed.predicted is not None
    assert replayed.measured.itl_s is not None
    assert replayed.predicted.itl_s is not None
    assert replayed.predicted.itl_s < 0.7 * replayed.measured.itl_s


def test_a_window_is_replayed_with_its_start_policy_and_workers() -> None:
    slow = with_copies_at_most(profile(), 4e9)
    alone = SeenRequest(0, 2, 128, 4, 0.0, 1.0, 2.0)  # on an adapter of rank 64

    def ttft_s(cold_start: ColdStart, cpu_workers: int = 0) -> float:
        policy = EnginePolicy(cold_start=cold_start, num_workers=cpu_workers)
        replayed = replay(window_of(slow, [alone], policy=policy, rank_params=786432.0))
        assert replayed.predicted is not None
        assert replayed.predicted.ttft_s is not None
        return replayed.predicted.ttft_s

    pipelined = ttft_s(ColdStart.PIPELINED)
    assert ttft_s(ColdStart.CPU_ASSIST) == pipelined < ttft_s(ColdStart.ON_DEMAND)
    assert ttft_s(ColdStart.CPU_ASSIST, 8) < ttft_s(ColdStart.CPU_ASSIST, 3) < pipelined


def predicted_of(costs: CostModel, requests: list[SeenRequest], policy: EnginePolicy) -> Figures:
    replayed = replay(window_of(costs, requests, policy=policy, since_s=0.0, until_s=60.0))
    assert replayed.predicted is not None, replayed.error
    return replayed.predicted


def test_a_window_is_replayed_with_its_batching() -> None:
    """The oldest request's adapter is merged while all others pause, so that these begin later."""
    both = [SeenRequest(0, adapter, 128, 200, 0.001 * adapter, 1.0, 2.0) for adapter in (0, 2)]
    together = predicted_of(profile(), both, EnginePolicy()).ttft_s
    in_turn = predicted_of(profile(), both, EnginePolicy(batching=Batching.MERGED)).ttft_s
    assert together is not None
    assert in_turn is not None
    assert in_turn > 5 * together


def test_a_window_is_replayed_with_its_swap_memory() -> None:
    """Keys and values of a preempted request come back from the host instead of being computed again."""
    costs = profile()
    assert costs.memory is not None
    small = replace(costs, memory=replace(costs.memory, arena_bytes=costs.memory.token_bytes * 5000))
    both = [SeenRequest(0, 1, 2000, 900, 0.001 * number, 1.0, 2.0) for number in range(2)]
    computed = predicted_of(small, both, EnginePolicy()).itl_s
    swapped = predicted_of(small, both, EnginePolicy(kv_swap_bytes=4 << 30)).itl_s
    assert computed is not None
    assert swapped is not None
    assert swapped < computed


def test_a_window_that_cannot_be_replayed_says_why() -> None:
    costs = profile()
    long = SeenRequest(0, 0, 10**6, 1, 0.0, 1.0, 1.0)
    replayed = replay(window_of(costs, [long], since_s=0.0))
    assert replayed.predicted is None
    assert replayed.error is not None
    assert "too few for a request" in replayed.error


def test_recent_requests_are_bounded_and_say_since_when_they_are_complete() -> None:
    clock = ManualClock()
    recent = RecentRequests(clock, max_requests=3)
    assert recent.complete_since_s == clock.now_s()
    for _ in range(5):
        request = recent.sent(0, "v1", 8, 10)
        clock.advance(1.0)
        recent.tokens(request, 1)
        recent.ended(request)
    waiting = recent.sent(0, None, 0, 10)
    found = recent.since(0.0)
    assert (len(found), found[-1]) == (4, waiting)
    assert recent.complete_since_s == clock.now_s() - 3.0
    assert [each.sent_s for each in recent.since(clock.now_s())] == [clock.now_s() - 1.0, clock.now_s()]


class Engine:
    """An engine that describes itself for its twin."""

    def __init__(self, recent: RecentRequests, costs: CostModel | None = None) -> None:
        self._recent = recent
        self._costs = costs or profile()

    def twin(self) -> TwinSubject:
        return TwinSubject(
            costs=profile_to_json(self._costs),
            policy=EnginePolicy(),
            max_running=64,
            rank_params=1000.0,
            recent=self._recent,
        )


def serve_some(recent: RecentRequests, clock: ManualClock, number: int = 4) -> None:
    for _ in range(number):
        request = recent.sent(0, "v1", 8, 100)
        for _ in range(5):
            clock.advance(0.02)
            recent.tokens(request, 1)
        recent.ended(request)


def test_a_process_replays_what_was_served_and_nothing_if_nobody_was() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        recent = RecentRequests(clock)
        async with ShadowTwin(Engine(recent), interval_s=3600) as twin:
            clock.advance(60.0)
            await twin.look()
            assert twin.figures.latest is None
            assert twin._process is None
            serve_some(recent, clock)
            await twin.look()
            latest = twin.figures.latest
            assert latest is not None
            assert latest.predicted is not None
            assert latest.num_requests == 4
            assert latest.measured.itl_s == pytest.approx(0.02)
            process = twin._process
            assert process is not None
            process.kill()
            await process.wait()
            await twin.look()  # it failed, and the next one has a new process
            assert twin.figures.latest is None
            await twin.look()
            assert twin.figures.latest == replace_seconds(twin.figures.latest, latest)
            clock.advance(600.0)
            await twin.look()
            assert twin.figures.latest is None
            assert twin.figures.num_replays == {
                ReplayEnd.DONE: 2,
                ReplayEnd.SKIPPED: 0,
                ReplayEnd.FAILED: 1,
            }
            last = twin._process
        assert last is not None
        assert last.returncode is not None, "it ends with the server"

    run(scenario())


def own_profile() -> CostModel:
    """A profile of the same machine that was measured there."""
    return replace(profile(), step=replace(profile().step, decodes=profile().step.prompts))


def with_other_memory() -> CostModel:
    """A profile of the package, with the memory of the engine that reports it."""
    return replace(profile(), memory=None)


def guess() -> CostModel:
    return replace(profile(), measured=False)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (with_other_memory(), "the package's profile h200-llama-2-7b, measured on a machine of this kind"),
        (own_profile(), "the profile that was measured on this machine"),
        (guess(), "nobody has measured this machine"),
    ],
    ids=["package", "own", "guess"],
)
def test_the_log_says_where_the_profile_comes_from(
    costs: CostModel, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with ShadowTwin(Engine(RecentRequests(ManualClock()), costs), interval_s=3600):
            pass

    with caplog.at_level("INFO"):
        run(scenario())
    [said] = [each.getMessage() for each in caplog.records if each.name.endswith("shadow_twin")]
    assert words in said


def test_an_answer_that_is_none_is_a_failed_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.shadow_twin._MODULE", "this")  # it prints a poem

    async def scenario() -> None:
        clock = ManualClock()
        recent = RecentRequests(clock)
        async with ShadowTwin(Engine(recent), interval_s=3600) as twin:
            serve_some(recent, clock)
            await twin.look()
            assert twin.figures.num_replays[ReplayEnd.FAILED] == 1
            assert twin._process is None

    run(scenario())


def replace_seconds(of: Replayed | None, other: Replayed) -> Replayed:
    assert of is not None
    return Replayed(
        num_requests=other.num_requests,
        measured=other.measured,
        predicted=other.predicted,
        seconds=of.seconds,
    )


def test_what_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        recent = RecentRequests(clock)
        twin = ShadowTwin(Engine(recent), interval_s=3600)
        serve_some(recent, clock)
        asked = asyncio.Event()

        async def never(line: bytes) -> Replayed:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(twin, "_ask", never)
        monkeypatch.setattr(shadow_twin, "_GIVE_UP_S", 0.01)
        await twin.look()
        assert asked.is_set()
        asked.clear()
        await twin.look()  # not even begun
        assert not asked.is_set()
        assert twin.figures.num_replays[ReplayEnd.SKIPPED] == 2

    run(scenario())


class _Page:
    def __init__(self, twin: TwinFigures) -> None:
        self._twin = twin

    def collect(self) -> Any:
        return twin_families(self._twin)


def test_the_page_shows_predicted_beside_measured() -> None:
    latest = Replayed(
        num_requests=7,
        measured=Figures(tokens_per_s=100.0, ttft_s=0.5, itl_s=None),
        predicted=Figures(tokens_per_s=110.0, ttft_s=0.4, itl_s=None),
        seconds=0.1,
    )
    ends = {ReplayEnd.DONE: 3, ReplayEnd.SKIPPED: 1, ReplayEnd.FAILED: 0}
    page = generate_latest(_Page(TwinFigures(is_measured=True, num_replays=ends, latest=latest))).decode()
    for line in (
        'loraplex:twin_profile_info{profile="measured"} 1.0',
        'loraplex:twin_replays_total{result="skipped"} 1.0',
        'loraplex:twin_throughput_tokens_per_second{source="predicted"} 110.0',
        'loraplex:twin_ttft_seconds{source="measured"} 0.5',
        "loraplex:twin_requests 7.0",
    ):
        assert line in page.splitlines()
    errors = [line.split() for line in page.splitlines() if line.startswith("loraplex:twin_relative_error")]
    assert [(name, round(float(value), 6)) for name, value in errors] == [
        ('loraplex:twin_relative_error{figure="throughput"}', 0.1),
        ('loraplex:twin_relative_error{figure="ttft"}', -0.2),
    ]
    assert "twin_itl_seconds{" not in page
    idle = generate_latest(_Page(TwinFigures(is_measured=False, num_replays=ends, latest=None))).decode()
    assert 'profile="guess"' in idle
    assert "relative_error" not in idle
