"""Start everything that requests need, in order: the model, the engine, the adapters."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.base_name import base_names, public_name
from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.registry import AdapterRegistry, base_model_key
from loraplex.adapters.remote import AllowedSources
from loraplex.core.clock import Clock, MonotonicClock
from loraplex.engine.text_engine import TextEngine
from loraplex.engine.tokenizer import Tokenizer
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.source import resolve_model
from loraplex.server.adapter_service import AdapterService
from loraplex.server.adapter_startup import StartReport, start_adapters
from loraplex.server.banner import Announcer
from loraplex.server.batches.store import BatchStore
from loraplex.server.body import BodyReader
from loraplex.server.chosen_engine import chosen_engine
from loraplex.server.deps import ServerDeps
from loraplex.server.engine_status import Fleet
from loraplex.server.health import FrontApp
from loraplex.server.left_out import keep_retrying
from loraplex.server.metrics import ServerMetrics
from loraplex.server.options import ServeOptions
from loraplex.server.protocol_ipc import StartProgress
from loraplex.server.registry_watch import RegistryWatch
from loraplex.server.remote_adapters import RemoteAdapters
from loraplex.server.request_templates import RequestTemplates
from loraplex.server.shadow_twin import ShadowTwin
from loraplex.server.start_notes import context_notes, namesake_notes, shared_state_note, ttft_note
from loraplex.server.state_dir import default_state_dir
from loraplex.server.supervised_engine import ServingEngine
from loraplex.server.tenants.tenants_watch import TenantsWatch
from loraplex.server.trace_setup import traces_of
from loraplex.server.waiting import WaitingBook

if TYPE_CHECKING:
    from loraplex.server.fleet.kept_placement import PlacementFile
    from loraplex.server.traces import Traces

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Base:
    """The base model. `key`: its own in the registry, which is in `state_dir`."""

    name: str
    folder: Path
    config: ModelConfig
    key: str
    state_dir: Path


async def start(
    options: ServeOptions, announcer: Announcer, front: FrontApp, stack: AsyncExitStack
) -> tuple[ServerDeps, ServingEngine, int]:
    """Start everything that requests need, prepared for the initial adapters. The number returned is that of
    the adapters left out."""
    clock = MonotonicClock()
    traces = await asyncio.to_thread(traces_of, options.otlp_endpoint, clock)
    if traces is not None:
        stack.callback(traces.close)
    watch = None if options.tenants is None else TenantsWatch(options.tenants, clock)
    base = await _base(options)
    registry = AdapterRegistry(base.state_dir, base.key)
    stack.callback(registry.close)

    client, fleet = await chosen_engine(
        options, base.config.shape, base.name, base.state_dir, registry, stack
    )
    stack.push_async_callback(client.close)
    if watch is not None:
        watch.subscribe(client.set_tenants)
    service = _adapter_service(options, base, client, registry, is_fleet=fleet is not None)
    stack.push_async_callback(service.close)
    tokenizer, report = await _load(options, announcer, front, base, client, service, stack)
    text = _text_engine(client, tokenizer, base.config)
    stack.callback(text.prompts.close)
    deps = await _deps(
        options,
        base,
        client,
        text,
        service,
        fleet=fleet,
        watch=watch,
        traces=traces,
        clock=clock,
        stack=stack,
    )
    _keep_watching(deps, watch, stack)
    _log_notes(options, base, client, registry, report, watch, service)
    return deps, client, report.num_skipped


async def _base(options: ServeOptions) -> _Base:
    folder = await asyncio.to_thread(resolve_model, options.engine.model)
    config = load_config(folder)
    for adapter_dir in options.adapter_dirs:
        discover_adapters(adapter_dir)  # finding out that a folder is missing should not cost a minute
    return _Base(
        name=options.served_model_name or public_name(options.engine.model),
        folder=folder,
        config=config,
        key=base_model_key(_model_identity(options.engine.model), config.shape),
        state_dir=options.state_dir or default_state_dir(),
    )


async def _load(
    options: ServeOptions,
    announcer: Announcer,
    front: FrontApp,
    base: _Base,
    client: ServingEngine,
    service: AdapterService,
    stack: AsyncExitStack,
) -> tuple[Tokenizer, StartReport]:
    """Start the engine, and meanwhile read the tokenizer and the adapters' files, which it then prepares
    for."""
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
            asyncio.to_thread(Tokenizer.load, base.folder),
            registering,
            asyncio.to_thread(import_module, "loraplex.server.app"),  # FastAPI: not before the engine starts
        )
    announcer.registered(report.num_served)
    return tokenizer, report


def _text_engine(client: ServingEngine, tokenizer: Tokenizer, config: ModelConfig) -> TextEngine:
    assert client.info is not None, "a started engine has said what it can hold"
    return TextEngine(
        engine=client,
        tokenizer=tokenizer,
        max_model_len=client.info.max_model_len,
        vocab_size=config.shape.vocab_size,
    )


async def _deps(
    options: ServeOptions,
    base: _Base,
    client: ServingEngine,
    text: TextEngine,
    service: AdapterService,
    *,
    fleet: Fleet | None,
    watch: TenantsWatch | None,
    traces: Traces | None,
    clock: Clock,
    stack: AsyncExitStack,
) -> ServerDeps:
    assert client.info is not None, "a started engine has said what it can hold"
    return ServerDeps(
        text=text,
        adapters=service,
        metrics=ServerMetrics(clock),
        base_root=str(base.folder),
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
        placement_file=None if fleet is None else _placement_file(base.state_dir, base.key),
        is_ready_without_adapters=options.backends is None,
        continued=client.continued,
        is_resampled=client.is_resampled,
        shadow_twin=await _shadow_twin(client, options.shadow_twin_s, stack),
        traces=traces,
        tenants=None if watch is None else watch.tenants,
        batches=BatchStore.at(base.state_dir, base.key),
    )


def _keep_watching(deps: ServerDeps, watch: TenantsWatch | None, stack: AsyncExitStack) -> None:
    """Begin to watch the tenants file and the registry, to sample for the page and to retry adapters."""
    if watch is not None:
        watch.subscribe(deps.waiting.set_tenants)
        rereading = asyncio.create_task(watch.run(), name="watch the tenants file")
        stack.callback(rereading.cancel)
    service = deps.adapters
    service.on_dropped = deps.metrics.forget
    watching = asyncio.create_task(RegistryWatch(service.follower).run(), name="watch the registry")
    stack.callback(watching.cancel)
    sampling = asyncio.create_task(deps.history.run(), name="sample for the page")
    stack.callback(sampling.cancel)
    retrying = asyncio.create_task(keep_retrying(service), name="retry adapters that were left out")
    stack.callback(retrying.cancel)


def _log_notes(
    options: ServeOptions,
    base: _Base,
    client: ServingEngine,
    registry: AdapterRegistry,
    report: StartReport,
    watch: TenantsWatch | None,
    service: AdapterService,
) -> None:
    assert client.info is not None, "a started engine has said what it can hold"
    context = client.info.max_model_len
    notes = (
        # Servers behind --backend have limits of their own, by options of their own.
        *(() if options.backends is not None else context_notes(context, options.engine, base.config)),
        *namesake_notes(registry, base.state_dir),
        *ttft_note(client, options.waiting.max_ttft_s),
        *report.notes,
        *(() if watch is None else watch.notes([each.name for each in service.served()])),
    )
    for note in shared_state_note(registry, base.state_dir):
        logger.info("%s", note)
    for note in notes:
        logger.warning("%s", note)


def _adapter_service(
    options: ServeOptions,
    base: _Base,
    engine: ServingEngine,
    registry: AdapterRegistry,
    *,
    is_fleet: bool,
) -> AdapterService:
    return AdapterService(
        base_model=base.name,
        engine=engine,
        registry=registry,
        shape=base.config.shape,
        allowed=AllowedPaths((*options.adapter_dirs, *options.allow_adapter_dirs)),
        remote=RemoteAdapters(AllowedSources(options.allow_adapter_repos)),
        known_as=base_names(options.engine.model, base.name),
        alias=options.engine.model.rstrip("/") if options.served_model_name is None else None,
        stages_new=is_fleet,
    )


def _request_templates(options: ServeOptions, stack: AsyncExitStack) -> RequestTemplates | None:
    if not options.chat.trusts_templates:
        return None
    templates = RequestTemplates()
    stack.push_async_callback(templates.close)
    return templates


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


def _model_identity(model: str) -> str:
    """Return a folder's full path, so that the registry does not depend on the current directory; a
    repository unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model
