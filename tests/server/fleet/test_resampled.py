"""Answers that no replica can continue exactly: some are continued with new draws, others end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import pytest
from engine_fleets import costs
from fake_core import request_of, tokens_of
from fake_replicas import FakeReplica
from replicas import run
from server_fixtures import Api, events

from loraplex.core.errors import EngineDeadError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.fleet_requests import FleetRequests
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.routing_events import Began, Limits
from loraplex.server.replica import Continuation


class Mortal(FakeReplica):
    """Continues answers in one way, and dies after a token of those that it begins."""

    def __init__(self, way: Continuation) -> None:
        super().__init__()
        self.state = EngineState.READY
        self._way = way

    def continuation(self, request: EngineRequest) -> Continuation:
        return self._way

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        async for output in super().generate(request):
            yield output
            if output.token_ids and not request.output_token_ids:
                raise EngineDeadError("died")


def requests_on(way: Continuation) -> FleetRequests:
    requests = FleetRequests(Members([Mortal(way), Mortal(way)]))
    limits = [Limits(max_running=4, kv_tokens=4096)] * 2
    began = Began(policy="auto", limits=limits, costs=profile_to_json(costs()), mean_tokens=64.0)
    requests.routing = LiveRouting([began])
    return requests


async def tokens(requests: FleetRequests, request: EngineRequest) -> tuple[int, ...]:
    return tuple([token async for output in requests.generate(request) for token in output.token_ids])


@pytest.mark.parametrize("way", [Continuation.SAME, Continuation.RESAMPLED])
def test_calls_that_go_on_with_other_draws_are_marked(
    way: Continuation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.server.fleet.fleet_requests._MAX_RESAMPLED", 2)

    async def scenario() -> None:
        requests, is_marked = requests_on(way), way is Continuation.RESAMPLED
        for number in range(3):
            request = request_of(f"cmpl-{number}-0", max_tokens=5)
            assert await tokens(requests, request) == tokens_of(request)
            assert requests.is_resampled(f"cmpl-{number}") is is_marked
        assert not requests.is_resampled("cmpl-0"), "only the latest are remembered"

    run(scenario())


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(max_tokens=5, presence_penalty=0.5), "penalty would not count the answer so far"),
        (SamplingParams(max_tokens=5, prompt_logprobs=1), "log-probabilities of its prompt"),
    ],
)
def test_an_answer_that_cannot_go_on_says_why(params: SamplingParams, reason: str) -> None:
    async def scenario() -> None:
        request = EngineRequest(request_id="cmpl-1-0", prompt_token_ids=[5], params=params)
        with pytest.raises(EngineDeadError, match=f"{reason}.*send the request again"):
            await tokens(requests_on(Continuation.IMPOSSIBLE), request)

    run(scenario())


def test_usage_and_the_log_say_that_an_answer_is_not_reproducible(
    make_api: Callable[..., Api], caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "base", "prompt": "hi", "seed": 3, "temperature": 1.0}
    assert "reproducible" not in make_api().post("/v1/completions", body).json()["usage"]
    asked: list[str] = []

    def is_resampled(call_id: str) -> bool:
        asked.append(call_id)
        return True

    api = make_api(is_resampled=is_resampled)
    with caplog.at_level("INFO", "loraplex.request"):
        answer = api.post("/v1/completions", body).json()
    assert answer["usage"]["reproducible"] is False
    assert set(asked) == {answer["id"]}
    assert [record.fields["reproducible"] for record in caplog.records] == [False]
    streamed = api.post(
        "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert events(streamed)[-1]["usage"]["reproducible"] is False
