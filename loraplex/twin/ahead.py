"""The twin of an engine that runs ahead: a step is decided while the one before it is under way.

    device  |   P1    |   P2    |   P3    |
    decided ^P1 P2    ^P3       ^P4            at the beginning of a step, the one after it

Whoever comes while P2 runs is first seen when P4 is decided. Adapters are loaded from the moment of the
decision, beside the step under way.

Two ways to go on. *Decided* steps are the scheduler's own, with one of them under way. While all there is to
decide is that requests decode and others join them, the twin *glides*: nothing is under way for the
scheduler, the next step is known to be its group of decodes with those who join it (`_joining`), and whoever
is there when that step begins (`_due`) joins the step after it. Both ways end in the same steps at the same
times.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

from loraplex.core.request import EngineRequest
from loraplex.scheduling.leaping import ANY_TOKEN
from loraplex.scheduling.plan import StepPlan
from loraplex.twin.outcome import Recorder
from loraplex.twin.simulator import Simulator


class _Flight(NamedTuple):
    """A step under way, or behind one that is."""

    plan: StepPlan
    num_waiting: int
    end_s: float


class AheadSimulator(Simulator):
    """One engine whose steps need nothing of the host but to be launched."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._flights: deque[_Flight] = deque()
        self._joining: list[EngineRequest] = []
        self._due: list[EngineRequest] = []
        self._glides = False

    def _take(self, request: EngineRequest) -> None:
        self._due.append(request)

    def _is_idle(self) -> bool:
        return not (self._due or self._joining or self._flights) and super()._is_idle()

    def _step(self, recorder: Recorder, next_s: float) -> None:
        if self._glides:
            if self._glide(recorder, next_s):
                return
            self._glides = False
            self._add(self._joining)
            self._launch(self._decide())  # the step that is known comes to be under way
        self._add(self._due)
        if self._leaps and self._flights and self.scheduler.is_settling() and not self._ends:
            self._land(recorder, keep=0)
            self._glides = self.scheduler.num_running > 0
            return
        plan = self._decide()
        if plan.chunks:
            self._launch(plan)
        elif not self._flights:
            self._pass_time(plan, next_s)
        self._land(recorder, keep=1 if plan.chunks else 0)
        self._note(self.scheduler.take_failures(), recorder)

    def _add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.scheduler.add(request)
        requests.clear()

    # ---- decided steps

    def _launch(self, plan: StepPlan) -> None:
        if plan.chunks:
            begin_s = max(self._now_s, self._flights[-1].end_s if self._flights else -math.inf)
            num_waiting = self.scheduler.num_waiting
            self._flights.append(_Flight(plan, num_waiting, self._end_s(plan, num_waiting, begin_s)))

    def _land(self, recorder: Recorder, keep: int) -> None:
        while len(self._flights) > keep:
            plan, num_waiting, end_s = self._flights.popleft()
            self._now_s = max(self._now_s, end_s)
            sampled = {chunk.request_id: ANY_TOKEN for chunk in plan.chunks if chunk.samples}
            updates = self.scheduler.update(plan, sampled)
            recorder.stepped(self._now_s, self.scheduler.num_running, num_waiting, len(updates))
            self._note(updates, recorder)

    # ---- gliding

    def _glide(self, recorder: Recorder, next_s: float) -> bool:
        """The known step, or many; False if what comes after it has to be decided."""
        if not self._due and not self._joining:
            stepped = self._leap(recorder, next_s)
            self._keep_gliding()
            return stepped
        if not self.scheduler.go_beside([*self._joining, *self._due]):
            return False
        if self._joining:
            self._add(self._joining)
            stepped = self._step_beside(recorder)
            assert stepped, "they could join when that was decided"
        else:
            stepped = self._leap(recorder, self._now_s + math.ulp(self._now_s))
        if stepped:
            self._joining, self._due = self._due, self._joining
            self._keep_gliding()
        return stepped

    def _keep_gliding(self) -> None:
        """For as long as there is a next step."""
        self._glides = self.scheduler.num_running > 0 or bool(self._joining)
