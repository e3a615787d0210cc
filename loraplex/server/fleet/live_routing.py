"""The fleet's controller over live replicas, which maps names of adapters and requests to the controller's
numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.continuation import request_id_of
from loraplex.core.engine_policy import EnginePolicy
from loraplex.core.errors import UnknownModelError
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import NO_TENANT
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.fleet.answer_length import AnswerLength
from loraplex.fleet.first_token import forecast
from loraplex.fleet.live_controller import LiveController
from loraplex.fleet.live_policy import live_controller
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.plan import Entry
from loraplex.fleet.policy import Policy
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import KernelKind
from loraplex.perf.profile_json import profile_from_json
from loraplex.perf.set_costs import StepSetCosts
from loraplex.server.fleet.held_adapters import Held, HeldAdapters
from loraplex.server.fleet.routing_events import (
    Accepts,
    AdapterKnown,
    AdapterRemoved,
    Began,
    Decision,
    Ended,
    FirstToken,
    Given,
    Holds,
    Joined,
    Limits,
    Lost,
    Moved,
    Open,
    PlanState,
    RoutingEvent,
    Sent,
    Staged,
    Ticked,
)
from loraplex.server.fleet.routing_state import (
    controller_state,
    given_entries,
    placed_adapter,
    plan_state,
)
from loraplex.server.protocol_ipc import Ready
from loraplex.server.recent_requests import RecentRequests
from loraplex.server.shadow_twin import TwinSubject

_STEP_TOKENS: Final = 2048
"""Tokens of a step, assumed for replicas that do not report it."""

_MAX_GONE: Final = 1000
"""Number of removed versions that may keep their numbers, unless more versions are there."""


class Tick(NamedTuple):
    """A decision, and its actions: versions that replicas load, requests that move."""

    event: Ticked
    stages: list[tuple[int, str]]


class LiveRouting:
    """Decides which replica serves a request and where adapters are placed, by a policy that the twin also
    simulates. A request keeps its name across the replicas that it is sent to.

    Every input and decision is an event (`routing_events`). `state` also returns the state as events: a
    routing that begins with them decides as this one does after `begin`.
    """

    def __init__(self, events: Iterable[RoutingEvent], record: Callable[[RoutingEvent], None] | None = None):
        """`events`: `Began` and any further initial events. `record`: called with every later event, in
        order."""
        self._recorder = record
        self.begin(events)

    def begin(self, events: Iterable[RoutingEvent]) -> None:
        """Reset all state, and begin with these events."""
        first, *others = events
        assert isinstance(first, Began)
        self._is_beginning = True
        self._began = first
        self._costs = profile_from_json(first.costs)
        self._numbers: dict[str, int] = {}
        self._ranks: list[int] = []
        self._bytes: list[int] = []
        self._removed: set[str] = set()
        self._limits = list(first.limits)
        self.view = FleetView(
            load=FleetLoad(list(map(_limits, first.limits)), AnswerLength(first.mean_tokens)),
            tiers=AdapterTiers(),
            costs=StepSetCosts(self._costs, rank_bytes=0.0),
            moves=self,
        )
        self._held = HeldAdapters(self.view.tiers, self._numbers, self._record)
        self._controller = live_controller(
            Policy.of_name(first.policy),
            self.view,
            period_s=first.period_s,
            pads=self._costs.kernels is KernelKind.PADDED,
            device_bytes=first.device_bytes,
            now_s=first.now_s,
        )
        self._num_given = 0  # number of adapters that the controller has
        for event in others:
            self.apply(event)
        self._is_beginning = False

    def state(self) -> Iterator[RoutingEvent]:
        """Yield events that recreate the present state. Removed versions that no request uses are omitted."""
        load = self.view.load
        yield msgspec.structs.replace(
            self._began, mean_tokens=load.answers.mean_tokens, limits=list(self._limits)
        )
        opened = [(n, *each) for n in range(load.num_replicas) for each in load.requests_on(n)]
        in_use = {request.adapter for _, _, request in opened}
        kept = {
            number: version
            for version, number in self._numbers.items()
            if version not in self._removed or number in in_use
        }
        for number, version in kept.items():
            yield AdapterKnown(version=version, rank=self._ranks[number], num_bytes=self._bytes[number])
            if version in self._removed:
                yield AdapterRemoved(version=version)
        for replica in range(load.num_replicas):
            if not load.accepts[replica]:
                yield Accepts(replica=replica, accepts=False)
        yield from (holds for holds in self._held.events() if self._numbers[holds.version] in kept)
        running = {request_id for request_id, _, _ in load.running()}
        for replica, request_id, request in opened:
            yield Open(
                request_id=str(request_id),
                replica=replica,
                prompt_tokens=request.prompt_tokens,
                version=None if request.adapter is None else kept[request.adapter],
                is_running=request_id in running,
                tenant=request.tenant,
            )
        yield plan_state(self._current().state(), kept)

    def apply(self, event: RoutingEvent) -> Decision | None:
        """Apply an event of another routing; return a decision as this one makes it."""
        match event:
            case AdapterKnown(version=version, rank=rank, num_bytes=num_bytes):
                self._add(version, rank, num_bytes)
            case AdapterRemoved(version=version):
                self.remove(version)
            case Joined(replica=replica, limits=limits):
                self.join(replica, limits)
            case Accepts(replica=replica, accepts=accepts):
                self.accept(replica, accepts=accepts)
            case Holds(replica=replica, version=version):
                self._held.set(replica, version, Held(event.on_device, event.on_host))
            case Lost(replica=replica):
                self.lost(replica)
            case Given(placed=placed):
                self._current().give(given_entries(placed, self._numbers))
            case Staged(replica=replica, version=version, is_there=is_there):
                self.staged(replica, version, is_there=is_there)
            case Open(request_id=request_id, replica=replica):
                request = self.request_of(event.version, event.prompt_tokens, event.tenant)
                self.view.load.sent(request_id, request, replica)
                if event.is_running:
                    self.view.load.first_token(request_id)
            case FirstToken(request_id=request_id):
                self.first_token(request_id)
            case Ended(request_id=request_id, output_tokens=output_tokens):
                self.ended(request_id, output_tokens)
            case PlanState():
                self._current().restore(controller_state(event, self._numbers))
            case Sent() | Ticked():
                return self._decide_again(event)
            case Began():
                raise AssertionError("a routing begins once")
        return None

    def _decide_again(self, event: Decision) -> Decision:
        if isinstance(event, Ticked):
            return self._tick(event.now_s, event.serving, event.num_output).event
        to = event.replica if event.is_move else None
        replica = self.route(event.request_id, event.version, event.prompt_tokens, to=to, tenant=event.tenant)
        return msgspec.structs.replace(event, replica=replica)

    # ---- requests

    def request_of(self, version: str | None, prompt_tokens: int, tenant: str = NO_TENANT) -> RoutedRequest:
        """Return a request as routers see it. Raises UnknownModelError for a version that was never added."""
        if version is None:
            return RoutedRequest(None, 0, prompt_tokens, tenant=tenant)
        number = self._numbers.get(version)
        if number is None:
            raise UnknownModelError(f"the fleet has no adapter of version {version}")
        return RoutedRequest(number, self._ranks[number], prompt_tokens, tenant=tenant)

    def route(
        self,
        request_id: str,
        version: str | None,
        prompt_tokens: int,
        *,
        to: int | None = None,
        rejected: Mapping[int, str] | None = None,
        tenant: str = NO_TENANT,
    ) -> int:
        """Return the replica that serves a request, to whose load it belongs until `ended`. `to`: the replica
        that it migrates to, which is then not chosen by the router. `rejected`: why other replicas do not
        accept it, for the log. `tenant`: whose it is.

        Raises UnknownModelError for a version that was never added, and CapacityError while no replica
        accepts requests.
        """
        request = self.request_of(version, prompt_tokens, tenant)
        name, controller = request_id_of(request_id), self._current()
        if to is None:
            replica = controller.route(name, request.adapter, prompt_tokens, tenant=tenant)
        else:
            replica = to
            controller.send(name, request, replica)
        self._record(
            Sent(
                request_id=request_id,
                replica=replica,
                prompt_tokens=prompt_tokens,
                version=version,
                at_unix_s=round(time.time(), 3),
                is_move=to is not None,
                rejected=dict(rejected or {}),
                tenant=tenant,
            )
        )
        if version is not None:
            self._held.use(replica, version, self._limits[replica].max_adapters)
        return replica

    def forecast(self, version: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast:
        """Predict the first token of a request that would arrive now, without changing anything; raises as
        `route` does. `admitted`: see `fleet.first_token.forecast`."""
        view, request = self.view, self.request_of(version, prompt_tokens)
        replica = self._current().would_choose(request)
        memory = self._costs.memory
        step_tokens = _STEP_TOKENS if memory is None else memory.step_tokens
        return forecast(request, view, replica, admitted=admitted, step_tokens=step_tokens)

    def first_token(self, request_id: str) -> None:
        self._current().first_token(request_id_of(request_id))
        self._record(FirstToken(request_id=request_id))

    def ended(self, request_id: str, output_tokens: int | None) -> None:
        """Record the end of a request. `output_tokens`: None if it failed or was cancelled."""
        self._current().ended(request_id_of(request_id), output_tokens)
        self._record(Ended(request_id=request_id, output_tokens=output_tokens))

    # ---- plans

    @property
    def next_tick_s(self) -> float:
        """The time in seconds at which the present period ends; infinite if nothing is decided by time."""
        return self._controller.next_tick_s

    def tick(
        self, now_s: float, serving: Collection[int], num_output: Callable[[], Mapping[str, int]]
    ) -> Tick | None:
        """Place adapters and migrate requests, if a period has ended or replicas or adapters have changed.
        Return None if there is nothing to decide. `serving`: the replicas that take requests; while there are
        none, nothing is decided. `num_output`: returns the output tokens of each request on its present
        replica.
        """
        controller = self._current()
        if not serving or not controller.has_to_decide(now_s, frozenset(serving)):
            return None
        tick = self._tick(now_s, serving, num_output() if controller.may_migrate(now_s) else {})
        self._record(tick.event)
        return tick

    def _tick(self, now_s: float, serving: Collection[int], num_output: Mapping[str, int]) -> Tick:
        controller = self._current()
        before = controller.target
        stages, moves = controller.decide(now_s, lambda name: num_output.get(str(name)), serving)
        versions, after = list(self._numbers), controller.target
        placed = []
        if after is not None and after is not before:
            old = [] if before is None else before.entries()
            placed = [
                placed_adapter(versions[number], entry)
                for number, entry in enumerate(after.entries())
                if versions[number] not in self._removed and (number >= len(old) or entry != old[number])
            ]
        event = Ticked(
            now_s=now_s,
            serving=sorted(serving),
            num_output=dict(num_output),
            placed=placed,
            stages=len(stages),
            moves=[Moved(request_id=str(name), source=source, target=to) for name, source, to in moves],
        )
        return Tick(event, [(replica, versions[number]) for replica, number in stages])

    def staged(self, replica: int, version: str, *, is_there: bool) -> None:
        """Record that a replica has loaded a version, or could not. Ignored if the version was removed
        meanwhile."""
        if version not in self._numbers or version in self._removed:
            return
        self._record(Staged(replica=replica, version=version, is_there=is_there))
        if is_there:
            self._held.use(replica, version, self._limits[replica].max_adapters)
        self._current().staged(replica, self._numbers[version], is_there=is_there)

    def wants(self, replica: int, version: str) -> bool:
        """Return whether a replica that was asked to load a version still has to."""
        if version not in self._numbers or version in self._removed:
            return False
        return self._current().wants(replica, self._numbers[version])

    def give(self, given: Mapping[str, Entry]) -> None:
        """Keep these entries of versions from the next `tick` on, instead of those of the policy's placement;
        versions that were never added are left out. With none, the policy places all of them again."""
        placed = [placed_adapter(each, entry) for each, entry in given.items() if each in self._numbers]
        self._current().give(given_entries(placed, self._numbers))
        self._record(Given(placed=placed))

    @property
    def has_placement(self) -> bool:
        """Return whether the policy places adapters; otherwise every replica serves all of them."""
        return self._controller.has_placement

    def waiting(self, version: str) -> list[int]:
        """Return the replicas that are to load a version before its next entry takes effect."""
        number = self._numbers.get(version)
        return [] if number is None else sorted(self._current().waiting(number))

    def num_bytes(self, version: str) -> int:
        """Return the bytes of a version that was added."""
        return self._bytes[self._numbers[version]]

    def placed_on(self, version: str) -> Entry | None:
        """Return the replicas that the placement gives a version to; None if there is no plan."""
        number = self._numbers.get(version)
        self._current()
        plan = self.view.plan
        return None if plan is None or number is None else Entry(plan.replicas[number], plan.shares[number])

    def has(self, replica: int, version: str) -> bool:
        """Return whether a replica has a version in its memory, as far as known."""
        return self._held.has(replica, version)

    @property
    def is_everywhere(self) -> bool:
        """Return whether every replica is placed with all adapters, because there is no plan."""
        return self.view.plan is None

    def placed(self) -> list[list[str]]:
        """Return the versions that each replica is placed with."""
        there = {version: each for version, each in self._numbers.items() if version not in self._removed}
        plan, num_replicas = self.view.plan, self.view.load.num_replicas
        if plan is None:
            return [list(there)] * num_replicas
        placed: list[list[str]] = [[] for _ in range(num_replicas)]
        for version, number in there.items():
            for replica in plan.replicas[number]:
                placed[replica].append(version)
        return placed

    # ---- replicas

    def join(self, replica: int, limits: Limits) -> None:
        """Add a replica, or replace one that left by a new one, which has no adapters yet."""
        self.lost(replica)
        self._record(Joined(replica=replica, limits=limits))
        self._limits[replica : replica + 1] = [limits]
        self._current().join(replica, _limits(limits))

    def lost(self, replica: int) -> None:
        """Record that a replica is down and has lost all adapters."""
        self._held.lose(replica)

    def accept(self, replica: int, *, accepts: bool) -> None:
        """Set whether a replica is sent requests from now on."""
        if bool(self.view.load.accepts[replica]) is accepts:
            return
        if accepts:
            self._current().up(replica)
        else:
            self._current().down(replica)
        self._record(Accepts(replica=replica, accepts=accepts))

    def num_in_flight(self, replica: int) -> int:
        """Return the number of requests that were sent to a replica and have not ended."""
        return int(self.view.load.everything.num_requests[replica])

    # ---- adapters

    def add(self, spec: AdapterSpec) -> None:
        """Add a version. It keeps its number when it is removed, as it may come back."""
        self._add(spec.version, spec.max_rank, max(spec.num_params * self._costs.subject.element_bytes, 1))

    def twin(self, replica: Ready, recent: RecentRequests) -> TwinSubject | None:
        """Return what a twin needs to replay the requests of replicas that are like this one; None if its
        costs are unknown."""
        if replica.costs is None:
            return None
        return TwinSubject(
            costs=replica.costs,
            policy=replica.policy or EnginePolicy(),
            max_running=int(self.view.load.max_running.min()),
            rank_params=sum(self._bytes) / self._costs.subject.element_bytes / max(sum(self._ranks), 1),
            recent=recent,
        )

    def saw(self, replica: int, stats: EngineStats) -> None:
        """Record which adapters a replica reports, and in which memory."""
        # Without a device, adapters are used from host memory.
        ready = ("device", "loading") if stats.device_arena_bytes else ("device", "loading", "host")
        for adapter in stats.adapters:
            is_absent = adapter.tier == "disk" and not adapter.in_flight
            if is_absent and not self._held.has(replica, adapter.version):
                continue  # unchanged, as are most when there are thousands
            if adapter.version in self._numbers and adapter.version not in self._removed:
                on_device = adapter.tier in ready or adapter.in_flight > 0
                self._held.set(replica, adapter.version, Held(on_device, adapter.tier == "host"))

    def remove(self, version: str) -> None:
        """Remove a version from the placement. Requests that use it continue."""
        if version in self._removed or version not in self._numbers:
            return
        self._removed.add(version)
        self._current().remove_adapter(self._numbers[version])
        self._held.forget(version)
        self._record(AdapterRemoved(version=version))

    @property
    def has_many_gone(self) -> bool:
        """Return whether the routing should begin again with its `state`, in which removed versions have no
        numbers."""
        return len(self._removed) > max(_MAX_GONE, len(self._numbers) // 2)

    def _add(self, version: str, rank: int, num_bytes: int) -> None:
        if version in self._removed:
            self._removed.remove(version)
            self._current().restore_adapter(self._numbers[version])
        elif version in self._numbers:
            return
        else:
            self._numbers[version] = len(self._ranks)
            self._ranks.append(rank)
            self._bytes.append(num_bytes)
        self._record(AdapterKnown(version=version, rank=rank, num_bytes=num_bytes))

    def _record(self, event: RoutingEvent) -> None:
        """Report an event, except initial ones, which the recorder already has."""
        if self._recorder is not None and not self._is_beginning:
            self._recorder(event)

    # ---- costs of loads (fleet.view.AdapterMoves)

    def from_host_s(self, adapter: int) -> float:
        return self._costs.copy_s(self._bytes[adapter])

    def from_elsewhere_s(self, adapter: int) -> float:
        return self._costs.read_s(self._bytes[adapter])

    def _current(self) -> LiveController:
        """Return the controller with all adapters: many may be added before it is used."""
        num_given, self._num_given = self._num_given, len(self._ranks)
        if num_given < len(self._ranks):
            rank_bytes = sum(self._bytes) / sum(self._ranks)
            self.view.costs = StepSetCosts(self._costs, rank_bytes=rank_bytes)
            added = AdapterSizes.of(ranks=self._ranks[num_given:], num_bytes=self._bytes[num_given:])
            self._controller.add_adapters(added)
        return self._controller


def _limits(limits: Limits) -> ReplicaLimits:
    return ReplicaLimits(
        max_running=limits.max_running, kv_tokens=limits.kv_tokens, max_adapters=limits.max_adapters
    )
