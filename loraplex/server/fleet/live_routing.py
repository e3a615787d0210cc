"""The fleet's controller over live replicas: versions have numbers there, and adapters come and go here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.clock import Clock
from loraplex.core.errors import UnknownModelError
from loraplex.core.stats import EngineStats
from loraplex.fleet.adapter_table import AdapterTable
from loraplex.fleet.controller import Controller
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.routers.router import Router
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import CostModel
from loraplex.perf.set_costs import StepSetCosts

_ELEMENT_BYTES: Final = 2
"""Bytes of a LoRA parameter in memory; where it has four, all adapters are equally underestimated."""


class LiveRouting:
    """Decides which replica serves a request, by a router that the twin simulates as well."""

    def __init__(
        self, limits: Sequence[ReplicaLimits], *, router: Router, costs: CostModel, clock: Clock
    ) -> None:
        self._router = router
        self._costs = costs
        self._clock = clock
        self._numbers: dict[str, int] = {}
        self._ranks: list[int] = []
        self._bytes: list[int] = []
        self._view = FleetView(
            load=FleetLoad(limits),
            tiers=AdapterTiers(),
            costs=StepSetCosts(costs, rank_bytes=0.0),
            moves=self,
        )
        self._controller: Controller | None = None  # None: adapters were added since it was made

    def add(self, spec: AdapterSpec) -> None:
        """Make a version known. Its number stays when it is removed, as it may come back."""
        if spec.version not in self._numbers:
            self._numbers[spec.version] = len(self._ranks)
            self._ranks.append(spec.max_rank)
            self._bytes.append(max(spec.num_params * _ELEMENT_BYTES, 1))
            self._controller = None

    def route(self, request_id: str, version: str | None, prompt_tokens: int) -> int:
        """Return the replica that serves a request, which counts as its load until `ended`.

        Raises UnknownModelError for a version that was never added, and CapacityError while no replica
        accepts requests.
        """
        adapter = None if version is None else self._numbers.get(version)
        if adapter is None and version is not None:
            raise UnknownModelError(f"the fleet has no adapter of version {version}")
        replica = self._current().route(request_id, adapter, prompt_tokens)
        if adapter is not None:
            self._view.tiers.loaded(replica, adapter)  # it will be, for this request
        return replica

    def first_token(self, request_id: str) -> None:
        self._current().first_token(request_id)

    def ended(self, request_id: str, output_tokens: int | None) -> None:
        """Record the end of a request. `output_tokens`: None if it failed or was cancelled."""
        self._current().ended(request_id, output_tokens)

    def accept(self, replica: int, *, accepts: bool) -> None:
        """Send a replica requests from now on, or none."""
        if accepts:
            self._current().up(replica)
        else:
            self._current().down(replica)

    def num_in_flight(self, replica: int) -> int:
        """Return how many requests were sent to a replica and have not ended."""
        return int(self._view.load.everything.num_requests[replica])

    def saw(self, replica: int, stats: EngineStats) -> None:
        """Take over which adapters a replica says to hold, and in which memory."""
        tiers = self._view.tiers
        # Without a device, adapters are used where they are read to.
        ready = ("device", "loading") if stats.device_arena_bytes else ("device", "loading", "host")
        for adapter in stats.adapters:
            number = self._numbers.get(adapter.version)
            if number is None:
                continue
            if adapter.tier in ready or adapter.in_flight:
                tiers.loaded(replica, number)
            else:
                tiers.evicted(replica, number)
            if adapter.tier == "host":
                tiers.staged(replica, number)
            else:
                tiers.dropped(replica, number)

    # ---- what loads take (fleet.view.AdapterMoves)

    def from_host_s(self, adapter: int) -> float:
        return self._costs.copy_s(self._bytes[adapter])

    def from_elsewhere_s(self, adapter: int) -> float:
        return self._costs.read_s(self._bytes[adapter])

    def _current(self) -> Controller:
        """Return the controller of the adapters known now. The view stays: it holds who is served where."""
        if self._controller is None:
            if self._ranks:
                rank_bytes = sum(self._bytes) / sum(self._ranks)
                self._view.costs = StepSetCosts(self._costs, rank_bytes=rank_bytes)
            self._controller = Controller(
                adapters=AdapterTable.of(ranks=self._ranks, num_bytes=self._bytes),
                view=self._view,
                router=self._router,
                now_s=self._clock.now_s(),
            )
        return self._controller
