"""A replica in front of a server that speaks vLLM's dialect: what it says, what it refuses, what breaks."""

from __future__ import annotations

import asyncio
import math
import socket
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from replicas import answer, replica_of, request_for, run, started, until
from server_fixtures import SHAPE, write_adapter
from vllm_dialect import EOS, Behaviour, VllmDialect, tokens_of

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import (
    AdapterError,
    CapacityError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestMovedError,
    UnknownModelError,
)
from loraplex.core.request import FinishReason, TokenLogprob
from loraplex.fleet.policy import Policy
from loraplex.server.engine_status import EngineState
from loraplex.server.errors import describe
from loraplex.server.fleet import backend_http
from loraplex.server.fleet.backend_adapters import adapter_name
from loraplex.server.fleet.backend_errors import AdapterMissingError
from loraplex.server.fleet.backend_http import BackendAddress, BackendError
from loraplex.server.fleet.backend_identity import ExpectedBase
from loraplex.server.fleet.backend_replicas import Backends, backend_fleet
from loraplex.server.replica import Continuation

BASE = "acme/tiny"


def spec_in(folder: Path, **options: Any) -> AdapterSpec:
    return read_adapter(write_adapter(folder, **options), SHAPE)


@pytest.mark.parametrize(
    ("behaviour", "key", "message"),
    [
        (
            Behaviour(api_key="secret"),
            None,
            "asks for an API key (HTTP 401); give the one that it was started with as --backend-key",
        ),
        (
            Behaviour(api_key="secret"),
            "wrong",
            "refuses the API key (HTTP 401); give the one that it was started with as --backend-key",
        ),
        (
            Behaviour(base_model="other", root="/m/other"),
            None,
            "serves the base model 'other', not 'acme/tiny'",
        ),
        (Behaviour(has_lora=False), None, "runs without LoRA; start it with --enable-lora"),
        (Behaviour(allows_updates=False), None, "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        (Behaviour(owned_by="llamacpp"), None, "neither vLLM nor loraplex"),
        (Behaviour(knows_token_ids=False), None, "does not answer in token ids"),
        (Behaviour(failure=(500, "InternalServerError", "out of memory")), None, "HTTP 500: out of memory"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_the_fix(
    behaviour: Behaviour, key: str | None, message: str
) -> None:
    async def scenario() -> None:
        async with VllmDialect(behaviour) as server:
            replica = replica_of(server.url, key=key)
            with pytest.raises(BackendError) as caught:
                await replica.start()
            assert message in str(caught.value)
            assert server.url in str(caught.value)
            assert "secret" not in str(caught.value)
            assert server.adapters == {}
            assert replica.status.state is EngineState.FAILED
            await replica.close()

    run(scenario())


def test_nobody_there_is_said_so() -> None:
    async def scenario() -> None:
        async with VllmDialect() as server:
            url = server.url
        with pytest.raises(BackendError, match=r"nothing answers at .*Connection refused.*start the server"):
            await replica_of(url).start()

    run(scenario())


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, "not here", "is no OpenAI server"),
        (200, "<html>", "is no OpenAI server"),
        (503, "", "not ready"),
        (308, "", r"redirects to https://elsewhere/v1/models; give the address behind it"),
        (200, " " * 2**20, r"goes on after 0 MiB; start the server, or correct the address"),
    ],
)
def test_another_kind_of_server_is_said_so(
    status: int, body: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_http, "_MAX_ANSWER_BYTES", 2**20 - 1)

    async def scenario() -> None:
        async def everything(request: web.Request) -> web.Response:
            headers = {"Location": "https://elsewhere/v1/models"} if status == 308 else {}
            return web.Response(status=status, text=body, headers=headers)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", everything)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with pytest.raises(BackendError, match=message):
            await replica_of(f"http://127.0.0.1:{runner.addresses[0][1]}").start()
        await runner.cleanup()

    run(scenario())


def test_a_server_that_does_not_answer_is_said_so() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as slow:  # connections are made, and never answered
            replica = replica_of(f"http://127.0.0.1:{slow.getsockname()[1]}", call_timeout_s=0.1)
            with pytest.raises(
                BackendError, match=r"did not answer within 0\.1 s; start the server, or correct"
            ):
                await replica.start()

    run(scenario())


def test_a_fleet_that_cannot_start_says_what_is_wrong_with_the_server_it_fails_for(tmp_path: Path) -> None:
    """Also to who adds adapters meanwhile: the other servers, which are left, have only that to say."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as slow:  # connections are made, and never answered
            async with VllmDialect(Behaviour(api_key="another")) as server:
                urls = (f"http://127.0.0.1:{slow.getsockname()[1]}", server.url)
                fleet = backend_fleet(
                    Backends(urls=urls, api_key="mine"),
                    base_names=[BASE],
                    shape=SHAPE,
                    policy=Policy.of("round-robin"),
                )
                adding = asyncio.create_task(fleet.add_adapter(spec_in(tmp_path / "one")))
                with pytest.raises(BackendError, match="refuses the API key"):
                    await fleet.start(add_adapters=adding)
                with pytest.raises(BackendError, match="refuses the API key"):
                    await adding

    run(scenario())


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host:99999", "http://a b"]
)
def test_what_is_no_address_is_said_so(url: str) -> None:
    with pytest.raises(BackendError, match="write it as http://HOST:PORT"):
        BackendAddress(url=url)


def test_addresses_may_end_in_v1_and_keys_are_not_shown() -> None:
    address = BackendAddress(url=" https://host/prefix/v1/ ", api_key="secret", admin_key="secret")
    assert address.url == "https://host/prefix"
    assert "secret" not in repr(address)


def test_a_server_tells_its_sizes_and_the_model_may_be_known_by_its_folder() -> None:
    async def scenario() -> None:
        async with (
            VllmDialect(Behaviour(base_model="house-model", root="/somewhere/Tiny")) as server,
            started(server.url, ExpectedBase.of("acme/tiny")) as replica,
        ):
            assert replica.info is not None
            assert (replica.info.max_model_len, replica.info.num_kv_blocks) == (256, 400)
            assert replica.healthy
            stats = await replica.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (3, 2, 1)
            assert (stats.num_kv_blocks, stats.num_kv_blocks_used) == (400, 100)
            assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (120, 48)

    run(scenario())


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
                [5], eos=(EOS, 3), stop=("x",), stop_token_ids=(3, 4), logit_bias=((7, 1.5),), **params
            )
            await answer(replica, sent)
            await answer(replica, request_for([5] * 200, ignore_eos=True, eos=(EOS,), max_tokens=None))
            _, first, second = server.bodies("completions")
            assert {name: first[name] for name in params} == params
            assert first["stop_token_ids"] == [3, 4, EOS]
            assert first["logit_bias"] == {"7": 1.5}
            assert "stop" not in first
            # What is left out is taken from the model's generation_config.json there.
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

            with pytest.raises(EngineDeadError, match=r"broke|EngineCore"):
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
            assert replica.status.state is EngineState.RESTARTING
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


def test_adapters_answer_under_names_that_hold_their_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            with pytest.raises(UnknownModelError):
                await answer(replica, request_for([5], adapter=spec.version))
            await replica.add_adapter(spec)
            await replica.add_adapter(spec)
            assert server.adapters == {adapter_name(spec.version): str(tmp_path / "one")}
            output = await answer(replica, request_for([5], adapter=spec.version))
            assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            await replica.remove_adapter(spec.version)
            await replica.remove_adapter(spec.version)
            assert server.adapters == {}
            with pytest.raises(UnknownModelError):
                await answer(replica, request_for([5], adapter=spec.version))

    run(scenario())


def test_a_version_that_the_registry_has_stays_for_the_other_front_of_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        kept, given_up = spec_in(tmp_path / "a"), spec_in(tmp_path / "b", seed=1)
        async with (
            VllmDialect() as server,
            started(server.url, is_registered=lambda version: version == kept.version) as replica,
        ):
            for spec in (kept, given_up):
                await replica.add_adapter(spec)
            for spec in (kept, given_up):
                await replica.remove_adapter(spec.version)
            assert set(server.adapters) == {adapter_name(kept.version)}
            with pytest.raises(UnknownModelError):
                await answer(replica, request_for([5], adapter=kept.version))

    run(scenario())


def test_one_load_however_many_ask(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec, gate = spec_in(tmp_path / "one"), asyncio.Event()
        async with VllmDialect() as server, started(server.url) as replica:
            server.does.load_gate = gate
            adding = [asyncio.create_task(replica.add_adapter(spec)) for _ in range(100)]
            await until(lambda: len(server.bodies("/load_lora_adapter")) == 2)  # the first is the probe
            adding.pop().cancel()  # whoever goes away does not take it along
            answering = asyncio.create_task(answer(replica, request_for([5], adapter=spec.version)))
            gate.set()
            await asyncio.gather(*adding[:-1])
            assert (await answering).finish_reason is FinishReason.LENGTH
            assert len(server.bodies("/load_lora_adapter")) == 2

    run(scenario())


def test_an_adapter_that_is_loaded_already_is_read_again_and_no_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            server.adapters[adapter_name(spec.version)] = "/a/folder/that/is/gone"
            await replica.add_adapter(spec)
            assert server.adapters == {adapter_name(spec.version): str(tmp_path / "one")}

    run(scenario())


def test_adapters_that_the_server_refuses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with VllmDialect() as server, started(server.url) as replica:
            large = spec_in(tmp_path / "large", rank=16, seed=3)
            server.does.max_lora_rank = 8
            with pytest.raises(
                AdapterError, match=r"no adapter of rank 16 .*start it with --max-lora-rank 16"
            ):
                await replica.add_adapter(large)
            changed = spec_in(tmp_path / "changed")
            write_adapter(tmp_path / "changed", seed=9)
            with pytest.raises(
                AdapterError, match="have changed since they were read; load the adapter again"
            ):
                await replica.add_adapter(changed)
            assert server.adapters == {}
            assert replica.healthy
        async with (
            VllmDialect() as server,
            started(server.url, seen_path=lambda spec: f"/elsewhere/{spec.version}") as replica,
        ):
            with pytest.raises(AdapterError, match=r"finds no adapter at /elsewhere/.*see the same folders"):
                await replica.add_adapter(spec_in(tmp_path / "one"))

    run(scenario())


def test_adapters_come_back_after_the_server_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        specs = [spec_in(tmp_path / str(seed), seed=seed) for seed in range(4)]
        kept, removed, late, broken = specs
        async with VllmDialect() as server, started(server.url) as replica:
            for spec in (kept, removed, broken):
                await replica.add_adapter(spec)
            await server.stop()
            with pytest.raises(EngineDeadError):
                await answer(replica, request_for([5], adapter=kept.version))
            await until(lambda: not replica.healthy)
            await replica.add_adapter(late)  # only noted
            await replica.remove_adapter(removed.version)
            write_adapter(broken.path, seed=99)
            await server.start()
            await until(lambda: replica.healthy)
            assert server.adapters.keys() == {adapter_name(kept.version), adapter_name(late.version)}
            for spec in (kept, late):
                output = await answer(replica, request_for([5], adapter=spec.version))
                assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            with pytest.raises(
                EngineDeadError, match=r"does not have adapter version .* files .* have changed"
            ):
                await answer(replica, request_for([5], adapter=broken.version))
            assert replica.healthy

    run(scenario())


def test_an_adapter_that_is_refused_for_a_while_is_served_elsewhere_and_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            server.adapters.clear()
            server.does.max_lora_rank = 4  # it was started again, with another option
            with pytest.raises(AdapterMissingError, match=r"start it with --max-lora-rank 8"):
                await answer(replica, request_for([5], adapter=spec.version))
            assert replica.healthy
            server.does.max_lora_rank = 8
            output = await answer(replica, request_for([5], adapter=spec.version))
            assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)

    run(scenario())


def test_no_client_hears_that_one_of_the_servers_refuses_an_adapter_that_it_had(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one", rank=8)
        async with VllmDialect() as one, VllmDialect() as other:
            backends = Backends(urls=(one.url, other.url))
            policy = Policy.of("round-robin")
            fleet = backend_fleet(backends, base_names=[BASE], shape=SHAPE, policy=policy)
            await fleet.start()
            await fleet.add_adapter(spec)
            one.adapters.clear()
            one.does.max_lora_rank = 4
            for _ in range(4):
                output = await answer(fleet, request_for([5], adapter=spec.version))
                assert list(output.token_ids) == tokens_of(adapter_name(spec.version), [5], 8)
            await fleet.close()

    run(scenario())


def test_an_adapter_that_is_gone_unnoticed_is_loaded_again_for_the_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect() as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            server.adapters.clear()
            output = await answer(replica, request_for([5], adapter=spec.version))
            assert output.finish_reason is FinishReason.LENGTH

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


def test_adapters_may_be_added_while_it_starts_and_streams_end_when_it_is_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect(Behaviour(pause_after=1)) as server:
            replica = replica_of(server.url)
            await replica.start(add_adapters=replica.add_adapter(spec))
            assert list(server.adapters) == [adapter_name(spec.version)]
            stream = asyncio.create_task(answer(replica, request_for([5], adapter=spec.version)))
            await server.paused.wait()
            await replica.close()
            await replica.close()
            with pytest.raises(EngineClosedError):
                await stream
            with pytest.raises(EngineClosedError):
                await answer(replica, request_for([5]))
            await until(lambda: server.num_cancelled == 1)
            assert list(server.adapters) == [adapter_name(spec.version)]  # the next fleet finds it

    run(scenario())


def test_a_removal_waits_for_requests_in_flight_and_is_overtaken_by_an_addition(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = spec_in(tmp_path / "one")
        async with VllmDialect(Behaviour(pause_after=1)) as server, started(server.url) as replica:
            await replica.add_adapter(spec)
            stream = asyncio.create_task(answer(replica, request_for([5], adapter=spec.version)))
            await server.paused.wait()
            removal = asyncio.create_task(replica.remove_adapter(spec.version))
            await asyncio.sleep(0)
            assert server.adapters
            await replica.add_adapter(spec)
            server.does.resume.set()
            await stream
            await removal
            assert server.adapters
            assert (await answer(replica, request_for([5], adapter=spec.version))).token_ids

    run(scenario())


def test_what_comes_of_a_request_that_began_elsewhere() -> None:
    kinds: list[tuple[Continuation, dict[str, Any]]] = [
        (Continuation.SAME, {"repetition_penalty": 1.5, "logprobs": 2}),
        (Continuation.SAME, {"temperature": 0.5}),  # nothing was promised but a sample
        (Continuation.RESAMPLED, {"temperature": 0.5, "seed": 3}),
        (Continuation.IMPOSSIBLE, {"presence_penalty": 0.5}),
        (Continuation.IMPOSSIBLE, {"frequency_penalty": -0.5, "temperature": 0.5}),
        (Continuation.IMPOSSIBLE, {"prompt_logprobs": 1}),
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
