"""A single engine process: when it dies, its requests wait for the restarted one and continue there."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import UnknownModelError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.engine.options import EngineOptions
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.server.continuing import Attempt, Continued, Serving, continuing
from loraplex.server.engine_client import EngineClient
from loraplex.server.fleet.fleet_stats import LastingCounters
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.recent_requests import RecentRequests
from loraplex.server.shadow_twin import TwinSubject

if TYPE_CHECKING:
    from loraplex.server.fleet.live_routing import LiveRouting

_MAX_DEATHS: Final = 2
_MAX_IN_A_ROW: Final = 3
"""Number of engine processes that may die with a request (`_MAX_DEATHS`), or die or fall silent without a
token of it (`_MAX_IN_A_ROW`), before it is given up. Fewer than the crashes that end the server
(`RestartPolicy`): a single request must not cause that."""
_HERE: Final = 0
"""The number of the only replica."""


class SoleEngine(EngineClient):
    """An EngineClient whose requests outlive the engine process. If its costs are known, it tracks its load
    like a fleet of one replica."""

    def __init__(self, config: object, **options: Any) -> None:
        """See EngineClient."""
        super().__init__(config, **options)
        self.continued: Counter[Continued] = Counter()
        self._load: LiveRouting | None = None
        self._recent = RecentRequests()
        self._counters = LastingCounters()

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        await super().start(on_progress, add_adapters)
        if self.info is not None and self.info.costs is not None and isinstance(self._config, EngineOptions):
            self._load = _load_of(self.info, self.info.costs, self._config)
            for sources in self._adapters.values():
                for spec in sources.values():
                    self._load.add(spec)

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        return continuing(
            request,
            self._give,
            max_in_a_row=_MAX_IN_A_ROW,
            max_in_all=_MAX_DEATHS,
            engines="engine processes",
            continued=self.continued,
        )

    async def _give(self, request: EngineRequest) -> Serving:
        await self._ready_child()  # raises if there will be none
        load = self._load
        if load is None or not _is_known(load, request.adapter):
            return self._unreported(request)
        load.route(request.request_id, request.adapter, request.num_tokens, tenant=request.tenant)
        return self._reported(request, load)

    @asynccontextmanager
    async def _unreported(self, request: EngineRequest) -> AsyncIterator[Attempt]:
        async with self.open(request) as take:
            yield Attempt(take, lambda output: None)

    @asynccontextmanager
    async def _reported(self, request: EngineRequest, load: LiveRouting) -> AsyncIterator[Attempt]:
        from loraplex.server.fleet.request_report import RequestReport

        report = RequestReport(request, _HERE, load, self._recent)
        try:
            async with self.open(request) as take:
                yield Attempt(take, report.saw)
        finally:
            report.close()

    def is_resampled(self, call_id: str) -> bool:
        """See ServingEngine. Always False: a restarted engine process samples the same tokens."""
        return False

    def twin(self) -> TwinSubject | None:
        """See `shadow_twin.Shadowed`."""
        if self._load is None or self.info is None:
            return None
        return self._load.twin(self.info, self._recent)

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        """See `waiting.Forecaster`."""
        if self._load is None or not self.healthy or not _is_known(self._load, adapter):
            return None
        return self._load.forecast(adapter, prompt_tokens, admitted)

    async def add_adapter(self, spec: AdapterSpec) -> None:
        await super().add_adapter(spec)
        self._counters.know(spec.version)
        if self._load is not None:
            self._load.add(spec)

    async def remove_adapter(self, version: str) -> None:
        if (load := self._load) is not None:
            load.remove(version)
            if load.has_many_gone:
                load.begin(list(load.state()))
        await super().remove_adapter(version)
        self._counters.forget(version)

    async def stats(self) -> EngineStats:
        stats = await super().stats()
        self._counters.saw(_HERE, stats)
        if self._load is not None:
            self._load.saw(_HERE, stats)
        return self._counters.lasting(stats)


def _load_of(info: Ready, costs: str, options: EngineOptions) -> LiveRouting:
    """Return a routing with a single replica."""
    # Imported only after the engine process has started.
    from loraplex.fleet.answer_length import FIRST_GUESS
    from loraplex.server.fleet.fleet_setup import limits_of
    from loraplex.server.fleet.live_routing import LiveRouting
    from loraplex.server.fleet.routing_events import Began

    limits = [limits_of(options)(info)]
    return LiveRouting([Began(policy="round-robin", limits=limits, costs=costs, mean_tokens=FIRST_GUESS)])


def _is_known(load: LiveRouting, adapter: str | None) -> bool:
    try:
        load.request_of(adapter, 1)
    except UnknownModelError:  # the engine raises a better error
        return False
    return True
