"""A server listens from the first moment, and is ready when its engine is."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import fake_core
import httpx
import pytest
import tiny
from engine_client_harness import client_of, until, wait_for_state
from engine_client_harness import run as run_scenario
from engine_client_harness import running as running_client
from rich.console import Console
from serving_fakes import hf_tokenizer

from loraplex.core import errors
from loraplex.core.clock import ManualClock
from loraplex.engine.options import EngineOptions
from loraplex.server import run
from loraplex.server.banner import Announcer
from loraplex.server.engine_status import EngineState
from loraplex.server.health import FrontApp, ready_response
from loraplex.server.web_guard import WebAccess

EVIL = "https://evil.example"
ORIGIN = "origin_not_allowed"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a model whose start is blocked."""
    monkeypatch.setenv("PYTHONPATH", fake_core.CHILD_ENV["PYTHONPATH"])
    folder = tmp_path / "model"
    base = tiny.save_model(folder, vocab_size=400)
    hf_tokenizer().save_pretrained(folder)
    tiny.save_adapter(tmp_path / "adapters" / "one", base, rank=4)
    for gate in (fake_core.LOADING, fake_core.CAPTURING):
        (folder / gate).touch()
    return folder


class Server:
    """`serve` in this event loop, without its signals."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.said = io.StringIO()
        self.stop = asyncio.Event()
        self.announcer = Announcer(console=Console(file=self.said, soft_wrap=True))
        options = run.ServeOptions(
            engine=EngineOptions(model=str(folder)),
            adapter_dirs=(folder.parent / "adapters",),
            port=port,
            state_dir=folder.parent / "state",
            engine_factory="fake_core:build_gated",
        )
        self.task = asyncio.create_task(run._serve_until(self.stop, options, self.announcer))
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers=headers)

    async def listens(self) -> bool:
        assert not self.task.done()
        with suppress(httpx.ConnectError):
            return (await self.get("/health/live")).status_code == 200
        return False

    async def says(self, **expected: Any) -> bool:
        """Return whether /health reports that it is not ready, with these fields."""
        response = await self.get("/health")
        assert response.status_code == 503
        return expected.items() <= response.json().items()


@asynccontextmanager
async def starting(folder: Path) -> AsyncIterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        await server.client.aclose()
        server.task.cancel()
        await asyncio.wait([server.task])


async def check_front(server: Server) -> None:
    """A starting server keeps web pages away and gives requests their ids, as it does later."""
    for path in ("/health/live", "/health", "/v1/models"):
        for headers, code in (({"host": "evil.example"}, "host_not_allowed"), ({"origin": EVIL}, ORIGIN)):
            response = await server.get(path, **headers)
            assert (response.status_code, response.json()["error"]["code"]) == (403, code)
            assert response.headers["x-request-id"]
    for path in ("/health/live", "/v1/models"):
        assert (await server.get(path, **{"x-request-id": "mine"})).headers["x-request-id"] == "mine"


def test_a_server_says_how_far_its_start_has_come(folder: Path) -> None:
    async def scenario() -> None:
        async with starting(folder) as server:
            await until(server.listens)
            await until(lambda: server.says(status="starting", phase="reading weights", fraction=0.25))
            response = await server.get("/v1/models")
            assert response.status_code == 503
            assert response.headers["retry-after"]
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "starting")
            assert error["message"] == "the server is starting (reading weights, 25%); try again later"
            assert (await server.get("/health/ready")).json() == (await server.get("/health")).json()
            await check_front(server)

            (folder / fake_core.LOADING).unlink()
            await until(lambda: server.says(phase="capturing graphs", fraction=0.0))
            assert not server.announcer.is_ready
            (folder / fake_core.CAPTURING).unlink()

            async def ready() -> bool:
                return (await server.get("/health")).status_code == 200

            await until(ready)
            for path in ("/health/ready", "/health/live"):
                assert (await server.get(path)).json() == {"status": "ok"}
            assert [model["id"] for model in (await server.get("/v1/models")).json()["data"]][1:] == ["one"]
            server.stop.set()
            await server.task
        lines = server.said.getvalue().splitlines()
        phases = [line.rpartition(": ")[2] for line in lines if line.startswith("loading ")]
        expected = ["reading weights, 25%", "capturing graphs, 0%"]
        assert phases == expected, "each is said once where no terminal is"

    run_scenario(scenario())


def test_requests_of_a_server_that_starts_are_logged_as_later_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "loraplex")
    front = FrontApp(web=WebAccess(), clock=ManualClock())

    async def scenario() -> None:
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for path in ("/v1/completions", "/v1/load_lora_adapter"):
                assert (await client.post(path)).status_code == 503
            assert (await client.get("/health/live")).status_code == 200
            assert (await client.get("/health", headers={"Host": "evil.example"})).status_code == 403

    run_scenario(scenario())
    assert [
        (record.name.rpartition(".")[2], record.levelname, record.message) for record in caplog.records
    ] == [
        ("request", "WARNING", "failed"),
        ("audit", "WARNING", "adapter load failed"),
        ("request", "DEBUG", "failed"),
        ("request", "DEBUG", "answered"),
        ("request", "INFO", "refused"),
    ]


def test_a_start_that_fails_ends_the_server_with_its_reason(folder: Path) -> None:
    async def scenario() -> None:
        (folder / fake_core.LOADING).unlink()
        async with starting(folder) as server:
            with pytest.raises(errors.ModelError, match="this model has no layers"):
                await server.task
            with pytest.raises(httpx.ConnectError):
                await server.get("/health/live")

    run_scenario(scenario())


def test_a_start_that_is_cancelled_leaves_no_engine(folder: Path) -> None:
    async def scenario() -> None:
        async with starting(folder) as server:
            await until(server.listens)
            server.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await server.task

    run_scenario(scenario())


def test_an_engine_that_dies_while_adapters_are_added_ends_the_start() -> None:
    """Otherwise the start would wait for a reply that never comes."""

    async def scenario() -> None:
        client = client_of()

        async def add_for_ever() -> None:
            await client.add_adapter(fake_core.spec_of("v1"))
            assert client._child is not None
            os.kill(client._child.pid, 9)
            await asyncio.Event().wait()

        with pytest.raises(errors.EngineDeadError, match="SIGKILL"):
            await client.start(add_adapters=add_for_ever())
        await client.close()

    run_scenario(scenario())


def test_a_restart_is_not_ready_before_it_is_prepared(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        async with running_client(fake_core.FakeOptions(preparations=(gate,))) as client:
            gate.touch()
            os.kill(client.status.pid or 0, 9)
            await wait_for_state(client, EngineState.RESTARTING)

            async def prepares() -> bool:
                return client.status.phase == "capturing graphs"

            await until(prepares)
            response = ready_response(client.status)
            assert response.status_code == 503
            assert b"it is being restarted (capturing graphs, 0%)" in response.body
            gate.unlink()
            await wait_for_state(client, EngineState.READY)
            assert ready_response(client.status).status_code == 200

    run_scenario(scenario())
