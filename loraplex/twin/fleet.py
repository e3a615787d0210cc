"""Many engines under one stream of requests, each a twin of its own, behind a router.

Engines have nothing in common but the clock, so that each is simulated by itself. A router that wants to know
how an engine is doing has it brought up to the time of its request by looking at it; one that nobody looks at
is simulated in one go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from loraplex.core.errors import UserError
from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin.outcome import Outcome
from loraplex.twin.replay import OwnEngines, Profile, ReplayOptions, check_options, check_workload, longest_of
from loraplex.twin.simulator import Simulator
from loraplex.workload.jsonl import WorkloadRequest


class Routing(StrEnum):
    """Routers that have a name."""

    ADAPTER = "adapter"
    """Each adapter belongs to one engine: its number modulo theirs."""
    ROUND_ROBIN = "round-robin"
    """Engines take turns."""


class Engine:
    """One of a fleet. What is sent to it waits until somebody looks: an engine is quickest to simulate if it
    is not left for another one all the time."""

    def __init__(self, maker: OwnEngines, until_s: float) -> None:
        self._maker = maker
        self._until_s = until_s
        self._simulator = maker.make()
        self._sent: list[WorkloadRequest] = []
        self.adapters: set[int] = set()
        """Those it was ever sent requests on; it knows no others."""

    def send(self, request: WorkloadRequest) -> None:
        self._sent.append(request)

    def at(self, now_s: float) -> Simulator:
        """As it is at this time, or at the end of the step that is under way then; to be looked at only."""
        simulator, sent = self._simulator, self._sent
        for request in sent:
            simulator.advance(request.arrival_s)
            if simulator.now_s >= self._until_s:
                break
            if request.adapter not in self.adapters:
                self.adapters.add(request.adapter)
                self._maker.register(simulator, request.adapter)
            simulator.offer(request)
        sent.clear()
        simulator.advance(now_s)
        return simulator


class Router(Protocol):
    """Which engine a request goes to."""

    def choose(self, request: WorkloadRequest, engines: Sequence[Engine]) -> int:
        """Its number. Requests come in the order of their arrival; `engines[i].at(request.arrival_s)` is the
        engine as it is then, to be looked at only."""
        ...


class AdapterRouter:
    """`Routing.ADAPTER`."""

    def choose(self, request: WorkloadRequest, engines: Sequence[Engine]) -> int:
        return request.adapter % len(engines)


class RoundRobinRouter:
    """`Routing.ROUND_ROBIN`."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: WorkloadRequest, engines: Sequence[Engine]) -> int:
        chosen = self._next % len(engines)
        self._next = chosen + 1
        return chosen


ROUTERS: dict[Routing, Callable[[], Router]] = {
    Routing.ADAPTER: AdapterRouter,
    Routing.ROUND_ROBIN: RoundRobinRouter,
}


def routing_of(name: str) -> Routing:
    """By its name. Raises UserError for one that nobody has."""
    try:
        return Routing(name)
    except ValueError:
        raise UserError(f"there is no routing {name!r}; there are {', '.join(Routing)}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFigures:
    """`num_adapters`: that it was sent requests on. `num_loads`: of adapters to the device."""

    num_requests: int
    num_served: int
    num_adapters: int
    num_loads: int
    num_steps: int
    mean_running: float
    mean_waiting: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOutcome:
    """What became of all requests, as of one engine's; and the share of each engine."""

    all: Outcome
    engines: Sequence[EngineFigures]


class Fleet:
    """Engines that are all alike. An adapter is made known to an engine with its first request there."""

    def __init__(
        self, maker: OwnEngines, num_engines: int, router: Router, until_s: float = math.inf
    ) -> None:
        if num_engines < 1:
            raise UserError(f"a fleet has at least one engine, not {num_engines}")
        self._router = router
        self._until_s = until_s
        self._engines = [Engine(maker, until_s) for _ in range(num_engines)]

    def run(self, workload: Iterable[WorkloadRequest]) -> FleetOutcome:
        """All of it, or as far as it comes by then."""
        chosen: list[int] = []
        for request in workload:
            if request.arrival_s >= self._until_s:
                break
            chosen.append(self._router.choose(request, self._engines))
            self._engines[chosen[-1]].send(request)
        simulators = [engine.at(self._until_s) for engine in self._engines]
        end_s = max(simulator.now_s for simulator in simulators)
        duration_s = end_s if self._until_s == math.inf else self._until_s
        parts = [simulator.outcome(duration_s) for simulator in simulators]
        of_engine = [iter(part.requests) for part in parts]
        # One that came when its engine was beyond the end already is in no engine's books.
        found = (next(of_engine[number], None) for number in chosen)
        whole = Outcome(
            requests=[outcome for outcome in found if outcome is not None],
            duration_s=duration_s,
            num_steps=sum(part.num_steps for part in parts),
            num_loads=sum(part.num_loads for part in parts),
            num_preemptions=sum(part.num_preemptions for part in parts),
            mean_running=sum(part.mean_running for part in parts),
            mean_waiting=sum(part.mean_waiting for part in parts),
            gaps=[gap for part in parts for gap in part.gaps],
        )
        figures = [
            _figures(engine, simulator, part)
            for engine, simulator, part in zip(self._engines, simulators, parts, strict=True)
        ]
        return FleetOutcome(all=whole, engines=figures)


def _figures(engine: Engine, simulator: Simulator, outcome: Outcome) -> EngineFigures:
    return EngineFigures(
        num_requests=len(outcome.requests),
        num_served=sum(each.finish_s is not None and not each.failed for each in outcome.requests),
        num_adapters=len(engine.adapters),
        num_loads=outcome.num_loads,
        num_steps=outcome.num_steps,
        mean_running=outcome.mean_running,
        mean_waiting=outcome.mean_waiting,
    )


def replay_fleet(
    profile: Profile,
    workload: Sequence[WorkloadRequest],
    options: ReplayOptions,
    *,
    num_engines: int,
    routing: Routing = Routing.ADAPTER,
) -> FleetOutcome:
    """What would become of a workload on so many engines."""
    check_workload(workload, options)
    check_options(profile, options)
    if isinstance(profile, SlotProfile):
        raise UserError("a fleet is of our own engines; the profile is of an engine with slots for adapters")
    maker = OwnEngines(profile, options, longest=longest_of(workload))
    return Fleet(maker, num_engines, ROUTERS[routing](), options.until_s).run(workload)
