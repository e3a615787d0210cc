"""The options that a server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.engine.options import EngineOptions
from loraplex.server.adapter_choice import GivenAdapter
from loraplex.server.body import BodyLimits
from loraplex.server.chat_options import ChatOptions
from loraplex.server.connections import ConnectionLimits
from loraplex.server.engine_client import DEFAULT_FACTORY
from loraplex.server.waiting import WaitingLimits
from loraplex.server.web_guard import WebAccess

if TYPE_CHECKING:
    from loraplex.server.fleet.backend_replicas import Backends
    from loraplex.server.fleet.ray_cluster import RayPlace


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Everything that a user may choose.

    `adapter_dirs` are served and open for loading; `allow_adapter_dirs` are only open for loading. `adapters`
    are served and open nothing; `allow_adapter_repos` are patterns of hub repositories and S3 URLs.
    `shutdown_grace_s`: seconds that requests in flight may continue after the signal. `num_replicas`: number
    of engine processes; `ray`: the cluster they are placed on, if not on this machine; `backends`: servers
    that are used instead of engine processes; `policy`: the name of the fleet's policy for routing and
    placement (`fleet.policy`), with periods of `period_s` seconds. `engine_factory`: "module:name" of the
    function that builds the core in the engine process. `tenants`: the tenants file. `otlp_endpoint`: the
    collector of traces, if OpenTelemetry's variables do not name it. `shadow_twin_s`: seconds between
    replays of the last minutes on a twin; None for never.
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
    admin_keys: tuple[str, ...] = ()
    tenants: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    limits: BodyLimits = field(default_factory=BodyLimits)
    waiting: WaitingLimits = field(default_factory=WaitingLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    chat: ChatOptions = field(default_factory=ChatOptions)
    shutdown_grace_s: float = 5.0
    num_replicas: int = 1
    policy: str = "auto"
    period_s: float = 60.0
    backends: Backends | None = None
    ray: RayPlace | None = None
    engine_factory: str = DEFAULT_FACTORY
    shadow_twin_s: float | None = None
    otlp_endpoint: str | None = None

    def web_access(self) -> WebAccess:
        return WebAccess(
            bound_host=self.host,
            allowed_hosts=self.allowed_hosts,
            allowed_origins=self.allowed_origins,
        )
