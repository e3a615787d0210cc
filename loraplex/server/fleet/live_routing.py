"""The fleet's controller over live replicas: versions have numbers there, and adapters come and go here."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import UnknownModelError
from loraplex.core.stats import EngineStats
from loraplex.fleet.adapter_table import AdapterTable
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.fleet.answer_length import AnswerLength
from loraplex.fleet.controller import Controller
from loraplex.fleet.first_token import forecast
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.named import router_named
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.profile_json import profile_from_json
from loraplex.perf.set_costs import StepSetCosts
from loraplex.server.fleet.routing_events import (
    Accepts,
    AdapterKnown,
    Began,
    Ended,
    FirstToken,
    Holds,
    Limits,
    Open,
    RoutingEvent,
    Sent,
)
from loraplex.server.recent_requests import RecentRequests
from loraplex.server.shadow_twin import TwinSubject

_ELEMENT_BYTES: Final = 2
"""Bytes of a LoRA parameter in memory; where it has four, all adapters are equally underestimated."""
_STEP_TOKENS: Final = 2048
"""Tokens of a step, of replicas that do not tell."""


class _Place(NamedTuple):
    """Where a replica has an adapter."""

    on_device: bool = False
    on_host: bool = False


class LiveRouting:
    """Decides which replica serves a request, by a router that the twin simulates as well.

    All that it is told and decides is an event (`routing_events`). `state` holds it in events as well, and a
    routing that begins with these decides as this one does after `begin`.
    """

    def __init__(self, events: Iterable[RoutingEvent], record: Callable[[RoutingEvent], None] | None = None):
        """`events`: `Began` and what else there is to begin with. `record`: called with every event from then
        on, in its order."""
        self._recorder = record
        self.begin(events)

    def begin(self, events: Iterable[RoutingEvent]) -> None:
        """Forget everything, and begin with these events."""
        first, *others = events
        assert isinstance(first, Began)
        self._is_beginning = True
        self._began = first
        self._costs = profile_from_json(first.costs)
        self._numbers: dict[str, int] = {}
        self._ranks: list[int] = []
        self._bytes: list[int] = []
        self._places: dict[tuple[int, str], _Place] = {}
        limits = [
            ReplicaLimits(
                max_running=each.max_running, kv_tokens=each.kv_tokens, max_adapters=each.max_adapters
            )
            for each in first.limits
        ]
        self.view = FleetView(
            load=FleetLoad(limits, AnswerLength(first.mean_tokens)),
            tiers=AdapterTiers(),
            costs=StepSetCosts(self._costs, rank_bytes=0.0),
            moves=self,
        )
        self._router = router_named(first.routing)
        self._controller: Controller | None = None  # None: adapters were added since it was made
        for event in others:
            self.apply(event)
        self._is_beginning = False

    def state(self, limits: Mapping[int, Limits] | None = None) -> Iterator[RoutingEvent]:
        """Yield the events to begin with so as to know what is known now. `limits`: of replicas that join, by
        their numbers, which go on from those there are or are those of replicas that left."""
        load = self.view.load
        known = dict(enumerate(self._began.limits)) | dict(limits or {})
        yield msgspec.structs.replace(
            self._began,
            mean_tokens=load.answers.mean_tokens,
            limits=[known[number] for number in range(len(known))],
        )
        versions = list(self._numbers)
        for version, rank, num_bytes in zip(versions, self._ranks, self._bytes, strict=True):
            yield AdapterKnown(version=version, rank=rank, num_bytes=num_bytes)
        for replica in range(load.num_replicas):
            if not load.accepts[replica]:
                yield Accepts(replica=replica, accepts=False)
        for (replica, version), place in self._places.items():
            yield Holds(replica=replica, version=version, on_device=place.on_device, on_host=place.on_host)
        running = {request_id for request_id, _, _ in load.running()}
        for replica in range(load.num_replicas):
            for request_id, request in load.requests_on(replica):
                yield Open(
                    request_id=str(request_id),
                    replica=replica,
                    prompt_tokens=request.prompt_tokens,
                    version=None if request.adapter is None else versions[request.adapter],
                    is_running=request_id in running,
                )

    def apply(self, event: RoutingEvent) -> int | None:
        """Take over an event of another routing; return the replica that this one sends a request to."""
        match event:
            case AdapterKnown(version=version, rank=rank, num_bytes=num_bytes):
                self._add(version, rank, num_bytes)
            case Accepts(replica=replica, accepts=accepts):
                self.accept(replica, accepts=accepts)
            case Holds(replica=replica, version=version):
                self._place(replica, version, _Place(event.on_device, event.on_host))
            case Open(request_id=request_id, replica=replica):
                self.view.load.sent(request_id, self.request_of(event.version, event.prompt_tokens), replica)
                if event.is_running:
                    self.view.load.first_token(request_id)
            case Sent(request_id=request_id, version=version, prompt_tokens=prompt_tokens):
                return self.route(request_id, version, prompt_tokens)
            case FirstToken(request_id=request_id):
                self.first_token(request_id)
            case Ended(request_id=request_id, output_tokens=output_tokens):
                self.ended(request_id, output_tokens)
            case Began():
                raise AssertionError("a routing begins once")
        return None

    # ---- requests

    def request_of(self, version: str | None, prompt_tokens: int) -> RoutedRequest:
        """Return a request as routers see it. Raises UnknownModelError for a version that was never added."""
        if version is None:
            return RoutedRequest(None, 0, prompt_tokens)
        number = self._numbers.get(version)
        if number is None:
            raise UnknownModelError(f"the fleet has no adapter of version {version}")
        return RoutedRequest(number, self._ranks[number], prompt_tokens)

    def route(self, request_id: str, version: str | None, prompt_tokens: int) -> int:
        """Return the replica that serves a request, which counts as its load until `ended`.

        Raises UnknownModelError for a version that was never added, and CapacityError while no replica
        accepts requests.
        """
        adapter = self.request_of(version, prompt_tokens).adapter
        replica = self._current().route(request_id, adapter, prompt_tokens)
        self._record(
            Sent(
                request_id=request_id,
                replica=replica,
                prompt_tokens=prompt_tokens,
                version=version,
                at_unix_s=round(time.time(), 3),
            )
        )
        if version is not None:
            self._use(replica, version)
        return replica

    def forecast(self, version: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast:
        """Predict the first token of a request that would come now, and change nothing; raises as `route`
        does. `admitted`: see `fleet.first_token.forecast`."""
        self._current()  # brings the costs up to date
        view, request = self.view, self.request_of(version, prompt_tokens)
        # A copy of the router decides, as it remembers its decisions; what it only looks at is not copied.
        known = {id(each): each for each in (view.costs, view.plan)}
        replica = copy.deepcopy(self._router, known).choose(request, view)
        memory = self._costs.memory
        step_tokens = _STEP_TOKENS if memory is None else memory.step_tokens
        return forecast(request, view, replica, admitted=admitted, step_tokens=step_tokens)

    def first_token(self, request_id: str) -> None:
        self._current().first_token(request_id)
        self._record(FirstToken(request_id=request_id))

    def ended(self, request_id: str, output_tokens: int | None) -> None:
        """Record the end of a request. `output_tokens`: None if it failed or was cancelled."""
        self._current().ended(request_id, output_tokens)
        self._record(Ended(request_id=request_id, output_tokens=output_tokens))

    # ---- replicas

    def accept(self, replica: int, *, accepts: bool) -> None:
        """Send a replica requests from now on, or none."""
        if bool(self.view.load.accepts[replica]) is accepts:
            return
        if accepts:
            self._current().up(replica)
        else:
            self._current().down(replica)
        self._record(Accepts(replica=replica, accepts=accepts))

    def num_in_flight(self, replica: int) -> int:
        """Return how many requests were sent to a replica and have not ended."""
        return int(self.view.load.everything.num_requests[replica])

    # ---- adapters

    def add(self, spec: AdapterSpec) -> None:
        """Make a version known. Its number stays when it is removed, as it may come back."""
        self._add(spec.version, spec.max_rank, max(spec.num_params * _ELEMENT_BYTES, 1))

    def twin(self, costs: str, recent: RecentRequests) -> TwinSubject:
        """Return what a twin of the replicas needs to serve their requests again."""
        return TwinSubject(
            costs=costs,
            max_running=int(self.view.load.max_running.min()),
            rank_params=sum(self._bytes) / _ELEMENT_BYTES / max(sum(self._ranks), 1),
            recent=recent,
        )

    def saw(self, replica: int, stats: EngineStats) -> None:
        """Take over which adapters a replica says to hold, and in which memory."""
        # Without a device, adapters are used where they are read to.
        ready = ("device", "loading") if stats.device_arena_bytes else ("device", "loading", "host")
        for adapter in stats.adapters:
            if adapter.version in self._numbers:
                on_device = adapter.tier in ready or adapter.in_flight > 0
                self._place(replica, adapter.version, _Place(on_device, adapter.tier == "host"))

    def _add(self, version: str, rank: int, num_bytes: int) -> None:
        if version in self._numbers:
            return
        self._numbers[version] = len(self._ranks)
        self._ranks.append(rank)
        self._bytes.append(num_bytes)
        self._controller = None
        self._record(AdapterKnown(version=version, rank=rank, num_bytes=num_bytes))

    def _use(self, replica: int, version: str) -> None:
        """Record that a replica will compute with an adapter. Where only so many have a place, the one used
        longest ago makes way: a server that does not tell what it holds is taken to do so."""
        key, places = (replica, version), self._places
        self._place(replica, version, places.get(key, _Place())._replace(on_device=True))
        places[key] = places.pop(key)  # the latest is last
        most = self._began.limits[replica].max_adapters
        if most is not None:
            held = [each for (where, each), place in places.items() if where == replica and place.on_device]
            for oldest in held[: max(len(held) - most, 0)]:
                self._place(replica, oldest, places[replica, oldest]._replace(on_device=False))

    def _place(self, replica: int, version: str, place: _Place) -> None:
        """Record where a replica has an adapter, if that is news."""
        key, number, tiers = (replica, version), self._numbers[version], self.view.tiers
        if place == self._places.get(key, _Place()):
            return
        if any(place):
            self._places[key] = place
        else:
            self._places.pop(key, None)
        (tiers.loaded if place.on_device else tiers.evicted)(replica, number)
        (tiers.staged if place.on_host else tiers.dropped)(replica, number)
        self._record(
            Holds(replica=replica, version=version, on_device=place.on_device, on_host=place.on_host)
        )

    def _record(self, event: RoutingEvent) -> None:
        """Report an event; what a routing begins with is known to whoever keeps the record."""
        if self._recorder is not None and not self._is_beginning:
            self._recorder(event)

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
                self.view.costs = StepSetCosts(self._costs, rank_bytes=rank_bytes)
            self._controller = Controller(
                adapters=AdapterTable.of(ranks=self._ranks, num_bytes=self._bytes),
                view=self.view,
                router=self._router,
                now_s=0.0,  # it places nothing, so that no period passes
            )
        return self._controller
