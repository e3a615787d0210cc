"""A server around the fake engine: in this process over ASGI, or on loopback in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI
from safetensors.numpy import save_file
from serving_fakes import FakeEngine, Script, make_spec, says, tiny_tokenizer

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.registry import AdapterRegistry
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.clock import Clock, ManualClock, MonotonicClock
from loraplex.core.request import EngineRequest
from loraplex.core.shape import ModelShape
from loraplex.engine.text_engine import TextEngine
from loraplex.server.adapter_service import AdapterService
from loraplex.server.app import create_app
from loraplex.server.batches.runner import BatchRunner
from loraplex.server.batches.store import BatchLimits, BatchStore
from loraplex.server.body import BodyLimits, BodyReader
from loraplex.server.connections import ConnectionBook, ConnectionLimits
from loraplex.server.deps import ServerDeps
from loraplex.server.engine_status import EngineState, EngineStatus, Fleet
from loraplex.server.http_protocol import BoundedHttpProtocol
from loraplex.server.metrics import ServerMetrics
from loraplex.server.remote_adapters import RemoteAdapters
from loraplex.server.served_adapter import ServedAdapter
from loraplex.server.tenants.keys import StoredKey
from loraplex.server.tenants.tenants import Tenants
from loraplex.server.tenants.tenants_file import parse_tenants
from loraplex.server.waiting import Forecaster, WaitingBook, WaitingLimits
from loraplex.server.web_guard import WebAccess

SHAPE = ModelShape(
    family="llama",
    num_layers=1,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=400,
    max_position=256,
)
USER = [{"role": "user", "content": "hi"}]


def write_adapter(path: Path, *, rank: int = 2, seed: int = 0, **config: Any) -> Path:
    """Write a real PEFT checkpoint for SHAPE; another seed is another version."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": rng.standard_normal((rank, 16)).astype(np.float32),
        f"{prefix}.lora_B.weight": rng.standard_normal((16, rank)).astype(np.float32),
    }
    save_file(tensors, path / WEIGHTS_FILE)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (path / CONFIG_FILE).write_text(json.dumps(settings))
    return path


def stored(key: str) -> str:
    """Return a tenant's key as the tenants file has it."""
    return f'"{StoredKey.of(key).text}"'


def status_of(engine: FakeEngine) -> EngineStatus:
    state = EngineState.RESTARTING if engine.dead else EngineState.READY
    return EngineStatus(state=state, message="the engine process died", num_restarts=0, pid=None)


@dataclass
class Served:
    """A server's parts, for tests to inspect."""

    app: FastAPI
    engine: FakeEngine
    service: AdapterService
    deps: ServerDeps


def make_server(
    tmp_path: Path,
    script: Callable[[EngineRequest], Script] | None = None,
    *,
    base_model: str = "base",
    api_keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    web: WebAccess | None = None,
    limits: BodyLimits | None = None,
    waiting: WaitingLimits | None = None,
    allowed: list[Path] | None = None,
    remote: RemoteAdapters | None = None,
    clock: Clock | None = None,
    forecaster: Forecaster | None = None,
    drain_timeout_s: float = 30.0,
    is_resampled: Callable[[str], bool] = lambda call_id: False,
    is_ready_without_adapters: bool = True,
    tenants: str | None = None,
    names: tuple[str, ...] = ("pirate", "poet"),
    batches: BatchLimits | None = None,
    make_engine: Callable[[Callable[[EngineRequest], Script]], FakeEngine] = FakeEngine,
    fleet: Fleet | None = None,
) -> Served:
    """Return a server of the adapters with these names. `tenants`: the text of its tenants file."""
    engine = make_engine(script or says("Hello world! How are you?"))
    service = AdapterService(
        base_model=base_model,
        engine=engine,
        registry=AdapterRegistry(tmp_path / "state", base_model),
        shape=SHAPE,
        allowed=AllowedPaths(allowed or []),
        remote=remote,
    )
    for name in names:
        spec = make_spec(f"version-of-{name}", path=tmp_path / name)
        engine.adapters[spec.version] = spec
        service._served[name] = ServedAdapter(name=name, spec=spec)
    deps = ServerDeps(
        text=TextEngine(engine=engine, tokenizer=tiny_tokenizer(), max_model_len=256, vocab_size=400),
        adapters=service,
        metrics=ServerMetrics(clock or ManualClock()),
        base_root="/models/base",
        engine_status=lambda: status_of(engine),
        api_keys=api_keys,
        admin_keys=admin_keys,
        web=web or WebAccess(),
        waiting=WaitingBook(waiting or WaitingLimits(), clock or ManualClock(), forecaster),
        bodies=BodyReader(limits or BodyLimits()),
        drain_timeout_s=drain_timeout_s,
        is_resampled=is_resampled,
        is_ready_without_adapters=is_ready_without_adapters,
        fleet=fleet,
        tenants=None
        if tenants is None
        else Tenants(parse_tenants(tenants, Path("tenants.toml")), clock or ManualClock()),
        batches=BatchStore(
            root=tmp_path / "state" / "batches", base_model=base_model, limits=batches or BatchLimits()
        ),
    )
    return Served(app=create_app(deps), engine=engine, service=service, deps=deps)


class Api:
    """Calls an application in this process. One event loop serves all calls, as in a server."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._runner = asyncio.Runner()

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(coroutine)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.request("POST", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.run(self.send(method, path, **options))

    async def send(
        self, method: str, path: str, *, peer: str = "127.0.0.1", **options: Any
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.served.app, client=(peer, 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **options)

    def close(self) -> None:
        self.run(self.served.service.close())
        self.served.service.registry.close()
        self._runner.close()


def events(response: httpx.Response) -> list[Any]:
    """Return the data of a server-sent event stream; its last event must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def live(served: Served, connections: ConnectionLimits | None = None) -> Iterator[str]:
    """Run the server on a free port of loopback, in a thread; yields its URL."""
    book = ConnectionBook(connections or ConnectionLimits(), MonotonicClock())
    config = uvicorn.Config(
        served.app,
        http=partial(BoundedHttpProtocol, book=book),  # type: ignore[arg-type]
        host="127.0.0.1",
        port=0,
        ws="none",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config, served)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert server.ready.wait(30)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        served.service.registry.close()


class _Server(uvicorn.Server):
    """Runs batches, too."""

    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self.served = served
        self.ready = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        deps = self.served.deps
        assert deps.batches is not None
        self.batches = asyncio.create_task(BatchRunner(deps, deps.batches).run())
        self.ready.set()

    async def shutdown(self, sockets: Any = None) -> None:
        self.batches.cancel()
        await asyncio.wait([self.batches])
        await super().shutdown(sockets)
