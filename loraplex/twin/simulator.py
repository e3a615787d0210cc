"""The production scheduler on a virtual clock, with a modelled executor in the device's place.

It goes the way of `engine.core.Engine.step`: loads that ended, decide, start loads, compute, tell. Where many
steps to come do nothing but decode the same requests, they are taken in one leap, up to the next arrival,
the next end of a load, or the end of one of these requests: the same steps, at the same times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import count

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import AdapterLoad, AdapterRead, Chunk, StepPlan
from loraplex.twin.decode_group import DecodeGroup
from loraplex.twin.engine_twin import AdapterEvent
from loraplex.twin.leaping import ANY_TOKEN
from loraplex.twin.outcome import Outcome, Recorder, RequestEvent, RequestOutcome
from loraplex.twin.quick_scheduler import QuickScheduler
from loraplex.twin.times import Repeats, StepTimes
from loraplex.twin.twin_scheduler import TwinScheduler
from loraplex.workload.jsonl import WorkloadRequest


class Simulator:
    """One engine. `adapters`: the versions of a workload's adapters, by their numbers. `now_s`: where it has
    come to. `num_loads`: of adapters, that were begun. `num_offered`: requests that came."""

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
        is_plain = config.prompts_first or memory.pool.keeps_contents or not leaps
        self.scheduler = (TwinScheduler if is_plain else QuickScheduler)(config, memory, costs, times.weigh)
        self.recorder = Recorder()
        self._memory = memory
        self._times = times
        self._adapters = adapters
        self._leaps = leaps
        self.now_s = 0.0
        self._bus_free_s = 0.0
        self._disk_free_s = 0.0
        self._order = count()
        self.num_loads = 0
        self.num_offered = 0
        self._ends: list[tuple[float, int, str, bool]] = []  # of loads, and of reads (True)
        self._coming: dict[str, tuple[float, float]] = {}  # loads: when they begin and end
        self._repeats_of: tuple[DecodeGroup | None, int, int] = (None, 0, 0)
        self._next_repeats = Repeats(0.0, 0.0)
        # `quiet_until_s`, until a step is taken or a request comes or goes, and the leap that it is based on.
        self._quiet_s: float | None = None
        self._found_leap: tuple[DecodeGroup, int] | None = None
        self.plans: list[StepPlan] | None = None  # kept if a list is put here
        self.adapter_events: list[AdapterEvent] | None = None  # likewise
        # When a version that is asked for now is in host memory; an owner may say where it comes from.
        self.read_end_s: Callable[[str], float] = self._disk_end_s

    def bring_in_all(self) -> None:
        """Every adapter is there from now on; or, of an engine that loads within its steps, seems to be."""
        table = self._memory.table
        for version in self._adapters:
            table.enter(version)
            assert table.acquire(version), "there is no room for all of them"
            table.loaded(version)
            table.leave(version, pinned=True)

    def stage_all(self) -> None:
        """Adapters are in the host's memory when time begins, as far as there is room."""
        for version in self._adapters:
            self.scheduler.adapters.stage_ahead(version)
        while self.scheduler.adapters.has_work():
            for read in self.scheduler.schedule().adapter_reads:
                self.scheduler.adapter_read(read.version)

    def run(self, workload: Iterable[WorkloadRequest], until_s: float = math.inf) -> Outcome:
        """All of it, or as far as it comes by then."""
        for request in workload:
            if request.arrival_s >= until_s:
                break
            self.advance(request.arrival_s)
            if self.now_s >= until_s:
                break
            self.offer(request)
        self.advance(until_s)
        return self.outcome(self.end_s(until_s))

    def outcome(self, end_s: float) -> Outcome:
        """Return the outcome of everything up to `end_s`."""
        num_preemptions = self.scheduler.stats(self.recorder.num_steps).num_preemptions
        return self.recorder.outcome(end_s, num_loads=self.num_loads, num_preemptions=num_preemptions)

    def end_s(self, until_s: float) -> float:
        """Return when a run has ended that was to end at `until_s` at the latest."""
        return self.now_s if until_s == math.inf else until_s

    # ---- who looks from outside

    def watch(self, requests: list[RequestEvent], adapters: list[AdapterEvent]) -> None:
        """Append to these lists, from now on, what can be seen from outside."""
        self.recorder.events, self.adapter_events = requests, adapters

    def fetch_by(self, read_end_s: Callable[[str], float]) -> None:
        """Ask this function, from now on, when a version is in host memory that is read now."""
        self.read_end_s = read_end_s

    # ---- what comes

    def advance(self, until_s: float) -> None:
        """All steps that begin before this time; the last one may end after it."""
        while self.now_s < until_s and not self.is_idle():
            self._go_on(until_s)

    def quiet_until_s(self) -> float:
        """Return a time before which nothing happens that could be seen from outside, unless a request comes:
        nobody has a first token, nobody ends, no adapter moves. Looking takes no step."""
        if self._quiet_s is None:
            self._quiet_s = math.inf if self.is_idle() else self._quiet_until_s()
        return self._quiet_s

    def _quiet_until_s(self) -> float:
        num_steps = self.scheduler.leap_length()
        group = self.scheduler.group if num_steps > 0 else None
        if group is None:
            return self.now_s
        end_s = self.now_s + self._repeats(group).sum_s(num_steps)
        if self._ends:
            end_s = max(min(end_s, self._ends[0][0]), self.now_s)
        if self._leaps and end_s > self.now_s:
            self._found_leap = (group, num_steps)
        return end_s

    def run_to(self, until_s: float) -> float:
        """Take all steps of which something could be seen before this time. Unlike `advance`, it cuts no leap
        of decodes short that nobody sees anything of by then. Return `quiet_until_s` afterwards."""
        while (quiet_s := self.quiet_until_s()) < until_s and self.now_s < until_s:
            self._go_on(until_s)
        return quiet_s

    def _go_on(self, until_s: float) -> None:
        """Take a step, or the leap that was found when somebody asked for `quiet_until_s`."""
        leap = self._found_leap
        self._forget_quiet()
        if leap is not None and leap[0] is self.scheduler.group:  # which is another if somebody looked at it
            self._leap_within(until_s, *leap)
        else:
            self._step(until_s)

    def _forget_quiet(self) -> None:
        """Something happens that `quiet_until_s` does not know of."""
        self._quiet_s = None
        self._found_leap = None

    def offer(self, request: WorkloadRequest) -> RequestOutcome:
        """A request arrives, at a time the engine was advanced to. Returns what will become of it."""
        return self.recorder.arrived(self._enter(request), request)

    def resume(self, request: WorkloadRequest, outcome: RequestOutcome) -> None:
        """A request comes from another engine: its prompt and the answer so far are to be computed here."""
        self.recorder.resumed(self._enter(request), outcome, request.arrival_s)

    def hand_over(self, request_id: str) -> tuple[RequestOutcome, int] | None:
        """Give a request up to another engine; return it and the tokens it was answered with. None if it has
        ended by the end of the step under way."""
        num_output = self.num_output(request_id)
        if num_output is None:
            return None
        self._forget_quiet()
        self._drop(request_id)
        return self.recorder.left(request_id), num_output

    def num_output(self, request_id: str) -> int | None:
        """The tokens that a request was answered with so far; None if it has ended."""
        return self.scheduler.num_output(request_id)

    def _drop(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def _enter(self, request: WorkloadRequest) -> str:
        self._forget_quiet()
        self.now_s = max(self.now_s, request.arrival_s)
        number, self.num_offered = self.num_offered, self.num_offered + 1
        request_id = str(number)
        # Where contents count, tokens that no other request begins with: the prefix cache finds nothing.
        token_id = number if self._memory.pool.keeps_contents else ANY_TOKEN
        self._take(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=_prompt(token_id, request.prompt_tokens),
                params=_params(request.output_tokens),
                adapter=self._adapters[request.adapter] if self._adapters else None,
            )
        )
        return request_id

    def _take(self, request: EngineRequest) -> None:
        self.scheduler.add(request)

    def is_staged(self, version: str) -> bool:
        """Tell whether host memory has a complete copy."""
        return version in self._memory.table.host.resident

    def is_idle(self) -> bool:
        return not self.scheduler.has_work() and not self._ends

    def _end_loads(self) -> None:
        while self._ends and self._ends[0][0] <= self.now_s:
            _, _, version, is_read = heapq.heappop(self._ends)
            if is_read:
                self.scheduler.adapter_read(version)
            else:
                self._coming.pop(version, None)
                self.scheduler.adapter_loaded(version)

    # ---- steps

    def _step(self, next_s: float) -> None:
        """Go on from now, no further than to the first step that begins at `next_s` or after it."""
        self._end_loads()
        if self._leaps and (self._leap(next_s) or self._step_beside()):
            return
        plan = self._decide()
        if plan.chunks:
            self._compute(plan)
        else:
            self._pass_time(plan, next_s)
        self.recorder.updated(self.scheduler.take_failures(), self.now_s)

    def _decide(self) -> StepPlan:
        """The next step; loads that it asks for are under way."""
        plan = self.scheduler.schedule()
        if self.plans is not None:
            self.plans.append(plan)
        if self.adapter_events is not None:
            self.adapter_events += [AdapterEvent("evict", version) for version in plan.adapter_evictions]
        self._start_loads(plan.adapter_reads, plan.adapter_loads)
        self._wait_for(plan.waits_for)
        return plan

    def _pass_time(self, plan: StepPlan, next_s: float) -> None:
        """Let time pass until there may be something to compute."""
        if self._ends:
            self.now_s = max(self.now_s, min(self._ends[0][0], next_s))
        elif next_s < math.inf and not plan.adapter_evictions:
            self.now_s = max(self.now_s, next_s)
        self.recorder.passed(self.now_s, num_running=0)

    def _end_s(self, plan: StepPlan, num_waiting: int, begin_s: float) -> float:
        """Return the end of a step that begins then; each layer waits for its own weights."""
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

    def _compute(self, plan: StepPlan) -> None:
        self.now_s = self._end_s(plan, self.scheduler.num_waiting, self.now_s)
        self._land_step(plan)

    def _land_step(self, plan: StepPlan) -> None:
        """A step has ended now."""
        updates, num_tokens = self.scheduler.land(plan)
        self.recorder.stepped(self.now_s, updates, num_running=len(plan.chunks), num_tokens=num_tokens)

    def _step_beside(self, *, sure: bool = False) -> bool:
        """A step of decodes that new requests join with their whole prompts. `sure`: that can be done."""
        chunks = self.scheduler.start_beside(sure=sure)
        if chunks is None:
            return False
        self._end_beside(chunks)
        return True

    def _end_beside(self, chunks: Sequence[Chunk]) -> None:
        """The rest of a step that requests join with these."""
        scheduler = self.scheduler
        group = scheduler.group
        assert group is not None, "they join one"
        now_s = self.now_s = self.now_s + self._times.beside_s(group, chunks)
        num_running = len(group) + len(chunks)
        updates = scheduler.end_beside()
        self.recorder.stepped(now_s, updates, num_running=num_running, num_tokens=num_running)

    def _leap(self, next_s: float) -> bool:
        """All steps up to the next event."""
        most = self.scheduler.leap_length() if next_s > self.now_s and not self._has_news() else 0
        group = self.scheduler.group if most > 0 else None
        if group is None:
            return False
        self._leap_within(next_s, group, most)
        return True

    def _leap_within(self, next_s: float, group: DecodeGroup, most: int) -> None:
        """A leap of so many steps at most, no further than to the first one that begins at `next_s` or at the
        end of a load."""
        if self._ends:
            next_s = min(next_s, self._ends[0][0])
        repeats = self._repeats(group)
        self._take_leap(group, repeats.steps_until(next_s - self.now_s, most), repeats)

    def _has_news(self) -> bool:
        """Tell whether a read or load has ended that the next decision must know of."""
        return bool(self._ends) and self._ends[0][0] <= self.now_s

    def _repeats(self, group: DecodeGroup) -> Repeats:
        """The group's next steps; kept until they are taken, as they are asked for before that."""
        num_waiting = self.scheduler.num_waiting
        state = (group, group.num_changes, num_waiting)
        if state != self._repeats_of:
            self._repeats_of = state
            self._next_repeats = self._times.repeats(group, num_waiting)
        return self._next_repeats

    def _take_leap(self, group: DecodeGroup, num_steps: int, repeats: Repeats) -> None:
        now_s = self.now_s = self.now_s + repeats.sum_s(num_steps)
        num_running = len(group)
        ended = self.scheduler.leap(num_steps)
        self.recorder.leapt(now_s, ended, num_running, num_steps, repeats)

    # ---- loads

    def _start_loads(self, reads: Sequence[AdapterRead], loads: Sequence[AdapterLoad]) -> None:
        """One after the other on the bus, and from the disk; those that one step uses take turns."""
        if self.adapter_events is not None:
            unstaged = self._memory.table.host.take_evictions()
            self.adapter_events += [AdapterEvent("unstage", version) for version in unstaged]
            self.adapter_events += [AdapterEvent("read", read.version) for read in reads]
            self.adapter_events += [AdapterEvent("load", load.version) for load in loads]
        for read in reads:
            end_s = self.read_end_s(read.version)
            heapq.heappush(self._ends, (end_s, next(self._order), read.version, True))
        if not loads:
            return
        begin_s = max(self._bus_free_s, self.now_s)
        turns_s = sum(self._times.load_s(load) for load in loads if load.awaited)
        for load in sorted(loads, key=_is_for_later):
            free_s = max(self._bus_free_s, self.now_s)
            end_s = begin_s + turns_s if load.awaited else free_s + self._times.load_s(load)
            self._coming[load.version] = (begin_s if load.awaited else free_s, end_s)
            self._bus_free_s = end_s
            heapq.heappush(self._ends, (end_s, next(self._order), load.version, False))
        self.num_loads += len(loads)

    def _disk_end_s(self, version: str) -> float:
        """Return the end of a read from disk that begins now, behind those under way."""
        self._disk_free_s = max(self._disk_free_s, self.now_s) + self._times.read_s(version)
        return self._disk_free_s

    def _wait_for(self, versions: frozenset[str]) -> None:
        """The step is not begun before these are there."""
        for end_s, _, version, _ in self._ends:
            if version in versions:
                self.now_s = max(self.now_s, end_s)


def _is_for_later(load: AdapterLoad) -> bool:
    return not load.awaited


@lru_cache(maxsize=4096)
def _prompt(token_id: int, num_tokens: int) -> list[int]:
    """The same for the same length where contents do not count: nobody changes a prompt, and the prompts of
    all requests of a fleet would take the place of other things in a processor's caches."""
    return [token_id] * num_tokens


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    """The same for the same length: checking them takes longer than simulating the request."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
