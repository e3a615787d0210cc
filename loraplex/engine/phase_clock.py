"""Notes when traced requests were queued, had their adapter loaded, and began to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loraplex.core.request import EngineRequest, PhaseTimes
from loraplex.scheduling.plan import StepPlan


@dataclass(kw_only=True, slots=True)
class _Phases:
    adapter: str | None
    queued_s: float
    load_begun_s: float | None = None
    load_ended_s: float | None = None
    started_s: float | None = None


class PhaseClock:
    """False while no trace is wanted; a step then costs nothing here."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._requests: dict[str, _Phases] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def queued(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = _Phases(adapter=request.adapter, queued_s=self._now_s())

    def decided(self, plan: StepPlan) -> None:
        """Record what begins with a plan: reads and loads of adapters, and the requests' first chunks."""
        now_s = self._now_s()
        loading = {each.version for each in plan.adapter_reads} | {
            each.version for each in plan.adapter_loads
        }
        for each in self._requests.values():
            if each.adapter in loading and each.load_begun_s is None:
                each.load_begun_s = now_s
        for chunk in plan.chunks:
            phases = self._requests.get(chunk.request_id)
            if phases is not None and phases.started_s is None:
                phases.started_s = now_s

    def loaded(self, versions: Iterable[str]) -> None:
        """Record reads and loads that ended. One that had begun before a request came is part of its wait
        from then on."""
        ended, now_s = set(versions), self._now_s()
        for each in self._requests.values():
            if each.adapter in ended:
                each.load_begun_s = each.queued_s if each.load_begun_s is None else each.load_begun_s
                each.load_ended_s = now_s

    def take(self, request_id: str) -> PhaseTimes | None:
        """Return a request's times with its first token, and forget it; None if there are none."""
        phases = self._requests.pop(request_id, None)
        if phases is None:
            return None
        now_s = self._now_s()

        def before(moment_s: float | None) -> float | None:
            return None if moment_s is None else now_s - moment_s

        return PhaseTimes(
            queued_s=now_s - phases.queued_s,
            load_begun_s=before(phases.load_begun_s),
            load_ended_s=before(phases.load_ended_s),
            started_s=before(phases.started_s),
        )

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
