"""Requests on a server with vLLM's API: what is sent, what comes back, and what breaks."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from replicas import BASE, answer, request_for, run, started, until
from vllm_dialect import EOS, Behaviour, VllmDialect, tokens_of

from loraplex.core.errors import (
    CapacityError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    RequestMovedError,
)
from loraplex.core.request import FinishReason, TokenLogprob
from loraplex.core.structured_output import OutputKind, StructuredOutput
from loraplex.server.engine_status import EngineState
from loraplex.server.errors import describe
from loraplex.server.replica import Continuation


def test_tokens_come_without_the_one_that_stopped_them() -> None:
    async def scenario() -> None:
        does = Behaviour(eos_after=5, tells_cached=True)
        async with VllmDialect(does) as server, started(server.url) as replica:
            output = await answer(replica, request_for([5, 6], eos=(EOS,), stop_token_ids=(9,)))
            assert list(output.token_ids) == tokens_of(BASE, [5, 6], 5)
            assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, EOS)
            assert output.num_cached_tokens == 1
            output = await answer(replica, request_for([5, 6], max_tokens=3))
            assert (output.finish_reason, output.stop_token_id) == (FinishReason.LENGTH, None)
            assert len(output.token_ids) == 3

    run(scenario())


@pytest.mark.parametrize("eos_after", [None, 2])
def test_logprobs_are_ours(eos_after: int | None) -> None:
    async def scenario() -> None:
        async with VllmDialect(Behaviour(eos_after=eos_after)) as server, started(server.url) as replica:
            request = request_for([5, 6], max_tokens=3, logprobs=1, prompt_logprobs=2)
            output = await answer(replica, request)
            first = output.token_ids[0]
            assert len(output.logprobs) == len(output.token_ids)
            assert output.logprobs[0] == TokenLogprob(
                token_id=first, logprob=-math.inf, top=((first + 1, -0.5),)
            )
            assert output.prompt_logprobs == (
                None,
                TokenLogprob(token_id=6, logprob=-math.inf, top=((7, -0.5), (8, -1.5))),
            )
            output = await answer(replica, request_for([5, 6], prompt_logprobs=0))
            assert output.logprobs == ()
            assert output.prompt_logprobs == (None, TokenLogprob(token_id=6, logprob=-math.inf))

    run(scenario())


def test_all_that_decides_about_the_answer_is_sent_and_stop_strings_are_not() -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            params: dict[str, Any] = {
                "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "min_tokens": 2,
                "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25,
            }  # fmt: skip
            sent = request_for(
                [5], eos=(EOS, 3), stop=("x",), stop_token_ids=(3, 4), logit_bias=((7, 1.5),),
                bad_words=("a b",), **params,
            )  # fmt: skip
            await answer(replica, replace(sent, priority=3, cache_salt="acme"))
            long = request_for([5] * 200, ignore_eos=True, eos=(EOS,), max_tokens=None)
            await answer(replica, replace(long, traceparent="00-1-2-01"))
            assert server.traceparents[-2:] == [None, "00-1-2-01"]
            _, first, second = server.bodies("completions")
            assert {name: first[name] for name in params} == params
            assert first["stop_token_ids"] == [3, 4, EOS]
            assert first["logit_bias"] == {"7": 1.5}
            assert first["bad_words"] == ["a b"]
            assert not {"stop", "priority"} & first.keys(), "vLLM refuses priorities unless it goes by them"
            assert (first["cache_salt"], "cache_salt" in second) == ("acme", False)
            # vLLM takes missing fields from the model's generation_config.json.
            assert (second["temperature"], second["top_p"], second["top_k"]) == (0.0, 1.0, 0)
            assert (second["ignore_eos"], second["stop_token_ids"]) == (True, [])
            assert second["max_tokens"] == 56
            with pytest.raises(InvalidRequestError, match=r"temperature is 2\.5; the vLLM servers"):
                await answer(replica, request_for([5], temperature=2.5))

    run(scenario())


@pytest.mark.parametrize(
    ("failure", "kind", "status"),
    [
        ((500, "InternalServerError", "boom"), EngineDeadError, 503),
        ((503, "ServiceUnavailable", "boom"), EngineDeadError, 503),
        ((401, "Unauthorized", "boom"), EngineDeadError, 503),
        ((400, "BadRequestError", "boom"), InvalidRequestError, 400),
        ((422, "UnprocessableEntityError", "boom"), InvalidRequestError, 400),
        ((400, "BadRequestError", "This model's maximum context length is 256."), ContextLengthError, 400),
        ((429, "TooManyRequests", "boom"), CapacityError, 429),
    ],
)
def test_what_the_server_answers_instead_of_tokens(
    failure: tuple[int, str, str], kind: type[Exception], status: int
) -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            server.does.failure, server.does.retry_after = failure, "7"
            with pytest.raises(kind, match=failure[2]) as caught:
                await answer(replica, request_for([5]))
            shown = describe(caught.value)
            assert shown.status == status
            assert status != 429 or shown.headers["retry-after"] == "7"
            server.does.failure = None
            await until(lambda: replica.healthy)
            assert (await answer(replica, request_for([5]))).finish_reason is FinishReason.LENGTH

    run(scenario())


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("how", ["cut_after", "fail_after"])
def test_a_stream_that_breaks_raises_after_the_tokens_before(how: str, tokens: int) -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            setattr(server.does, how, tokens)
            seen: list[int] = []

            async def read() -> None:
                async for output in replica.generate(request_for([5])):
                    seen.extend(output.token_ids)

            with pytest.raises(EngineDeadError, match=r"was cut in the middle|EngineCore"):
                await read()
            assert seen == tokens_of(BASE, [5], 8)[: len(seen)]
            setattr(server.does, how, None)
            await until(lambda: replica.healthy)
            assert len((await answer(replica, request_for([5]))).token_ids) == 8

    run(scenario())


@pytest.mark.parametrize("health", [200, 500])
def test_a_connection_that_breaks_is_no_death_of_a_server_that_is_well(health: int) -> None:
    async def scenario() -> None:
        async with (
            VllmDialect(Behaviour(pause_after=2, cut_after=2)) as server,
            started(server.url, busy_interval_s=60.0, idle_interval_s=60.0) as replica,
        ):
            outputs = replica.generate(request_for([5]))
            seen: list[int] = []
            while len(seen) < 2:
                seen += (await anext(outputs)).token_ids
            server.does.health = health
            server.does.resume.set()
            with pytest.raises(EngineDeadError) as raised:
                await anext(outputs)
            assert isinstance(raised.value, RequestMovedError) == (health == 200)

    run(scenario())


@pytest.mark.parametrize("token", [-1, 400, 2**40])
@pytest.mark.parametrize("params", [{}, {"logprobs": 1}])
def test_a_token_that_the_base_model_does_not_have_cannot_be_read(token: int, params: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with (
            VllmDialect(Behaviour(wrong_token=token)) as server,
            started(server.url, vocab_size=400) as replica,
        ):
            said = f"token {token} is not in the base model's vocabulary.; start it with the same base model"
            with pytest.raises(EngineDeadError, match=said):
                await answer(replica, request_for([5], **params))
            server.does.wrong_token = 399
            assert 399 in (await answer(replica, request_for([5]))).token_ids

    run(scenario())


def test_closing_a_stream_closes_the_connection() -> None:
    async def scenario() -> None:
        async with VllmDialect(Behaviour(pause_after=2)) as server, started(server.url) as replica:
            async with aclosing(replica.generate(request_for([5]))) as outputs:
                async for output in outputs:
                    if output.token_ids:
                        break
            await until(lambda: server.num_cancelled > 0)
            assert server.num_cancelled == 1

    run(scenario())


def test_a_slow_consumer_gets_all_at_once() -> None:
    async def scenario() -> None:
        async with VllmDialect(Behaviour(pause_after=4)) as server, started(server.url) as replica:
            async with aclosing(replica.generate(request_for([5]))) as outputs:
                assert (await anext(outputs)).token_ids == ()  # queued
                await server.paused.wait()
                assert len((await anext(outputs)).token_ids) == 4
                server.does.resume.set()
                rest = [output async for output in outputs]
            assert sum(len(output.token_ids) for output in rest) == 4

    run(scenario())


def test_a_silent_server_that_is_well_is_waited_for() -> None:
    async def scenario() -> None:
        async with (
            VllmDialect(Behaviour(pause_after=2)) as server,
            started(server.url, silence_s=0.2) as replica,
        ):
            stream = asyncio.create_task(answer(replica, request_for([5])))
            await server.paused.wait()
            asked = server.num_asked
            await until(lambda: server.num_asked >= asked + 20)
            assert replica.healthy
            server.does.resume.set()
            assert len((await stream).token_ids) == 8

    run(scenario())


def test_a_server_that_answers_nothing_is_given_up_with_its_streams() -> None:
    async def scenario() -> None:
        async with (
            VllmDialect(Behaviour(pause_after=2)) as server,
            started(server.url, silence_s=0.2) as replica,
        ):
            stream = asyncio.create_task(answer(replica, request_for([5])))
            await server.paused.wait()
            server.does.is_deaf = True
            with pytest.raises(EngineDeadError, match=r"did not answer within 0\.2 s"):
                await stream
            assert (replica.status.state, replica.status.node) == (EngineState.UNREACHABLE, server.url)
            assert await replica.stats() == type(await replica.stats())()
            with pytest.raises(EngineDeadError, match="not ready yet"):
                await answer(replica, request_for([5]))
            server.does.is_deaf, server.does.pause_after = False, None
            await until(lambda: replica.healthy)
            assert len((await answer(replica, request_for([5]))).token_ids) == 8
            assert replica.status.num_restarts == 1

    run(scenario())


def test_a_server_that_is_not_well_takes_no_requests_until_it_is() -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url, ready_timeout_s=60.0) as replica:
            server.does.health = 503
            await until(lambda: not replica.healthy)
            assert "not well (HTTP 503" in replica.status.message
            waiting = asyncio.create_task(answer(replica, request_for([5])))
            server.does.health = 200
            assert len((await waiting).token_ids) == 8  # it was waited for

    run(scenario())


def test_a_server_that_comes_back_as_another_is_not_used() -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            await server.stop()
            await until(lambda: not replica.healthy)
            server.does.base_model = server.does.root = "other"
            await server.start()
            await until(lambda: "serves the base model 'other'" in replica.status.message)
            assert not replica.healthy
            server.does.base_model = BASE
            await until(lambda: replica.healthy)

    run(scenario())


def test_what_comes_of_a_request_that_began_elsewhere() -> None:
    kinds: list[tuple[Continuation, dict[str, Any]]] = [
        (Continuation.SAME, {"repetition_penalty": 1.5, "logprobs": 2}),
        (Continuation.SAME, {"temperature": 0.5}),  # only a sample was promised
        (Continuation.RESAMPLED, {"temperature": 0.5, "seed": 3}),
        (Continuation.IMPOSSIBLE, {"presence_penalty": 0.5}),
        (Continuation.IMPOSSIBLE, {"frequency_penalty": -0.5, "temperature": 0.5}),
        (Continuation.IMPOSSIBLE, {"prompt_logprobs": 1}),
        (Continuation.IMPOSSIBLE, {"bad_words": ("a",)}),
        (Continuation.IMPOSSIBLE, {"structured_output": StructuredOutput(OutputKind.REGEX, "a+")}),
    ]

    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            for expected, params in kinds:
                assert replica.continuation(request_for([5], **params)) is expected

    run(scenario())


def test_an_answer_that_began_elsewhere_is_a_part_of_the_prompt_and_of_no_length() -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            for params in ({"min_tokens": 5}, {"min_tokens": 2}, {"max_tokens": None}):
                request = replace(request_for([5, 6], **params), output_token_ids=(7, 8, 9))
                await answer(replica, request)
            _, *bodies = server.bodies("completions")
            assert [body["prompt"] for body in bodies] == [[5, 6, 7, 8, 9]] * 3
            assert [body["min_tokens"] for body in bodies] == [2, 0, 0]
            assert [body["max_tokens"] for body in bodies] == [5, 5, 256 - 5]
            assert not any("output_token_ids" in body for body in bodies)

    run(scenario())
