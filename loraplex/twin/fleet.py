"""A simulated fleet: many engines behind the fleet's own controller, on one virtual clock.

Each engine is a twin of its own. It is simulated when a request is sent to it and when something becomes
visible from outside (a first token, an end, an adapter load or eviction), never because a router looks: the
controller keeps what routers see.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from loraplex.fleet.controller import Controller
from loraplex.fleet.migration.problem import Move
from loraplex.fleet.pool import Drop
from loraplex.twin.engine_twin import AdapterEvent, Adapters, Engines, EngineTwin, T
from loraplex.twin.front import Front
from loraplex.twin.links import Links
from loraplex.twin.outcome import Outcome, RequestEvent, RequestOutcome, Timeline
from loraplex.workload.jsonl import WorkloadRequest

_TURN_S: Final = 5e-3
"""Seconds that one replica may be simulated ahead of the next: about one step."""


class _Replica:
    """One engine of the fleet. `wake_s`: nothing becomes visible before this time. `numbers`: workload
    numbers of the requests sent to it, in that order. `kept`: adapters whose copies it has to evict and could
    not yet."""

    def __init__(self, engines: Engines[T]) -> None:
        simulator = engines.make()
        self.simulator: EngineTwin = simulator
        self._register = partial(engines.register, simulator)
        self.unstage = partial(engines.unstage, simulator)
        self.request_events: list[RequestEvent] = []
        self.adapter_events: list[AdapterEvent] = []
        simulator.watch(self.request_events, self.adapter_events)
        self.adapters: set[int] = set()
        self.numbers: list[int] = []
        self._request_ids: dict[int, str] = {}
        self.num_fetches = 0
        self.kept: set[int] = set()
        self.wake_s = math.inf

    def send(self, number: int, request: WorkloadRequest) -> RequestOutcome:
        self._prepare(number, request)
        return self.simulator.offer(request)

    def resume(self, number: int, request: WorkloadRequest, outcome: RequestOutcome) -> None:
        """Continue a request that comes from another replica."""
        self._prepare(number, request)
        self.simulator.resume(request, outcome)

    def hand_over(self, number: int) -> tuple[RequestOutcome, int] | None:
        """Give up a request that was sent to this replica; return None if it has ended."""
        return self.simulator.hand_over(self._request_ids[number])

    def num_output(self, number: int) -> int | None:
        return self.simulator.num_output(self._request_ids[number])

    def _prepare(self, number: int, request: WorkloadRequest) -> None:
        simulator = self.simulator
        simulator.advance(request.arrival_s)
        if request.adapter not in self.adapters:
            self.adapters.add(request.adapter)
            self._register(request.adapter)
        self._request_ids[number] = str(len(self.numbers))  # a new id if it comes back
        self.numbers.append(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFigures:
    """One replica's figures. `num_tokens`: prompt and output tokens of served requests. `num_adapters`:
    adapters it was sent requests for. `num_loads`: loads to its device. `num_fetches`: adapters brought to
    its host memory, from other replicas or from disk."""

    num_requests: int
    num_served: int
    num_tokens: int
    num_adapters: int
    num_loads: int
    num_fetches: int
    num_steps: int
    mean_running: float
    mean_waiting: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOutcome:
    """The outcome of all requests, in order of arrival, and the figures of each replica. `chosen`: the
    replica of each request; None if it was refused. `bytes_moved`: bytes of adapters brought to the replicas'
    host memory; None if their sizes are not known. `most_bytes_held`: the most bytes of adapters that one
    host held or was fetching at any time; None if adapters are not shared. `num_moves`: number of migrations;
    a moved request counts with the replica where it ended."""

    all: Outcome
    chosen: Sequence[int | None]
    replicas: Sequence[ReplicaFigures]
    bytes_moved: int | None
    most_bytes_held: int | None
    num_moves: int

    def overloaded_replicas(self, most: int = 3) -> list[tuple[int, float]]:
        """Return the replicas with the most waiting requests, with their mean number, if the fleet is
        overloaded; otherwise none."""
        if not self.all.is_overloaded():
            return []
        waiting = [(number, each.mean_waiting) for number, each in enumerate(self.replicas)]
        return sorted(waiting, key=lambda each: -each[1])[:most]

    def timelines(self, num_intervals: int) -> list[Timeline]:
        """Return the running and waiting requests of each replica over the same intervals. A request that
        moved counts with the replica where it ended for its whole time."""
        requests: list[list[RequestOutcome]] = [[] for _ in self.replicas]
        for chosen, request in zip(self.chosen, self.all.requests, strict=True):
            if chosen is not None:
                requests[chosen].append(request)
        return [replace(self.all, requests=part).timeline(num_intervals) for part in requests]


class SimulatedFleet:
    """Runs a workload once, on as many engines as the controller has replicas."""

    def __init__(
        self,
        engines: Engines[T],
        controller: Controller,
        until_s: float = math.inf,
        links: Links | None = None,
        *,
        tells_lengths: bool = False,
        front: Front | None = None,
    ) -> None:
        """`links`: the network between replicas; given if and only if the controller shares adapters.
        `tells_lengths`: the controller knows the length of every answer beforehand. `front`: decides which
        requests are refused; None to admit all."""
        assert (links is None) != controller.shares_adapters
        self._adapters: Adapters = engines
        self._controller = controller
        self._links = links
        self._until_s = until_s
        self._tells_lengths = tells_lengths
        self._front = front
        self._replicas = [_Replica(engines) for _ in range(controller.view.load.num_replicas)]
        if links is not None:
            for number, replica in enumerate(self._replicas):
                replica.simulator.fetch_by(partial(self._fetch_end_s, number))
        self._outcomes: list[RequestOutcome] = []
        self._chosen: list[int | None] = []
        self._answered: dict[int, int] = {}  # output tokens of requests before they moved
        self._bytes_moved = 0
        self._num_moves = 0
        self._wakes: list[tuple[float, int]] = []  # a heap; only entries equal to a replica's `wake_s` count
        self._events: list[tuple[float, int, bool, int]] = []  # a heap: time, request, is it its end, replica
        self._fetches: list[tuple[float, int, int]] = []  # a heap: end, replica, adapter
        self._drops: list[Drop] = []  # decided while the engine was in the middle of a step

    def run(self, workload: Iterable[WorkloadRequest]) -> FleetOutcome:
        """Simulate the whole workload, or the part of it that arrives before the end."""
        for request in workload:
            if request.arrival_s >= self._until_s:
                break
            if not self._outcomes:  # the first one; its time may count from 1970
                self._controller.begin(request.arrival_s)
            self._advance(request.arrival_s)
            self._send(request)
        while self._controller.next_tick_s < self._until_s and any(
            not each.simulator.is_idle() for each in self._replicas
        ):
            self._advance(self._controller.next_tick_s)
        self._run_to(self._until_s)
        for chosen, replica in enumerate(self._replicas):
            replica.simulator.advance(self._until_s)
            self._collect(chosen, math.inf)
        self._run_to(self._until_s)
        return self._outcome()

    def _send(self, request: WorkloadRequest) -> None:
        number = len(self._outcomes)
        if self._front is not None and not self._front.admits(number, request, self._controller):
            self._outcomes.append(RequestOutcome(request, refused=True))
            self._chosen.append(None)
            return
        output_tokens = request.output_tokens if self._tells_lengths else None
        chosen = self._controller.route(
            number, request.adapter, request.prompt_tokens, output_tokens, request.tenant
        )
        replica = self._replicas[chosen]
        self._chosen.append(chosen)
        self._outcomes.append(replica.send(number, request))
        self._collect(chosen, replica.simulator.quiet_until_s())

    def _advance(self, now_s: float) -> None:
        """Process everything visible from outside up to this time."""
        controller = self._controller
        while controller.next_tick_s <= now_s:
            tick_s = controller.next_tick_s
            self._run_to(tick_s)
            if controller.is_idle:
                controller.idle_until(now_s)
                break
            if controller.may_migrate(tick_s):
                self._catch_up(tick_s)
            decisions = controller.tick(tick_s, self._num_output)
            self._let_go(decisions.drops)
            for move in decisions.moves:
                self._move(move, tick_s)
        self._run_to(now_s)

    def _run_to(self, now_s: float) -> None:
        wakes, events, controller = self._wakes, self._events, self._controller
        while wakes and wakes[0][0] < now_s:
            wake_s, chosen = heapq.heappop(wakes)
            replica = self._replicas[chosen]
            if wake_s == replica.wake_s:  # otherwise it was sent a request since then
                until_s = now_s if self._links is None else min(now_s, self._turn_end_s(wake_s))
                self._collect(chosen, replica.simulator.run_to(until_s))
        while self._fetches and self._fetches[0][0] <= now_s:
            _, chosen, adapter = heapq.heappop(self._fetches)
            self._let_go(controller.fetched(chosen, adapter))
        while events and events[0][0] <= now_s:
            at_s, number, has_ended, chosen = heapq.heappop(events)
            if chosen != self._chosen[number]:
                continue  # a first token at the replica it has left since
            if has_ended:
                outcome = self._outcomes[number]
                served = not (outcome.failed or outcome.lost)
                controller.ended(number, outcome.request.output_tokens if served else None)
                if self._front is not None:
                    self._front.ended(number, at_s, is_whole=served)
            else:
                controller.first_token(number)
                if self._front is not None:
                    self._front.began(number, at_s)

    def _turn_end_s(self, wake_s: float) -> float:
        """Return how far one replica is simulated before the others where they share links: at most a step
        beyond the next of them, because links serve in the order of the requests."""
        next_s = self._wakes[0][0] if self._wakes else wake_s
        return max(next_s, wake_s) + _TURN_S

    def _catch_up(self, now_s: float) -> None:
        """Cut leaps of decodes short: a request migrates with the tokens that it has now."""
        for chosen, replica in enumerate(self._replicas):
            replica.simulator.advance(now_s)
            self._collect(chosen, replica.simulator.quiet_until_s())

    def _num_output(self, number: Hashable) -> int | None:
        assert isinstance(number, int)
        chosen = self._chosen[number]
        assert chosen is not None, "a refused request is nowhere"
        num_output = self._replicas[chosen].num_output(number)
        return None if num_output is None else self._answered.get(number, 0) + num_output

    def _move(self, move: Move, now_s: float) -> None:
        """Continue a request on another replica, from the end of its current step."""
        number, source, target = move.request_id, self._replicas[move.source], self._replicas[move.target]
        assert isinstance(number, int)
        handed = source.hand_over(number)
        if handed is None:
            return
        outcome, num_more = handed
        request, num_output = outcome.request, self._answered.get(number, 0) + num_more
        self._answered[number] = num_output
        self._controller.moved(number, move.target, num_output)
        left = replace(
            request,
            arrival_s=max(source.simulator.now_s, now_s),
            prompt_tokens=request.prompt_tokens + num_output,
            output_tokens=request.output_tokens - num_output,
        )
        target.resume(number, left, outcome)
        self._chosen[number] = move.target
        self._num_moves += 1
        for chosen in (move.source, move.target):
            self._collect(chosen, self._replicas[chosen].simulator.quiet_until_s())

    def _fetch_end_s(self, chosen: int, version: str) -> float:
        """Return when a replica has an adapter in host memory that it requests now."""
        pool, links = self._controller.pool, self._links
        assert pool is not None
        assert links is not None
        adapter, now_s = self._adapters.adapter_number(version), self._replicas[chosen].simulator.now_s
        if pool.has(chosen, adapter):
            return now_s
        source, drops = self._controller.fetch(chosen, adapter, links.free_at_s)
        self._drops += drops
        num_bytes = self._adapters.sizes[adapter]
        end_s = links.copy(source=source, target=chosen, num_bytes=num_bytes, now_s=now_s)
        heapq.heappush(self._fetches, (end_s, chosen, adapter))
        self._replicas[chosen].num_fetches += 1
        self._bytes_moved += num_bytes
        return end_s

    def _let_go(self, drops: Iterable[Drop]) -> None:
        for chosen, adapter in drops:
            replica = self._replicas[chosen]
            replica.unstage(adapter)
            if adapter in replica.adapters:  # it may be reading it, or copying it to its device
                replica.kept.add(adapter)

    def _let_go_of_kept(self, chosen: int, replica: _Replica) -> None:
        """Evict copies that were in use when their eviction was decided, and are not any more."""
        pool, in_flight = self._controller.pool, self._controller.view.load.in_flight
        assert pool is not None
        for adapter in sorted(replica.kept):
            is_wanted = pool.has(chosen, adapter) or pool.is_fetching(chosen, adapter)
            if is_wanted or (chosen not in in_flight(adapter) and replica.unstage(adapter)):
                replica.kept.remove(adapter)

    def _collect(self, chosen: int, wake_s: float) -> None:
        """Process a replica's events; those of the step in flight may lie in the future."""
        replica = self._replicas[chosen]
        if self._drops:
            self._let_go(self._drops)
            self._drops.clear()
        if replica.request_events:
            for at_s, request_id, reason in replica.request_events:
                number = replica.numbers[int(request_id)]
                heapq.heappush(self._events, (at_s, number, reason is not None, chosen))
            replica.request_events.clear()
        if replica.adapter_events:
            self._take_adapter_events(chosen, replica)
        if replica.kept:
            self._let_go_of_kept(chosen, replica)
        replica.wake_s = wake_s
        if wake_s < math.inf:
            heapq.heappush(self._wakes, (wake_s, chosen))

    def _take_adapter_events(self, chosen: int, replica: _Replica) -> None:
        tiers = self._controller.view.tiers
        for kind, version in replica.adapter_events:
            adapter = self._adapters.adapter_number(version)
            if kind == "load":
                tiers.loaded(chosen, adapter)
            elif kind == "read":
                tiers.staged(chosen, adapter)
                if self._links is None:
                    replica.num_fetches += 1
                    self._bytes_moved += self._adapters.sizes[adapter]
            elif kind == "unstage":
                if self._links is None:  # otherwise the pool decides what a host holds
                    tiers.dropped(chosen, adapter)
            else:
                tiers.evicted(chosen, adapter)
        replica.adapter_events.clear()

    def _end_s(self) -> float:
        """Return when the run ended: with its last request, though plans may be made after that."""
        end_s = max(replica.simulator.end_s(self._until_s) for replica in self._replicas)
        ends_s = [each.finish_s for each in self._outcomes if each.was_taken]
        last_s = max((each for each in ends_s if each is not None), default=end_s)
        return end_s if None in ends_s else min(end_s, last_s)

    def _outcome(self) -> FleetOutcome:
        pool, simulators = self._controller.pool, [replica.simulator for replica in self._replicas]
        end_s = self._end_s()
        parts = [simulator.outcome(end_s) for simulator in simulators]
        num_adapters = [part.num_step_adapters for part in parts]
        whole = Outcome(
            requests=self._outcomes,
            duration_s=max(part.duration_s for part in parts),
            num_steps=sum(part.num_steps for part in parts),
            num_loads=sum(part.num_loads for part in parts),
            num_preemptions=sum(part.num_preemptions for part in parts),
            mean_running=sum(part.mean_running for part in parts),
            mean_waiting=sum(part.mean_waiting for part in parts),
            gaps=[gap for part in parts for gap in part.gaps],
            num_swapped_out=sum(part.num_swapped_out for part in parts),
            num_swapped_in=sum(part.num_swapped_in for part in parts),
            num_merges=sum(part.num_merges for part in parts),
            num_merged_steps=sum(part.num_merged_steps for part in parts),
            num_pauses=sum(part.num_pauses for part in parts),
            num_step_adapters=None if None in num_adapters else sum(each or 0 for each in num_adapters),
        )
        figures = [_figures(replica, part) for replica, part in zip(self._replicas, parts, strict=True)]
        return FleetOutcome(
            all=whole,
            chosen=self._chosen,
            replicas=figures,
            bytes_moved=self._bytes_moved,
            most_bytes_held=None if pool is None else pool.most_bytes_held,
            num_moves=self._num_moves,
        )


def _figures(replica: _Replica, outcome: Outcome) -> ReplicaFigures:
    served = [each for each in outcome.requests if each.is_served]
    return ReplicaFigures(
        num_requests=len(outcome.requests),
        num_served=len(served),
        num_tokens=sum(each.num_tokens for each in served),
        num_adapters=len(replica.adapters),
        num_loads=outcome.num_loads,
        num_fetches=replica.num_fetches,
        num_steps=outcome.num_steps,
        mean_running=outcome.mean_running,
        mean_waiting=outcome.mean_waiting,
    )
