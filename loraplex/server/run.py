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
from importlib import import_module
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

import uvicorn

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.base_name import base_names, public_name
from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.registry import AdapterRegistry, base_model_key
from loraplex.adapters.remote import AllowedSources
from loraplex.core.batching import Batching
from loraplex.core.clock import MonotonicClock
from loraplex.core.errors import EngineFailedError
from loraplex.core.logs import flush_logs
from loraplex.core.shape import ModelShape
from loraplex.engine.text_engine import TextEngine
from loraplex.engine.tokenizer import Tokenizer
from loraplex.model.config import load_config
from loraplex.model.source import resolve_model
from loraplex.server.adapter_service import AdapterService
from loraplex.server.adapter_startup import start_adapters
from loraplex.server.banner import Announcer
from loraplex.server.batches.store import BatchStore
from loraplex.server.body import BodyReader
from loraplex.server.chosen_engine import chosen_engine
from loraplex.server.connections import (
    ConnectionBook,
    connections_within,
    raise_descriptor_limit,
)
from loraplex.server.deps import ServerDeps
from loraplex.server.engine_status import serving_in_words
from loraplex.server.garbage import collect_while_serving, keep_all_made_until_now
from loraplex.server.health import FrontApp
from loraplex.server.http_protocol import BoundedHttpProtocol
from loraplex.server.left_out import keep_retrying
from loraplex.server.listening import ListeningServer, bind, listen, loop_factory, stop_signals
from loraplex.server.metrics import ServerMetrics
from loraplex.server.options import ServeOptions
from loraplex.server.protocol_ipc import StartProgress
from loraplex.server.registry_watch import RegistryWatch
from loraplex.server.remote_adapters import RemoteAdapters
from loraplex.server.request_templates import RequestTemplates
from loraplex.server.shadow_twin import ShadowTwin
from loraplex.server.start_notes import context_notes, namesake_notes, shared_state_note, ttft_note
from loraplex.server.state_dir import default_state_dir
from loraplex.server.supervised_engine import ServingEngine, SupervisedEngine
from loraplex.server.tenants.tenants_watch import TenantsWatch
from loraplex.server.trace_setup import traces_of
from loraplex.server.waiting import WaitingBook

if TYPE_CHECKING:
    from loraplex.server.fleet.kept_placement import PlacementFile

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
    deps, client, num_skipped = await _start(options, announcer, front, stack)
    # Objects made so far are kept: a full collection would traverse them all and delay every stream for a
    # third of a second.
    keep_all_made_until_now()
    collecting = asyncio.create_task(collect_while_serving(lambda: server.num_in_flight))
    stack.callback(collecting.cancel)
    from loraplex.server.app import create_app  # imported while the engine started (`_start`)
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


def _request_templates(options: ServeOptions, stack: AsyncExitStack) -> RequestTemplates | None:
    if not options.chat.trusts_templates:
        return None
    templates = RequestTemplates()
    stack.push_async_callback(templates.close)
    return templates


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


