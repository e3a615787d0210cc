"""`serve`: run an engine process and an HTTP server, and shut them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from math import ceil
from types import ModuleType
from typing import Final, cast

import uvicorn

from loraplex.core.batching import Batching
from loraplex.core.clock import MonotonicClock
from loraplex.core.errors import EngineFailedError
from loraplex.core.logs import flush_logs
from loraplex.server.banner import Announcer
from loraplex.server.body import BodyReader
from loraplex.server.connections import (
    ConnectionBook,
    connections_within,
    raise_descriptor_limit,
)
from loraplex.server.engine_status import serving_in_words
from loraplex.server.garbage import collect_while_serving, keep_all_made_until_now
from loraplex.server.health import FrontApp
from loraplex.server.http_protocol import BoundedHttpProtocol
from loraplex.server.listening import ListeningServer, bind, listen, loop_factory, stop_signals
from loraplex.server.options import ServeOptions
from loraplex.server.start import start
from loraplex.server.supervised_engine import SupervisedEngine

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S: Final = 30
_SWITCH_INTERVAL_S: Final = 0.001
_LAST_WORDS_S: Final = 5.0
"""Seconds that streams may take to send their error after the engine was closed."""
_CUT_S: Final = 2
"""Seconds that requests may take to notice that their connection was cut; uvicorn logs those that do not."""


def serve(options: ServeOptions, announcer: Announcer | None = None) -> None:
    """Serve until SIGINT or SIGTERM. Raises LoraplexError if it cannot start.

    Raises EngineFailedError, after an orderly shutdown of HTTP, if the engine died too often to continue.
    """
    # Each prompt is encoded by the one thread that was given it: that thread has low priority, unlike a
    # pool's.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that encode prompts release the GIL sooner than by default (5 ms), so that streams do not wait
    # for them.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _keep_torch_out()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(options, announcer or Announcer()))


def _keep_torch_out() -> None:
    """Make transformers believe that torch is not installed: this process needs only its tokenizers.

    Importing torch would take seconds at every start and hundreds of MiB. Only the engine process computes
    with it.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise installing torch
    modules = cast(dict[str, ModuleType | None], sys.modules)
    modules.setdefault("torch", None)  # Python's way to mark a module as not importable


async def _serve(options: ServeOptions, announcer: Announcer) -> None:
    stop = asyncio.Event()
    with stop_signals(stop.set):
        serving = asyncio.create_task(_serve_until(stop, options, announcer))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not announcer.is_ready:
                announcer.stopping(num_in_flight=0, grace_s=0.0)
                serving.cancel()  # still loading: no request waits for an answer
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            if stop.is_set():
                announcer.stopped()
        finally:
            stopping.cancel()


async def _serve_until(stop: asyncio.Event, options: ServeOptions, announcer: Announcer) -> None:
    # Bound before the model is loaded: finding out that a port is taken should not cost a minute. It also
    # listens, so that supervisors and load balancers can tell a server that is starting from one that is
    # gone.
    with bind(options.host, options.port) as listener:
        front = FrontApp(web=options.web_access(), clock=MonotonicClock())
        server = ListeningServer(_uvicorn_config(front, options))
        listening = asyncio.create_task(listen(server, listener, host=options.host, port=options.port))
        async with AsyncExitStack() as stack:
            try:
                await server.is_listening.wait()
                client = None
                if not listening.done():
                    port = listener.getsockname()[1]
                    client = await _run(stop, server, front, port, options, announcer, stack)
                await listening
                if client is not None and client.failed.is_set() and not stop.is_set():
                    reason = client.status.message
                    raise EngineFailedError(f"{reason}; the log says why, start the server again")
            finally:
                server.should_exit = server.force_exit = True
                await asyncio.wait([listening])


async def _run(
    stop: asyncio.Event,
    server: ListeningServer,
    front: FrontApp,
    port: int,
    options: ServeOptions,
    announcer: Announcer,
    stack: AsyncExitStack,
) -> SupervisedEngine:
    """Start everything, then open the front to requests."""
    deps, client, num_skipped = await start(options, announcer, front, stack)
    # Objects made so far are kept: a full collection would traverse them all and delay every stream for a
    # third of a second.
    keep_all_made_until_now()
    collecting = asyncio.create_task(collect_while_serving(lambda: server.num_in_flight))
    stack.callback(collecting.cancel)
    from loraplex.server.app import create_app  # imported while the engine started (`start`)
    from loraplex.server.batches.runner import BatchRunner

    front.app = create_app(deps)
    assert deps.batches is not None, "every server has a state folder"
    running = asyncio.create_task(BatchRunner(deps, deps.batches).run(), name="run batches")
    stack.push_async_callback(_cancelled, running)
    await asyncio.to_thread(flush_logs)  # log lines about the start come before the banner
    announcer.ready(
        host=options.host,
        port=port,
        base_model=deps.adapters.base_model,
        adapters=[adapter.name for adapter in deps.adapters.served()],
        num_skipped=num_skipped,
        needs_key=bool(deps.api_keys) or deps.tenants is not None,
        has_chat=deps.text.tokenizer.has_chat_template,
        replicas=None if deps.fleet is None else f"{serving_in_words(deps.fleet)}, policy {options.policy}",
        batching=_batching_in_words(options),
    )
    ending = asyncio.create_task(_end(stop, server, client, deps.bodies, announcer, options.shutdown_grace_s))
    stack.callback(ending.cancel)
    return client


async def _cancelled(task: asyncio.Task[None]) -> None:
    """End a task before what it uses."""
    task.cancel()
    await asyncio.wait([task])


def _batching_in_words(options: ServeOptions) -> str | None:
    """Return the batching policy for the banner; None for the default."""
    batching = options.engine.batching
    return None if batching is Batching.FCFS else str(batching)


def _uvicorn_config(front: FrontApp, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        front,
        # uvicorn expects a class: it is called for every connection.
        http=partial(BoundedHttpProtocol, book=_connection_book(options)),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the peer's address decides who is an administrator, not a header
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=ceil(options.shutdown_grace_s + _LAST_WORDS_S) + _CUT_S,
    )


async def _end(
    stop: asyncio.Event,
    server: ListeningServer,
    client: SupervisedEngine,
    bodies: BodyReader,
    announcer: Announcer,
    grace_s: float,
) -> None:
    """Wait for a signal or for the engine's final failure, then shut down: accept no new connections, give
    requests in flight some time, and end the rest with an error. Connections whose clients do not even read
    that are cut."""
    await _first_of(stop, client.failed)
    announcer.stopping(num_in_flight=server.num_in_flight, grace_s=grace_s)
    server.should_exit = True
    await asyncio.sleep(grace_s)
    # Uploads end with an error, and streams end with an error event instead of a cut connection.
    bodies.close()
    asyncio.get_running_loop().call_later(_LAST_WORDS_S, server.cut_connections)
    await client.close()


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _connection_book(options: ServeOptions) -> ConnectionBook:
    """Create the book of connections, limited by the open files that the system allows."""
    limits = options.connections
    backends = options.backends
    most = connections_within(
        raise_descriptor_limit(),
        limits.max_connections,
        num_replicas=options.num_replicas if backends is None else len(backends.urls),
        is_front=backends is not None,
    )
    if most < limits.max_connections:
        logger.warning("the limit of open files allows %d connections; raise it with `ulimit -n`", most)
    return ConnectionBook(replace(limits, max_connections=most), MonotonicClock())
