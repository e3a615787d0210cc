"""A limit on the predicted time to the first token: which requests are refused, when, and with which
message."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fake_core import request_of, tokens_of
from server_fixtures import USER, Api
from server_process import run_command
from serving_fakes import says
from typer.testing import CliRunner

from loraplex.cli.durations import Duration
from loraplex.cli.main import app
from loraplex.core.clock import ManualClock
from loraplex.core.errors import EngineDeadError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.tenants import Caller, TenantPolicy
from loraplex.engine.output_stream import Take
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.engine_status import EngineState, EngineStatus
from loraplex.server.errors import QueueFullError
from loraplex.server.fleet.backend_errors import BackendBusyError
from loraplex.server.fleet.fleet_requests import FleetRequests
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.routing_events import Began, Limits, RoutingEvent, Sent
from loraplex.server.replica import Continuation, Replica
from loraplex.server.start_notes import ttft_note
from loraplex.server.waiting import Refused, WaitingBook, WaitingLimits

NOBODY = Admitted()


class Queue:
    """Predicts a second for each hundred prompt tokens that wait, and for the request's own."""

    def __init__(self, before_s: float = 0.0) -> None:
        self.before_s = before_s
        self.asked: list[tuple[str | None, int]] = []

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        self.asked.append((adapter, prompt_tokens))
        before_s = self.before_s + admitted.part_before * admitted.prompt_tokens / 100
        return Forecast(before_s + prompt_tokens / 100, prompt_tokens / 100, is_idle=before_s == 0)


def book_of(queue: Queue, clock: ManualClock | None = None, max_ttft_s: float = 2.0) -> WaitingBook:
    return WaitingBook(WaitingLimits(max_ttft_s=max_ttft_s), clock or ManualClock(), queue)


def test_requests_are_let_in_as_long_as_their_first_tokens_are_in_time() -> None:
    book = book_of(Queue())
    tickets = [book.admit(1) for _ in range(3)]  # their lengths are unknown
    for ticket in tickets[:2]:
        ticket.encoded([[1] * 100], 1)
    with pytest.raises(QueueFullError, match=r"after about 3 s.*at most 2 s.*--max-ttft.*again in 1 s"):
        tickets[2].encoded([[1] * 100], 1)
    tickets[2].close()
    assert (book.num_requests, book.num_tokens) == (2, 200)
    with pytest.raises(QueueFullError):
        book.admit(1)
    assert book.num_refused == {Refused.TTFT: 2}
    tickets[0].started(0)
    book.admit(1).encoded([[1] * 50], 1)


def test_whoever_asks_for_more_than_its_share_is_refused_and_others_are_not() -> None:
    book = WaitingBook(WaitingLimits(), ManualClock(), Queue(before_s=0.5))
    book.set_tenants([TenantPolicy(name="a", slo_ttft=2.0), TenantPolicy(name="b", slo_ttft=2.0)])
    many, few = Caller(tenant="a"), Caller(tenant="b")
    for _ in range(2):
        book.admit(1, caller=many).encoded([[1] * 60], 1)
    ticket = book.admit(1, caller=many)
    with pytest.raises(QueueFullError, match=r"after about 2.3 s, and its objective is 2 s; try again in 1"):
        ticket.encoded([[1] * 60], 1)
    ticket.close()
    book.admit(1, caller=few).encoded([[1] * 60], 1)
    assert book.num_refused == {Refused.SLO: 1}
    book.admit(1).encoded([[1] * 900], 1)  # of nobody, who has no objective


def test_all_choices_of_a_call_are_let_in_or_none() -> None:
    book = book_of(Queue())
    book.admit(1).encoded([[1] * 10], 1)
    ticket = book.admit(4)
    with pytest.raises(QueueFullError) as caught:
        ticket.encoded([[1] * 100, [1] * 100], 2)
    assert caught.value.retry_after_s == math.ceil(4.1 - 2.0)
    ticket.close()
    assert (book.num_requests, book.num_tokens) == (1, 10)


def test_time_that_encoding_took_counts() -> None:
    clock = ManualClock()
    book = book_of(Queue(before_s=0.5), clock)
    ticket = book.admit(1)
    clock.advance(1.4)
    with pytest.raises(QueueFullError):
        ticket.encoded([[1] * 20], 1)


