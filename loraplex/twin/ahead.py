"""The twin of an engine that runs ahead: a step is decided while the one before it is in flight.

    device  |   P1    |   P2    |   P3    |
    decided ^P1 P2    ^P3       ^P4            at the beginning of a step, the one after it

A request that arrives while P2 runs is first seen when P4 is decided. Adapters are loaded from the moment of
the decision, beside the step in flight.

There are two modes. *Decided* steps are the scheduler's own, with one of them in flight. While the only
decisions are that requests decode and others join them, the twin *glides*: the scheduler has nothing in
flight, the next step is known to be its group of decodes with the requests that join it (`_joining`), and
requests that have arrived when that step begins (`_due`) join the step after it. Both modes produce the same
steps at the same times.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any, NamedTuple

from loraplex.core.request import EngineRequest
from loraplex.scheduling.plan import AdapterLoad, StepPlan
from loraplex.twin.decode_group import DecodeGroup
from loraplex.twin.engine_twin import AdapterEvent
from loraplex.twin.simulator import Simulator


class _Flight(NamedTuple):
    """A step in flight, or queued behind one."""

    plan: StepPlan
    end_s: float


class AheadSimulator(Simulator):
    """One engine whose steps only have to be launched by the host."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._flights: deque[_Flight] = deque()
        self._joining: list[EngineRequest] = []
        self._due: list[EngineRequest] = []
        self._glides = False
        self._is_loaded = False  # the request that waited for its adapter joins the known step

    def _take(self, request: EngineRequest) -> None:
        self._due.append(request)

    def num_output(self, request_id: str) -> int | None:
        if any(each.request_id == request_id for each in (*self._due, *self._joining)):
            return 0
        return super().num_output(request_id)

    def _drop(self, request_id: str) -> None:
        for requests in (self._due, self._joining):
            requests[:] = [each for each in requests if each.request_id != request_id]
        self._is_loaded = False  # the dropped request may be the one that joins the known step
        super()._drop(request_id)
        self._glides = self._glides and (self.scheduler.num_running > 0 or bool(self._joining))

    def is_idle(self) -> bool:
        if self._glides or self._due or self._joining or self._flights:
            return False
        return super().is_idle()

    def _quiet_until_s(self) -> float:
        if not self._glides or self._due or self._joining or self._is_loaded:
            return self.now_s
        return super()._quiet_until_s()

    def _step(self, next_s: float) -> None:
        if self._glides:
            if self._glide_through_load() if self._has_news() else self._glide(next_s):
                return
            self._glides = False
            self._add(self._joining)
            self._launch(self._decide())  # the known step is now in flight
        self._end_loads()
        self._add(self._due)
        if self._leaps and self._flights and self.scheduler.is_settling():
            self._land(keep=0)
            self._glides = self.scheduler.num_running > 0
            return
        plan = self._decide()
        if plan.chunks:
            self._launch(plan)
        elif not self._flights:
            self._pass_time(plan, next_s)
        self._land(keep=1 if plan.chunks else 0)
        self.recorder.updated(self.scheduler.take_failures(), self.now_s)

    def _add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.scheduler.add(request)
        requests.clear()

    # ---- decided steps

    def _launch(self, plan: StepPlan) -> None:
        if plan.chunks:
            begin_s = max(self.now_s, self._flights[-1].end_s if self._flights else -math.inf)
            self._flights.append(_Flight(plan, self._end_s(plan, self.scheduler.num_waiting, begin_s)))

    def _launched_s(self) -> float:
        return max(self.now_s, self._flights[-1].end_s) if self._flights else self.now_s

    def _land(self, keep: int) -> None:
        while len(self._flights) > keep:
            plan, end_s = self._flights.popleft()
            self.now_s = max(self.now_s, end_s)
            self._land_step(plan)

    # ---- gliding

    def _glide(self, next_s: float) -> bool:
        """Simulate the known step, or many; return False if the next one has to be decided."""
        due = self._due
        if self._is_loaded:
            self._is_loaded = False
            return self._step_loaded()
        if self._joining:
            # `go_beside` allowed those who join; since then some requests may have ended, and none has
            # arrived.
            return not (due and not self.scheduler.go_beside([*self._joining, *due])) and self._join()
        if due and not self.scheduler.go_beside(due):
            if not self._let_wait():
                return False
        elif due:
            self._go_on_before_they_join()
            return self.now_s >= next_s or self._has_news() or self._join()
        return self._leap(next_s)

    def _leap_within(self, next_s: float, group: DecodeGroup, most: int) -> None:
        super()._leap_within(next_s, group, most)
        self._glides = self.scheduler.num_running > 0

    def _go_on_before_they_join(self) -> None:
        """Simulate the step that was known when the due requests arrived."""
        group = self.scheduler.group
        assert group is not None
        self._take_leap(group, 1, self._repeats(group))
        self._joining, self._due = self._due, self._joining

    def _join(self) -> bool:
        """Simulate the known step with the requests that join it; due requests join the one after it."""
        self._add(self._joining)
        stepped = self._step_beside(sure=True)
        assert stepped, "they could join when that was decided"
        self._joining, self._due = self._due, self._joining
        self._glides = self.scheduler.num_running > 0 or bool(self._joining)
        return True

    def _glide_through_load(self) -> bool:
        """Simulate the known step while an adapter is loaded that was read for one request, if that request
        can join the step after it and all others can only wait for reads. Return False if the step has to be
        decided."""
        scheduler, due, joins = self.scheduler, self._due, self._is_loaded
        self._is_loaded = False
        group = scheduler.group
        _, _, version, is_read = self._ends[0]
        if not is_read or self._joining or group is None or self._num_ended() > 1:
            return False
        repeats = self._repeats(group)  # requests that join the step make it no shorter
        load_s = self._times.load_s(AdapterLoad(version=version, source=0))
        if load_s > repeats.first_s or self._bus_free_s > self.now_s:
            return False
        if not scheduler.may_load_beside(version, repeats.first_s, due):
            return False
        chunks = scheduler.start_beside(sure=True) if joins else None
        heapq.heappop(self._ends)
        self._bus_free_s = self.now_s + load_s
        self.num_loads += 1
        if self.adapter_events is not None:
            self.adapter_events.append(AdapterEvent("load", version))
        reads = scheduler.load_beside(version, due)
        due.clear()
        if reads:
            self._start_loads(reads, ())
        if chunks is None:
            self._take_leap(group, 1, repeats)
        else:
            self._end_beside(chunks)
        self._is_loaded = True
        return True

    def _num_ended(self) -> int:
        """Return how many reads and loads have ended that the next decision must take into account."""
        return sum([end_s <= self.now_s for end_s, _, _, _ in self._ends])

    def _step_loaded(self) -> bool:
        """Simulate the known step, joined by the request that waited for its adapter, if all due requests can
        only wait for reads. Return False if the step after it has to be decided."""
        if self._due and not self._let_wait(sure=True):
            return False
        stepped = self._step_beside(sure=True)
        self._glides = self.scheduler.num_running > 0
        return stepped

    def _let_wait(self, *, sure: bool = False) -> bool:
        """Queue the due requests if they can only wait for reads, and begin these; return False otherwise.
        `sure`: all other requests are known to go on, or to wait for reads."""
        reads = self.scheduler.wait_beside(self._due, sure=sure)
        if reads is None:
            return False
        self._due.clear()
        self._start_loads(reads, ())
        return True
