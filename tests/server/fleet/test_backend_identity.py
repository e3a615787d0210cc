"""Identifying the server at a backend's address, and the message for one that cannot be used."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from pathlib import Path

import pytest
from aiohttp import ClientConnectionResetError, ClientOSError, ClientPayloadError, web
from replicas import BASE, replica_of, run, spec_in, started
from server_fixtures import SHAPE
from vllm_dialect import Behaviour, VllmDialect

from loraplex.fleet.policy import Policy
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet import backend_http
from loraplex.server.fleet.backend_http import BackendAddress, BackendError
from loraplex.server.fleet.backend_identity import ExpectedBase
from loraplex.server.fleet.backend_replicas import Backends, backend_fleet
from loraplex.server.fleet.fleet_engine import FleetEngine


def fleet_behind(url: str, key: str | None = None) -> FleetEngine:
    return backend_fleet(
        Backends(urls=(url,), api_key=key), base_names=[BASE], shape=SHAPE, policy=Policy.of("round-robin")
    )


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
            look = fleet_behind(server.url, key)._setup.look
            assert look is not None
            with pytest.raises(BackendError, match=re.escape(str(caught.value))):
                await look(0)
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


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "what answers at http://HERE does not speak HTTP; start the server, or"),
        (b"", "http://HERE closed the connection without an answer; start the server, or"),
    ],
)
def test_what_does_not_speak_http_is_said_so(sent: bytes, message: str) -> None:
    async def scenario() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(sent)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        here = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BackendError) as caught:
            await replica_of(f"http://{here}").start()
        assert str(caught.value).startswith(message.replace("HERE", here))
        server.close()

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


@pytest.mark.parametrize("has_dead", [True, False])
def test_a_fleet_that_cannot_start_says_what_is_wrong_with_each_server(
    tmp_path: Path, has_dead: bool
) -> None:
    """The most specific reason comes first; callers that add adapters meanwhile get it too."""

    async def scenario() -> None:
        async with VllmDialect() as dead:
            pass
        async with VllmDialect(Behaviour(api_key="another")) as server:
            fleet = backend_fleet(
                Backends(urls=(dead.url, server.url) if has_dead else (server.url,), api_key="mine"),
                base_names=[BASE],
                shape=SHAPE,
                policy=Policy.of("round-robin"),
            )
            adding = asyncio.create_task(fleet.add_adapter(spec_in(tmp_path / "one")))
            with pytest.raises(BackendError) as caught:
                await fleet.start(add_adapters=adding)
            with pytest.raises(BackendError) as caught_adding:
                await adding
            message, own = str(caught.value), f"the server at {server.url} refuses the API key (HTTP 401); "
            assert str(caught_adding.value) == message
            if has_dead:
                assert message.startswith(f"none of the 2 servers can be used: (1) {own}")
                assert f"; (2) nothing answers at {dead.url} (Connection refused); start the" in message
            else:
                assert message.startswith(own)

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


def test_the_login_in_an_address_is_used_and_not_shown() -> None:
    address = BackendAddress(url="http://me:secret@127.0.0.1:1")
    assert address.url == "http://me:secret@127.0.0.1:1"
    assert backend_http.BackendHttp(address).url == "http://****@127.0.0.1:1"
    with pytest.raises(BackendError) as caught:
        BackendAddress(url="http://me:secret@host?token=secret")
    assert "secret" not in str(caught.value)


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


def test_a_connection_that_is_cut_is_said_without_the_words_of_http_libraries() -> None:
    http = backend_http.BackendHttp(BackendAddress(url="http://127.0.0.1:1"))
    cut = http.unreachable(
        ClientPayloadError("Response payload is not completed: <TransferEncodingError: 400>")
    )
    assert str(cut) == "the connection to http://127.0.0.1:1 was cut in the middle of an answer"
    reset = http.unreachable(ClientConnectionResetError("Cannot write to closing transport"))
    assert str(reset) == "the connection to http://127.0.0.1:1 was reset"
    broken = http.unreachable(ClientOSError(errno.ECONNRESET, "[Errno 104] Connection reset by peer"))
    assert str(broken) == "the connection to http://127.0.0.1:1 broke (Connection reset by peer)"