def test_predictions_are_corrected_by_first_tokens() -> None:
    clock = ManualClock()
    book = book_of(Queue(before_s=0.5), clock)
    for _ in range(20):
        ticket = book.admit(1)
        ticket.encoded([[1] * 50], 1)
        clock.advance(3.0)
        ticket.started(0)
        ticket.close()
        if book.room.admission.correction > 2:
            break
    with pytest.raises(QueueFullError):
        book.admit(1).encoded([[1] * 50], 1)


def test_a_request_that_another_server_let_in_is_never_refused(make_api: Callable[..., Api]) -> None:
    limits = WaitingLimits(max_requests=1, max_ttft_s=1.0)
    api = make_api(waiting=limits, forecaster=Queue(before_s=60.0))
    held = api.served.deps.waiting.admit(1, was_admitted=True)
    body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 4}
    assert api.post("/v1/completions", body).status_code == 429
    assert api.post("/v1/completions", {**body, "output_token_ids": [4]}).status_code == 200
    held.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_over_http_it_is_a_429_before_anything_is_encoded_or_queued(
    make_api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    queue = Queue(before_s=4.2)
    api = make_api(waiting=WaitingLimits(max_ttft_s=1.0), forecaster=queue)
    monkeypatch.setattr(api.served.deps.text, "prompts", None)  # encoding would fail
    asked = {"messages": USER} if "chat" in path else {"prompt": "hi"}
    response = api.post(path, {"model": "pirate", "stream": True, **asked})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "4"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert queue.asked == [("version-of-pirate", 1)]
    assert api.served.engine.requests == []
    page = api.get("/metrics").text
    assert 'loraplex:requests_refused_total{model_name="base",reason="ttft"} 1.0' in page
    assert 'loraplex:requests_refused_total{model_name="base",reason="queue_full"} 0.0' in page


def test_without_a_bound_nothing_is_predicted(make_api: Callable[..., Api]) -> None:
    queue = Queue(before_s=60.0)
    api = make_api(says("Hello"), forecaster=queue)
    assert api.post("/v1/completions", {"model": "base", "prompt": "hi"}).status_code == 200
    assert queue.asked == []


def test_a_bound_that_an_idle_engine_breaks_is_said_at_the_start() -> None:
    class Idle(Queue):
        def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
            return Forecast(0.03, 0.03, is_idle=True)

    class Silent(Queue):
        def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
            return None

    assert list(ttft_note(Idle(), None)) == list(ttft_note(Idle(), 0.1)) == []
    (note,) = ttft_note(Idle(), 0.01)
    assert "--max-ttft 0.01 is less than the 0.03 s" in note
    assert "raise it" in note
    (note,) = ttft_note(Silent(), 1.0)
    assert "refuses nothing" in note


@pytest.mark.parametrize("command", [["serve"], ["fleet", "serve"]])
@pytest.mark.parametrize(
    ("option", "given", "least"),
    [
        *[("--max-ttft", given, "is no time") for given in ("-1", "nan", "inf", "soon", "2x", "")],
        *[("--max-ttft", given, "is no time above 0s") for given in ("0", "0ms")],
        *[("--shadow-twin-every", given, "is no time at least 1s") for given in ("0.5", "500ms")],
        *[("--shadow-twin-every", given, "is no time") for given in ("nan", "inf")],
        ("--shutdown-grace", "-1s", "is no time"),
    ],
)
def test_a_duration_must_be_a_time(command: list[str], option: str, given: str, least: str) -> None:
    done = CliRunner().invoke(app, [*command, "--model", "x", option, given], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert least in done.output
    assert "write it like 2s or 500ms" in done.output


@pytest.mark.parametrize("name", ["serve", "fleet serve"])
@pytest.mark.parametrize(
    ("given", "seconds"),
    [("2s", 2.0), ("0.5", 0.5), ("500ms", 0.5), (".5s", 0.5), (" 2 s ", 2.0), ("1m", 60.0), ("1.5h", 5400.0)],
)
def test_durations_have_one_form(name: str, given: str, seconds: float, tmp_path: Path) -> None:
    shown = json.loads(
        run_command("config", "show", "--json", *name.split(), "m", "--max-ttft", given).stdout
    )
    assert next(row["value"] for row in shown if row["option"] == "--max-ttft") == seconds
    config = tmp_path / "loraplex.toml"
    section = name.replace(" ", ".")
    for value in (f'"{given}"', f"{seconds}"):
        config.write_text(f"[{section}]\nmax-ttft = {value}\n")
        told = run_command("config", "show", *name.split(), "m", "--config", str(config)).stdout
        assert str(Duration(seconds)) in told
        assert "30s" in told, "a default"
    config.write_text(f"[{section}]\nmax-ttft = true\n")
    wrong = run_command("config", "show", *name.split(), "m", "--config", str(config))
    assert "max-ttft is a time such as '2s', or a number of seconds" in " ".join(wrong.stderr.split())


# ---- the time for each later token


class SlowSteps(Queue):
    """Predicts ten milliseconds a token for each request that runs."""

    def __init__(self) -> None:
        super().__init__(before_s=0.1)
        self.num_running = 0

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        return Forecast(0.1, 0.1, is_idle=False, tpt_s=0.01 * (self.num_running + 1))


def test_a_request_that_would_be_too_slow_is_refused_in_words() -> None:
    queue = SlowSteps()
    book = WaitingBook(WaitingLimits(), ManualClock(), queue)
    book.set_tenants([TenantPolicy(name="acme", slo_tpt=0.025)])
    acme = Caller(tenant="acme")
    for queue.num_running in (0, 1):
        book.admit(1, caller=acme).encoded([[1] * 5], 1)
    queue.num_running = 2
    with pytest.raises(QueueFullError, match=r"each token after the first .* 0.03 s.* objective is 0.025 s"):
        book.admit(1, caller=acme)
    assert book.num_refused_of("acme")[Refused.SLO] == 1
    book.admit(1).encoded([[1] * 5], 1)  # of nobody, who has no objective


def test_what_answers_took_corrects_the_next_predictions() -> None:
    queue = SlowSteps()
    book = WaitingBook(WaitingLimits(), ManualClock(), queue)
    book.set_tenants([TenantPolicy(name="acme", slo_tpt=0.025)])
    acme = Caller(tenant="acme")
    for _ in range(10):
        ticket = book.admit(1, caller=acme)
        ticket.encoded([[1] * 5], 1)
        ticket.started(0)
        ticket.close(tpt_s=0.03)  # three times what was predicted
    running = book.admit(1, caller=acme)
    running.encoded([[1] * 5], 1)  # nothing else of it is here
    with pytest.raises(QueueFullError, match=r"about 0\.03 s"):
        book.admit(1, caller=acme)
    running.close()
    book.admit(1, caller=acme)


def test_requests_without_limits_count_as_what_their_tenants_ask_for() -> None:
    clock = ManualClock()
    book = WaitingBook(WaitingLimits(max_borrowing=0.0), clock)
    many, one = Caller(tenant="many"), Caller(tenant="one")
    book.admit(1, caller=one)
    tickets = [book.admit(1, caller=many)]
    clock.advance(60.0)
    tickets += [book.admit(1, caller=many) for _ in range(39)]
    assert book.room.before(many).bounded is None, "a burst"
    clock.advance(20.0)
    book.admit(1, caller=one)
    assert book.room.before(many).bounded is not None
    for ticket in tickets:
        ticket.close()
    clock.advance(60.0)
    book.admit(1, caller=one)
    assert book.room.before(many).bounded is None


# ---- fleets


class FakeReplica:
    """A replica that answers with errors first, then as the fake core does."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.healthy = True
        self.refused: dict[str, str] = {}
        self.status = EngineStatus(state=EngineState.READY, message="", num_restarts=0, pid=None)

    def continuation(self, request: EngineRequest) -> Continuation:
        return Continuation.SAME

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[Take]:
        if self.failures:
            raise self.failures.pop(0)
        done = len(request.output_token_ids)
        left = tokens_of(request)[done:]

        async def take() -> EngineOutput:
            reason = FinishReason.LENGTH
            return EngineOutput(request_id=request.request_id, token_ids=left, finish_reason=reason)

        yield take


def requests_of(*replicas: FakeReplica) -> tuple[FleetRequests, list[RoutingEvent]]:
    requests = FleetRequests(Members([cast("Replica", each) for each in replicas]))
    profile = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(profile, CostModel)
    limits = [Limits(max_running=4, kv_tokens=4096)] * len(replicas)
    costs = profile_to_json(profile)
    events: list[RoutingEvent] = []
    requests.routing = LiveRouting(
        [Began(policy="auto", limits=limits, costs=costs, mean_tokens=64.0)], events.append
    )
    return requests, events


def busy() -> BackendBusyError:
    return BackendBusyError("too many", kind="requests", retry_after_s=9)


async def answer(requests: FleetRequests, request: EngineRequest) -> list[int]:
    return [token async for output in requests.generate(request) for token in output.token_ids]


def test_a_request_that_lost_its_replica_is_not_dropped_where_others_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraplex.server.fleet.fleet_requests._BUSY_S", 0.0)
    died = EngineDeadError("it died")
    replicas = [FakeReplica(died, busy(), busy()), FakeReplica(died, busy(), busy())]
    requests, _ = requests_of(*replicas)
    request = request_of("r1")
    assert asyncio.run(answer(requests, request)) == list(tokens_of(request))


def test_a_new_request_that_a_replica_refuses_is_served_by_another() -> None:
    requests, events = requests_of(FakeReplica(busy()), FakeReplica(busy()), FakeReplica())
    request = request_of("r1")
    assert asyncio.run(answer(requests, request)) == list(tokens_of(request))
    assert len([event for event in events if isinstance(event, Sent)]) == 3


def test_a_new_request_that_all_replicas_refuse_is_refused_at_once() -> None:
    replicas = [FakeReplica(busy(), busy()) for _ in range(3)]
    requests, _ = requests_of(*replicas)
    with pytest.raises(QueueFullError):
        asyncio.run(answer(requests, request_of("r1")))
    assert [len(each.failures) for each in replicas] == [1, 1, 1], "each was asked once"


def test_a_fleet_predicts_by_the_replica_that_its_router_would_choose() -> None:
    requests, events = requests_of(FakeReplica(), FakeReplica(), FakeReplica())
    routing = requests.routing
    assert routing is not None
    idle = requests.forecast(None, 100, NOBODY)
    assert idle is not None
    assert idle.is_idle
    for number in range(40):
        before = len(events)
        predicted = requests.forecast(None, 100, NOBODY)
        assert len(events) == before, "nothing was decided"
        replica = routing.route(f"r{number}", None, 100)
        assert predicted is not None
        load = routing.view.load.replica(replica)
        assert predicted.is_idle == (load.num_running + load.num_waiting == 1)
    assert predicted.ttft_s > idle.ttft_s
    assert requests.forecast("never added", 100, NOBODY) is None
    assert [event.replica for event in events if isinstance(event, Sent)][:3] == [0, 1, 2]


def test_a_fleet_counts_the_requests_of_tenants_by_replica() -> None:
    requests, events = requests_of(FakeReplica(busy()), FakeReplica())
    routing = requests.routing
    assert routing is not None
    request = replace(request_of("r1"), tenant="acme")

    async def scenario() -> None:
        async for _ in requests.generate(request):
            counts.append(dict(routing.view.load.of_tenant("acme")))

    counts: list[dict[int, int]] = []
    asyncio.run(scenario())
    sent = [event for event in events if isinstance(event, Sent)]
    assert [event.tenant for event in sent] == ["acme", "acme"], "again, by another replica"
    assert counts == [{sent[-1].replica: 1}]
    assert routing.view.load.of_tenant("acme") == {}


def test_a_fleet_without_replicas_predicts_nothing() -> None:
    replica = FakeReplica()
    requests, _ = requests_of(replica)
    replica.healthy = False
    replica.status = EngineStatus(state=EngineState.FAILED, message="gone", num_restarts=0, pid=None)
    assert requests.forecast(None, 100, NOBODY) is None