async def _start(
    options: ServeOptions, announcer: Announcer, front: FrontApp, stack: AsyncExitStack
) -> tuple[ServerDeps, ServingEngine, int]:
    """Start everything that requests need, prepared for the initial adapters. The number returned is that of
    the adapters left out."""
    clock = MonotonicClock()
    traces = await asyncio.to_thread(traces_of, options.otlp_endpoint, clock)
    if traces is not None:
        stack.callback(traces.close)
    watch = None if options.tenants is None else TenantsWatch(options.tenants, clock)
    folder = await asyncio.to_thread(resolve_model, options.engine.model)
    config = load_config(folder)
    for adapter_dir in options.adapter_dirs:
        discover_adapters(adapter_dir)  # finding out that a folder is missing should not cost a minute
    base_model = options.served_model_name or public_name(options.engine.model)
    key = base_model_key(_model_identity(options.engine.model), config.shape)
    state_dir = options.state_dir or default_state_dir()
    registry = AdapterRegistry(state_dir, key)
    stack.callback(registry.close)

    client, fleet = await chosen_engine(options, config.shape, base_model, state_dir, registry, stack)
    stack.push_async_callback(client.close)
    if watch is not None:
        watch.subscribe(client.set_tenants)
    service = _adapter_service(
        options, base_model, client, registry, config.shape, is_fleet=fleet is not None
    )
    stack.push_async_callback(service.close)
    # Their files are read while the engine starts, which then prepares for these adapters.
    registering = asyncio.create_task(start_adapters(service, options.adapter_dirs, options.adapters))
    registering.add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )  # the engine's is reported
    stack.callback(registering.cancel)
    with announcer.loading(options.engine.model) as show:

        def on_progress(progress: StartProgress) -> None:
            front.progress = progress
            show(progress)

        # Awaited separately too: an adapter that cannot be served is reported before the model is loaded.
        _, tokenizer, report, _ = await asyncio.gather(
            client.start(on_progress, registering),
            asyncio.to_thread(Tokenizer.load, folder),
            registering,
            asyncio.to_thread(import_module, "loraplex.server.app"),  # FastAPI: not before the engine starts
        )
    assert client.info is not None, "a started engine has said what it can hold"
    announcer.registered(report.num_served)
    text = TextEngine(
        engine=client,
        tokenizer=tokenizer,
        max_model_len=client.info.max_model_len,
        vocab_size=config.shape.vocab_size,
    )
    stack.callback(text.prompts.close)
    deps = ServerDeps(
        text=text,
        adapters=service,
        metrics=ServerMetrics(clock),
        base_root=str(folder),
        engine_status=lambda: client.status,
        engine_costs=lambda: None if client.info is None else client.info.costs,
        batching=None if client.info.policy is None else client.info.policy.batching,
        api_keys=options.api_keys,
        admin_keys=options.admin_keys,
        web=options.web_access(),
        waiting=WaitingBook(options.waiting, clock, client),
        bodies=BodyReader(options.limits),
        chat=options.chat,
        templates=_request_templates(options, stack),
        fleet=fleet,
        placement_file=None if fleet is None else _placement_file(state_dir, key),
        is_ready_without_adapters=options.backends is None,
        continued=client.continued,
        is_resampled=client.is_resampled,
        shadow_twin=await _shadow_twin(client, options.shadow_twin_s, stack),
        traces=traces,
        tenants=None if watch is None else watch.tenants,
        batches=BatchStore.at(state_dir, key),
    )
    if watch is not None:
        watch.subscribe(deps.waiting.set_tenants)
        rereading = asyncio.create_task(watch.run(), name="watch the tenants file")
        stack.callback(rereading.cancel)
    service.on_dropped = deps.metrics.forget
    watching = asyncio.create_task(RegistryWatch(service.follower).run(), name="watch the registry")
    stack.callback(watching.cancel)
    sampling = asyncio.create_task(deps.history.run(), name="sample for the page")
    stack.callback(sampling.cancel)
    retrying = asyncio.create_task(keep_retrying(service), name="retry adapters that were left out")
    stack.callback(retrying.cancel)
    context = client.info.max_model_len
    notes = (
        # Servers behind --backend have limits of their own, by options of their own.
        *(() if options.backends is not None else context_notes(context, options.engine, config)),
        *namesake_notes(registry, state_dir),
        *ttft_note(client, options.waiting.max_ttft_s),
        *report.notes,
        *(() if watch is None else watch.notes([each.name for each in service.served()])),
    )
    for note in shared_state_note(registry, state_dir):
        logger.info("%s", note)
    for note in notes:
        logger.warning("%s", note)
    return deps, client, report.num_skipped


def _adapter_service(
    options: ServeOptions,
    base_model: str,
    engine: ServingEngine,
    registry: AdapterRegistry,
    shape: ModelShape,
    *,
    is_fleet: bool,
) -> AdapterService:
    return AdapterService(
        base_model=base_model,
        engine=engine,
        registry=registry,
        shape=shape,
        allowed=AllowedPaths((*options.adapter_dirs, *options.allow_adapter_dirs)),
        remote=RemoteAdapters(AllowedSources(options.allow_adapter_repos)),
        known_as=base_names(options.engine.model, base_model),
        alias=options.engine.model.rstrip("/") if options.served_model_name is None else None,
        stages_new=is_fleet,
    )


def _placement_file(state_dir: Path, key: str) -> PlacementFile:
    from loraplex.server.fleet.kept_placement import PlacementFile  # not needed by a single server

    return PlacementFile(state_dir, key)


async def _shadow_twin(
    client: ServingEngine, interval_s: float | None, stack: AsyncExitStack
) -> ShadowTwin | None:
    """Start the shadow twin if the engine's costs are known."""
    if interval_s is None or client.twin() is None:
        return None
    return await stack.enter_async_context(ShadowTwin(client, interval_s=interval_s))


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


def _model_identity(model: str) -> str:
    """Return a folder's full path, so that the registry does not depend on the current directory; a
    repository unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model
