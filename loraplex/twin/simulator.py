"""The production scheduler on a virtual clock, with a modelled executor in the device's place.

It goes the way of `engine.core.Engine.step`: loads that ended, decide, start loads, compute, tell. Where many
steps to come do nothing but decode the same requests, they are taken in one leap, up to the next arrival,
the next end of a load, or the end of one of these requests: the same steps, at the same times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count

from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.leaping import ANY_TOKEN, LeapingScheduler
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, StepPlan, TokenUpdate
from loraplex.twin.outcome import Outcome, Recorder
from loraplex.twin.times import StepTimes
from loraplex.workload.jsonl import WorkloadRequest


class Simulator:
    """One engine. `adapters`: the versions of a workload's adapters, by their numbers."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        memory: Memory,
        times: StepTimes,
        adapters: Sequence[str],
        costs: DriftWatch | None = None,
        leaps: bool = True,
    ) -> None:
        """`leaps`: False to take every step by itself, for tests."""
        self.scheduler = LeapingScheduler(config, memory, costs)
        self._memory = memory
        self._times = times
        self._adapters = adapters
        self._leaps = leaps
        self._now_s = 0.0
        self._bus_free_s = 0.0
        self._disk_free_s = 0.0
        self._order = count()
        self._ends: list[tuple[float, int, str, bool]] = []  # of loads, and of reads (True)
        self._coming: dict[str, tuple[float, float]] = {}  # loads: when they begin and end
        self.plans: list[StepPlan] | None = None  # kept if a list is put here

    def bring_in_all(self) -> None:
        """For an engine that loads within its steps: to the scheduler every adapter is there from now on."""
        residency = self._memory.residency
        for version in self._adapters:
            residency.enter(version)
            assert residency.acquire(version), "there is no room for all of them"
            residency.loaded(version)
            residency.leave(version, pinned=True)

    def stage_all(self) -> None:
        """Adapters are in the host's memory when time begins, as far as there is room."""
        for version in self._adapters:
            self.scheduler.adapters.stage_ahead(version)
        while self.scheduler.adapters.has_work():
            for read in self.scheduler.schedule().adapter_reads:
                self.scheduler.adapter_read(read.version)

    def run(self, workload: Iterable[WorkloadRequest], until_s: float = math.inf) -> Outcome:
        """All of it, or as far as it comes by then."""
        recorder = Recorder()
        arrivals = enumerate(workload)
        coming = next(arrivals, None)
        while self._now_s < until_s:
            coming = self._arrive(coming, arrivals, recorder)
            next_s = math.inf if coming is None else coming[1].arrival_s
            if self._is_idle():
                if coming is None:
                    break
                self._now_s = max(self._now_s, next_s)
                continue
            self._end_loads()
            self._step(recorder, min(next_s, until_s))
        return recorder.outcome(self._now_s if until_s == math.inf else until_s)

    # ---- what comes

    def _arrive(
        self,
        coming: tuple[int, WorkloadRequest] | None,
        arrivals: Iterator[tuple[int, WorkloadRequest]],
        recorder: Recorder,
    ) -> tuple[int, WorkloadRequest] | None:
        while coming is not None and coming[1].arrival_s <= self._now_s:
            number, request = coming
            recorder.arrived(number, request)
            # Tokens that no other request begins with, so that the prefix cache finds nothing.
            self._take(
                EngineRequest(
                    request_id=str(number),
                    prompt_token_ids=[number] * request.prompt_tokens,
                    params=_params(request.output_tokens),
                    adapter=self._adapters[request.adapter] if self._adapters else None,
                )
            )
            coming = next(arrivals, None)
        return coming

    def _take(self, request: EngineRequest) -> None:
        self.scheduler.add(request)

    def _is_idle(self) -> bool:
        return not self.scheduler.has_work() and not self._ends

    def _end_loads(self) -> None:
        while self._ends and self._ends[0][0] <= self._now_s:
            _, _, version, is_read = heapq.heappop(self._ends)
            if is_read:
                self.scheduler.adapter_read(version)
            else:
                self._coming.pop(version, None)
                self.scheduler.adapter_loaded(version)

    # ---- steps

    def _step(self, recorder: Recorder, next_s: float) -> None:
        if self._leaps and (self._leap(recorder, next_s) or self._step_beside(recorder)):
            return
        plan = self._decide()
        if plan.chunks:
            self._compute(plan, recorder)
        else:
            self._pass_time(plan, next_s)
        self._note(self.scheduler.take_failures(), recorder)

    def _decide(self) -> StepPlan:
        """The next step; loads that it asks for are under way."""
        plan = self.scheduler.schedule()
        if self.plans is not None:
            self.plans.append(plan)
        self._start_loads(plan.adapter_reads, plan.adapter_loads)
        self._wait_for(plan.waits_for)
        return plan

    def _pass_time(self, plan: StepPlan, next_s: float) -> None:
        """Up to where there may be something to compute."""
        if self._ends:
            self._now_s = max(self._now_s, min(self._ends[0][0], next_s))
        elif next_s < math.inf and not plan.adapter_evictions:
            self._now_s = max(self._now_s, next_s)

    def _end_s(self, plan: StepPlan, num_waiting: int, begin_s: float) -> float:
        """Of a step that begins then; each layer waits for its own weights."""
        step_s = self._times.step_s(plan, num_waiting)
        if self._coming and plan.stalls:
            used = {chunk.adapter for chunk in plan.chunks}
            coming = [
                (load_s - begin_s, end_s - begin_s)
                for version, (load_s, end_s) in self._coming.items()
                if version in used
            ]
            step_s += self._times.stall_s(step_s, coming)
        return begin_s + step_s

    def _compute(self, plan: StepPlan, recorder: Recorder) -> None:
        num_waiting = self.scheduler.num_waiting
        self._now_s = self._end_s(plan, num_waiting, self._now_s)
        updates = self.scheduler.update(plan, {c.request_id: ANY_TOKEN for c in plan.chunks if c.samples})
        recorder.stepped(self._now_s, self.scheduler.num_running, num_waiting, len(updates))
        self._note(updates, recorder)

    def _step_beside(self, recorder: Recorder) -> bool:
        """A step of decodes that new requests join with their whole prompts."""
        plan = self.scheduler.schedule_beside()
        group = self.scheduler.group
        if plan is None or group is None:
            return False
        self._now_s += self._times.beside_s(group, plan)
        num_tokens = len(group) + len(plan.chunks)
        updates = self.scheduler.update_beside(plan)
        recorder.stepped(self._now_s, self.scheduler.num_running, 0, num_tokens)
        self._note(updates, recorder)
        return True

    def _leap(self, recorder: Recorder, next_s: float) -> bool:
        """All steps up to the next event."""
        if self._ends:
            next_s = min(next_s, self._ends[0][0])
        most = self.scheduler.leap_length() if next_s > self._now_s else 0
        group = self.scheduler.group if most > 0 else None
        if group is None:
            return False
        num_waiting, num_running = self.scheduler.num_waiting, len(group)
        repeats = self._times.repeats(group, num_waiting)
        num_steps = repeats.steps_until(next_s - self._now_s, most)
        self._now_s += repeats.sum_s(num_steps)
        ended = self.scheduler.leap(num_steps)
        recorder.leapt(self._now_s, num_steps, num_running, num_waiting)
        self._note(ended, recorder)
        return True

    def _note(self, updates: Sequence[TokenUpdate], recorder: Recorder) -> None:
        for update in updates:
            if update.finish_reason is not None:
                failed = update.finish_reason is FinishReason.ERROR
                recorder.finished(int(update.request_id), self._now_s, failed=failed)
            elif update.request_id in recorder.without_token:
                recorder.first_token(int(update.request_id), self._now_s)

    # ---- loads

    def _start_loads(self, reads: Sequence[AdapterRead], loads: Sequence[AdapterLoad]) -> None:
        """One after the other on the bus, and from the disk; those that one step uses take turns."""
        for read in reads:
            self._disk_free_s = max(self._disk_free_s, self._now_s) + self._times.read_s(read.version)
            heapq.heappush(self._ends, (self._disk_free_s, next(self._order), read.version, True))
        begin_s = max(self._bus_free_s, self._now_s)
        turns_s = sum(self._times.load_s(load) for load in loads if load.awaited)
        for load in sorted(loads, key=_is_for_later):
            free_s = max(self._bus_free_s, self._now_s)
            end_s = begin_s + turns_s if load.awaited else free_s + self._times.load_s(load)
            self._coming[load.version] = (begin_s if load.awaited else free_s, end_s)
            self._bus_free_s = end_s
            heapq.heappush(self._ends, (end_s, next(self._order), load.version, False))

    def _wait_for(self, versions: frozenset[str]) -> None:
        """The step is not begun before these are there."""
        for end_s, _, version, _ in self._ends:
            if version in versions:
                self._now_s = max(self._now_s, end_s)


def _is_for_later(load: AdapterLoad) -> bool:
    return not load.awaited


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    """The same for the same length: checking them takes longer than simulating the request."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
