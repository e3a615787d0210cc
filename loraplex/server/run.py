"""`serve`: an engine process, an HTTP server, and their orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvicorn

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.base_name import base_names
from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.hub import AllowedRepos
from loraplex.adapters.registry import AdapterRegistry, base_model_key
from loraplex.core.clock import MonotonicClock
from loraplex.core.errors import LoraplexError
from loraplex.engine.options import EngineOptions
from loraplex.engine.text_engine import TextEngine
from loraplex.engine.tokenizer import Tokenizer
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.source import resolve_model
from loraplex.server.adapter_service import AdapterService
from loraplex.server.adapter_startup import GivenAdapter, start_adapters
from loraplex.server.app import create_app
from loraplex.server.banner import Announcer
from loraplex.server.body import BodyLimits
from loraplex.server.deps import ServerDeps
from loraplex.server.engine_client import DEFAULT_FACTORY, EngineClient
from loraplex.server.health import FrontApp
from loraplex.server.hub_adapters import HubAdapters
from loraplex.server.metrics import ServerMetrics
from loraplex.server.protocol_ipc import StartProgress

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S: Final = 30
_LAST_WORDS_S: Final = 5.0
"""How long streams may take to send their error after the engine was closed under them."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """All a user may choose. `adapter_dirs` are served and open for loading, the allowed ones only open.

    `adapters` are served and open nothing; `allow_adapter_repos` are patterns of hub repositories.
    `engine_factory`: "module:name" of what builds the core in the engine process.
    """

    engine: EngineOptions
    served_model_name: str | None = None
    adapters: tuple[GivenAdapter, ...] = ()
    adapter_dirs: tuple[Path, ...] = ()
    allow_adapter_dirs: tuple[Path, ...] = ()
    allow_adapter_repos: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    state_dir: Path | None = None
    api_keys: tuple[str, ...] = ()
    limits: BodyLimits = field(default_factory=BodyLimits)
    shutdown_grace_s: float = 5.0
    engine_factory: str = DEFAULT_FACTORY


class AddressError(LoraplexError):
    """The address cannot be listened on."""


def serve(options: ServeOptions, announcer: Announcer | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Raises LoraplexError if it cannot start."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(options, announcer or Announcer()))


async def _serve(options: ServeOptions, announcer: Announcer) -> None:
    stop = asyncio.Event()
    with _signals(stop.set):
        serving = asyncio.create_task(_serve_until(stop, options, announcer))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not announcer.is_ready:
                announcer.stopping(num_in_flight=0, grace_s=0.0)
                serving.cancel()  # still loading: there is nobody to be polite to
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            if stop.is_set():
                announcer.stopped()
        finally:
            stopping.cancel()


async def _serve_until(stop: asyncio.Event, options: ServeOptions, announcer: Announcer) -> None:
    # Bound before the model is loaded: a port that is taken should not cost a minute to find out. Listened on
    # as well, so that supervisors and load balancers can tell a server that starts from one that is gone.
    with _bind(options.host, options.port) as listener:
        front = FrontApp()
        server = _Server(_uvicorn_config(front, options))
        listening = asyncio.create_task(_listen(server, listener, options))
        async with AsyncExitStack() as stack:
            try:
                await server.is_listening.wait()
                if not listening.done():
                    await _run(stop, server, front, listener.getsockname()[1], options, announcer, stack)
                await listening
            finally:
                server.should_exit = server.force_exit = True
                await asyncio.wait([listening])


async def _run(
    stop: asyncio.Event,
    server: _Server,
    front: FrontApp,
    port: int,
    options: ServeOptions,
    announcer: Announcer,
    stack: AsyncExitStack,
) -> None:
    """Start, then open the front to requests and leave them to it."""
    deps, client, notes = await _start(options, announcer, front, stack)
    front.app = create_app(deps)
    announcer.ready(
        host=options.host,
        port=port,
        base_model=deps.adapters.base_model,
        adapters=[adapter.name for adapter in deps.adapters.served()],
        notes=notes,
        needs_key=bool(deps.api_keys),
        has_chat=deps.text.tokenizer.has_chat_template,
    )
    ending = asyncio.create_task(_end(stop, server, client, announcer, options.shutdown_grace_s))
    stack.callback(ending.cancel)


def _uvicorn_config(front: FrontApp, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        front,
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(options.shutdown_grace_s + _LAST_WORDS_S),
    )


async def _listen(server: _Server, listener: socket.socket, options: ServeOptions) -> None:
    """Answer requests until the server is asked to exit."""
    try:
        await server.serve(sockets=[listener])
    except OSError as error:
        # Two servers may bind one port at the same time; only one may listen.
        raise _cannot_listen(options.host, options.port, error) from error
    finally:
        server.is_listening.set()  # or it never will


async def _end(
    stop: asyncio.Event, server: _Server, client: EngineClient, announcer: Announcer, grace_s: float
) -> None:
    """After the signal: no new connections, a while for requests in flight, then an error for the rest."""
    await stop.wait()
    announcer.stopping(num_in_flight=server.num_in_flight, grace_s=grace_s)
    server.should_exit = True
    await asyncio.sleep(grace_s)
    # Streams end with an error event instead of a cut connection.
    await client.close()


async def _start(
    options: ServeOptions, announcer: Announcer, front: FrontApp, stack: AsyncExitStack
) -> tuple[ServerDeps, EngineClient, tuple[str, ...]]:
    """Everything that requests need, in memory and prepared for the adapters to begin with."""
    folder = await asyncio.to_thread(resolve_model, options.engine.model)
    config = load_config(folder)
    for adapter_dir in options.adapter_dirs:
        discover_adapters(adapter_dir)  # a folder that is not there should not cost a minute to find out
    base_model = options.served_model_name or options.engine.model.rstrip("/")
    key = base_model_key(_model_identity(options.engine.model), config.shape)
    registry = AdapterRegistry(options.state_dir or default_state_dir(), key)
    stack.callback(registry.close)

    client = EngineClient(options.engine, factory=options.engine_factory)
    stack.push_async_callback(client.close)
    service = AdapterService(
        base_model=base_model,
        engine=client,
        registry=registry,
        shape=config.shape,
        allowed=AllowedPaths((*options.adapter_dirs, *options.allow_adapter_dirs)),
        hub=HubAdapters(AllowedRepos(options.allow_adapter_repos)),
        known_as=base_names(options.engine.model, base_model),
    )
    stack.push_async_callback(service.close)
    # Their files are read while the engine starts, which then gets ready for these adapters.
    registering = asyncio.create_task(start_adapters(service, options.adapter_dirs, options.adapters))
    registering.add_done_callback(lambda task: task.cancelled() or task.exception())  # the engine's is told
    stack.callback(registering.cancel)
    with announcer.loading(options.engine.model) as show:

        def on_progress(progress: StartProgress) -> None:
            front.progress = progress
            show(progress)

        _, tokenizer = await asyncio.gather(
            client.start(on_progress, registering), asyncio.to_thread(Tokenizer.load, folder)
        )
    assert client.info is not None, "a started engine has said what it can hold"
    report = registering.result()
    announcer.registered(report.num_served)
    deps = ServerDeps(
        text=TextEngine(
            engine=client,
            tokenizer=tokenizer,
            max_model_len=client.info.max_model_len,
            vocab_size=config.shape.vocab_size,
        ),
        adapters=service,
        metrics=ServerMetrics(MonotonicClock()),
        base_root=str(folder),
        engine_status=lambda: client.status,
        api_keys=options.api_keys,
        limits=options.limits,
    )
    return deps, client, (*_context_note(client.info.max_model_len, options.engine, config), *report.notes)


def default_state_dir() -> Path:
    """`$LORAPLEX_STATE`, or `loraplex` in the user's folder for program state."""
    if configured := os.environ.get("LORAPLEX_STATE"):
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "loraplex"


def _context_note(max_model_len: int, options: EngineOptions, config: ModelConfig) -> tuple[str, ...]:
    """Says so where memory, not the model or its operator, decides how long a context may be."""
    if max_model_len >= (options.max_model_len or config.shape.max_position):
        return ()
    note = (
        f"KV memory holds contexts of {max_model_len:,} tokens, the model could take "
        f"{config.shape.max_position:,}; raise --kv-memory for longer ones"
    )
    return (note,)


def _model_identity(model: str) -> str:
    """A folder by its full path, so that the registry does not depend on where the server was started."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


@contextlib.contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield listener


def _cannot_listen(host: str, port: int, error: OSError) -> AddressError:
    return AddressError(
        f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host and --port"
    )


@contextlib.contextmanager
def _signals(on_stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """Leaves signals to us, whose end is an exit code of 0, and tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """HTTP requests that are being answered."""
        return len(self.server_state.tasks)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None  # not to be had on Windows
    factory: Any = uvloop.new_event_loop
    return factory  # type: ignore[no-any-return]
