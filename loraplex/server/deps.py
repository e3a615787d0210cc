"""The parts that the HTTP application is built from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from loraplex.core.batching import Batching
from loraplex.engine.text_engine import TextEngine
from loraplex.server.adapter_service import AdapterService
from loraplex.server.batches.store import BatchStore
from loraplex.server.body import BodyLimits, BodyReader
from loraplex.server.chat_options import ChatOptions
from loraplex.server.continuing import Continued
from loraplex.server.engine_status import EngineStatus, Fleet
from loraplex.server.metrics import ServerMetrics
from loraplex.server.pacing import Pacer
from loraplex.server.page.history import ServerHistory
from loraplex.server.request_templates import RequestTemplates
from loraplex.server.shadow_twin import ShadowTwin
from loraplex.server.tenants.tenants import Tenants
from loraplex.server.waiting import WaitingBook
from loraplex.server.web_guard import WebAccess

if TYPE_CHECKING:
    from loraplex.server.fleet.kept_placement import PlacementFile
    from loraplex.server.traces import Traces


@dataclass(frozen=True, kw_only=True)
class ServerDeps:
    """The parts of a server.

    `base_root` is the source of the base model; its served name is in the adapter service. `fleet`: None for
    a single engine. `is_ready_without_adapters`: the server is ready even if all adapters were left out at
    the start. `templates`: None if requests may not bring chat templates. `shadow_twin`: None if there is
    none. `continued`: how often requests outlived their engine; `is_resampled`: see ServingEngine.
    `placement_file`: where a placement that the fleet is given is kept; None for nowhere. `engine_costs`:
    returns the profile that the engines report, as JSON. `batching`: their policy; None if it is not known.
    `tenants`: None if all clients have the same
    rights. `traces`: None if none are asked for. `batches`: None if it takes no files and batches.
    """

    text: TextEngine
    adapters: AdapterService
    metrics: ServerMetrics
    waiting: WaitingBook
    base_root: str
    engine_status: Callable[[], EngineStatus]
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    web: WebAccess = field(default_factory=WebAccess)
    bodies: BodyReader = field(default_factory=lambda: BodyReader(BodyLimits()))
    pacer: Pacer = field(default_factory=Pacer)
    drain_timeout_s: float = 30.0
    chat: ChatOptions = field(default_factory=ChatOptions)
    templates: RequestTemplates | None = None
    fleet: Fleet | None = None
    placement_file: PlacementFile | None = None
    engine_costs: Callable[[], str | None] = lambda: None
    batching: Batching | None = None
    is_ready_without_adapters: bool = True
    shadow_twin: ShadowTwin | None = None
    continued: Counter[Continued] = field(default_factory=Counter)
    is_resampled: Callable[[str], bool] = lambda call_id: False
    traces: Traces | None = None
    tenants: Tenants | None = None
    batches: BatchStore | None = None

    @cached_property
    def history(self) -> ServerHistory:
        """The last minutes, for the page."""
        return ServerHistory(self.metrics, self.waiting)
