"""A simulated fleet: many engines behind the fleet's own controller, on one virtual clock.

Each engine is a twin of its own. It is simulated when a request is sent to it and when something becomes
visible from outside (a first token, an end, an adapter that moves), never because a router looks: what
routers see is kept by the controller.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loraplex.fleet.controller import Controller
from loraplex.twin.outcome import Outcome, RequestEvent, RequestOutcome
from loraplex.twin.simulator import AdapterEvent, Simulator
from loraplex.workload.jsonl import WorkloadRequest


class Engines(Protocol):
    """Makes engines that are all alike, and makes adapters known to them. `sizes`: of adapters, in bytes."""

    @property
    def sizes(self) -> Sequence[int]: ...

    def make(self) -> Simulator: ...

    def register(self, simulator: Simulator, adapter: int) -> None: ...

    def adapter_number(self, version: str) -> int: ...


class _Replica:
    """One engine of the fleet. `wake_s`: nothing can be seen of it before this time. `numbers`: of the
    requests that it was sent, in the order of the workload."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.simulator = engines.make()
        self.request_events: list[RequestEvent] = []
        self.adapter_events: list[AdapterEvent] = []
        self.simulator.recorder.events = self.request_events
        self.simulator.adapter_events = self.adapter_events
        self.adapters: set[int] = set()
        self.numbers: list[int] = []
        self.num_reads = 0
        self.wake_s = math.inf

    def send(self, number: int, request: WorkloadRequest) -> RequestOutcome:
        simulator = self.simulator
        simulator.advance(request.arrival_s)
        if request.adapter not in self.adapters:
            self.adapters.add(request.adapter)
            self._engines.register(simulator, request.adapter)
        self.numbers.append(number)
        return simulator.offer(request)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFigures:
    """One replica's share. `num_tokens`: prompts and answers of the requests that were served.
    `num_adapters`: those it was sent requests for. `num_loads`: to its device. `num_reads`: to its host."""

    num_requests: int
    num_served: int
    num_tokens: int
    num_adapters: int
    num_loads: int
    num_reads: int
    num_steps: int
    mean_running: float
    mean_waiting: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOutcome:
    """What became of all requests, in the order of their arrival, and each replica's share. `chosen`: the
    replica of each request. `bytes_moved`: of adapters that came to a replica's host memory meanwhile."""

    all: Outcome
    chosen: Sequence[int]
    replicas: Sequence[ReplicaFigures]
    bytes_moved: int


class SimulatedFleet:
    """Runs a workload once, on as many engines as the controller has replicas."""

    def __init__(self, engines: Engines, controller: Controller, until_s: float = math.inf) -> None:
        self._engines = engines
        self._controller = controller
        self._until_s = until_s
        self._replicas = [_Replica(engines) for _ in range(controller.view.load.num_replicas)]
        self._outcomes: list[RequestOutcome] = []
        self._chosen: list[int] = []
        self._bytes_moved = 0
        self._wakes: list[tuple[float, int]] = []  # a heap; of a replica's entries the one at `wake_s` counts
        self._events: list[tuple[float, int, bool]] = []  # a heap: when, which request, whether it has ended

    def run(self, workload: Iterable[WorkloadRequest]) -> FleetOutcome:
        """Simulate the whole workload, or as much of it as comes before the end."""
        for request in workload:
            if request.arrival_s >= self._until_s:
                break
            self._advance(request.arrival_s)
            self._send(request)
        while self._controller.next_tick_s < self._until_s and any(
            not each.simulator.is_idle() for each in self._replicas
        ):
            self._advance(self._controller.next_tick_s)
        for chosen, replica in enumerate(self._replicas):
            replica.simulator.advance(self._until_s)
            self._collect(chosen, math.inf)
        self._run_to(self._until_s)
        return self._outcome()

    def _send(self, request: WorkloadRequest) -> None:
        number = len(self._outcomes)
        chosen = self._controller.route(number, request.adapter, request.prompt_tokens)
        replica = self._replicas[chosen]
        self._chosen.append(chosen)
        self._outcomes.append(replica.send(number, request))
        self._collect(chosen, replica.simulator.quiet_until_s())

    def _advance(self, now_s: float) -> None:
        """Bring all that can be seen from outside up to this time."""
        controller = self._controller
        while controller.next_tick_s <= now_s:
            tick_s = controller.next_tick_s
            self._run_to(tick_s)
            controller.tick(tick_s)
        self._run_to(now_s)

    def _run_to(self, now_s: float) -> None:
        wakes, events, controller = self._wakes, self._events, self._controller
        while wakes and wakes[0][0] < now_s:
            wake_s, chosen = heapq.heappop(wakes)
            replica = self._replicas[chosen]
            if wake_s == replica.wake_s:  # it was sent nothing since then
                self._collect(chosen, replica.simulator.run_to(now_s))
        while events and events[0][0] <= now_s:
            _, number, has_ended = heapq.heappop(events)
            if has_ended:
                outcome = self._outcomes[number]
                controller.ended(number, None if outcome.failed else outcome.request.output_tokens)
            else:
                controller.first_token(number)

    def _collect(self, chosen: int, wake_s: float) -> None:
        """Take over what a replica did, part of which may lie ahead: the step that is under way."""
        replica, tiers = self._replicas[chosen], self._controller.view.tiers
        for at_s, request_id, reason in replica.request_events:
            heapq.heappush(self._events, (at_s, replica.numbers[int(request_id)], reason is not None))
        replica.request_events.clear()
        for kind, version in replica.adapter_events:
            adapter = self._engines.adapter_number(version)
            if kind == "load":
                tiers.loaded(chosen, adapter)
            elif kind == "read":
                tiers.staged(chosen, adapter)
                replica.num_reads += 1
                self._bytes_moved += self._engines.sizes[adapter]
            else:
                tiers.evicted(chosen, adapter)
        replica.adapter_events.clear()
        replica.wake_s = wake_s
        if wake_s < math.inf:
            heapq.heappush(self._wakes, (wake_s, chosen))

    def _outcome(self) -> FleetOutcome:
        simulators = [replica.simulator for replica in self._replicas]
        end_s = max(simulator.now_s for simulator in simulators)
        duration_s = end_s if self._until_s == math.inf else self._until_s
        parts = [simulator.outcome(duration_s) for simulator in simulators]
        whole = Outcome(
            requests=self._outcomes,
            duration_s=duration_s,
            num_steps=sum(part.num_steps for part in parts),
            num_loads=sum(part.num_loads for part in parts),
            num_preemptions=sum(part.num_preemptions for part in parts),
            mean_running=sum(part.mean_running for part in parts),
            mean_waiting=sum(part.mean_waiting for part in parts),
            gaps=[gap for part in parts for gap in part.gaps],
        )
        figures = [_figures(replica, part) for replica, part in zip(self._replicas, parts, strict=True)]
        return FleetOutcome(all=whole, chosen=self._chosen, replicas=figures, bytes_moved=self._bytes_moved)


def _figures(replica: _Replica, outcome: Outcome) -> ReplicaFigures:
    served = [each for each in outcome.requests if each.finish_s is not None and not each.failed]
    return ReplicaFigures(
        num_requests=len(outcome.requests),
        num_served=len(served),
        num_tokens=sum(each.num_tokens for each in served),
        num_adapters=len(replica.adapters),
        num_loads=outcome.num_loads,
        num_reads=replica.num_reads,
        num_steps=outcome.num_steps,
        mean_running=outcome.mean_running,
        mean_waiting=outcome.mean_waiting,
    )
