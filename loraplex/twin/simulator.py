"""The production scheduler on a virtual clock, with a modelled executor in place of the device.

It follows `engine.core.Engine.step`: collect ended loads, decide, start loads, compute, update. Where many
steps in a row only decode the same requests, they are simulated in one leap, up to the next arrival, the next
end of a load, or the end of one of these requests: the same steps, at the same times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from loraplex.twin.kv_copies import KVCopies, KVCopiesInFlight
from loraplex.twin.leaping import ANY_TOKEN
from loraplex.twin.outcome import Outcome, Recorder, RequestEvent, RequestOutcome
from loraplex.twin.quick_scheduler import QuickScheduler
from loraplex.twin.times import LoadInFlight, Repeats, StepTimes
from loraplex.twin.twin_scheduler import TwinScheduler
from loraplex.workload.jsonl import WorkloadRequest


class Simulator:
    """One engine. `adapters`: versions of the workload's adapters, by number. `now_s`: current virtual time.
    `num_loads`: adapter loads begun. `num_offered`: requests that arrived."""

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
        """`leaps`: False to simulate every step by itself, for tests."""
        # Turns depend on what each running request has left, which the quick scheduler counts by group.
        is_plain = config.prompts_first or config.batching.groups or memory.pool.keeps_contents or not leaps
        self.scheduler = (TwinScheduler if is_plain else QuickScheduler)(
            config, memory, costs, times.adapter_weight, _Clock(self)
        )
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
        self._ends: list[tuple[float, int, str, bool]] = []  # ends of loads, and of reads (True)
        self._kv_copies = KVCopiesInFlight()
        self._in_flight: dict[str, LoadInFlight] = {}  # loads, by version; times count from 0
        self._repeats_of: tuple[DecodeGroup | None, int, int] = (None, 0, 0)
        self._next_repeats = Repeats(0.0, 0.0)
        # Cached result of `quiet_until_s`, valid until the next step or request, and the leap it is based on.
        self._quiet_s: float | None = None
        self._found_leap: tuple[DecodeGroup, int] | None = None
        self.plans: list[StepPlan] | None = None  # if a list is set here, plans are appended to it
        self.adapter_events: list[AdapterEvent] | None = None  # likewise
        # Returns when a version requested now is in host memory; the owner may replace it.
        self.read_end_s: Callable[[str], float] = self._disk_end_s

    def bring_in_all(self) -> None:
        """Make every adapter resident at once; for an engine that loads within its steps, only apparently."""
        table = self._memory.table
        for version in self._adapters:
            table.enter(version)
            assert table.acquire(version), "there is no room for all of them"
            table.loaded(version)
            table.leave(version, pinned=True)

    def stage_all(self) -> None:
        """Put adapters into host memory at the start, as far as there is room."""
        for version in self._adapters:
            self.scheduler.adapters.stage_ahead(version)
        while self.scheduler.adapters.has_work():
            plan = self.scheduler.schedule()
            for read in plan.adapter_reads:
                self.scheduler.adapter_read(read.version)
            for load in plan.adapter_loads:  # of an engine that keeps all adapters on its device
                self.scheduler.adapter_loaded(load.version)

    def run(
        self,
        workload: Iterable[WorkloadRequest],
        until_s: float = math.inf,
        report: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Run the whole workload, or the part of it before `until_s`. `report`: gets the number of requests
        that have ended, after each step or so: under a hopeless load most of a run comes after the last
        arrival."""
        for request in workload:
            if request.arrival_s >= until_s:
                break
            self.advance(request.arrival_s)
            if self.now_s >= until_s:
                break
            self.offer(request)
            if report is not None:
                report(self.recorder.num_ended)
        while report is not None and self.now_s < until_s and not self.is_idle():
            self._go_on(until_s)
            report(self.recorder.num_ended)
        self.advance(until_s)
        return self.outcome(self.end_s(until_s))

    def outcome(self, end_s: float) -> Outcome:
        """Return the outcome of everything up to `end_s`."""
        stats, host = self.scheduler.stats(self.recorder.num_steps), self._memory.pool.host
        return replace(
            self.recorder.outcome(end_s, num_loads=self.num_loads, num_preemptions=stats.num_preemptions),
            num_swapped_out=0 if host is None else host.num_copied_out,
            num_swapped_in=0 if host is None else host.num_copied_in,
            num_merges=stats.num_merges,
            num_merged_steps=stats.num_merged_steps,
            num_pauses=stats.num_pauses,
            # Leaps do not count them.
            num_step_adapters=stats.num_step_adapters if self.scheduler.batcher.pauses else None,
        )

    def end_s(self, until_s: float) -> float:
        """Return when a run ended that was limited to `until_s`."""
        return self.now_s if until_s == math.inf else until_s

    # ---- observers

    def watch(self, requests: list[RequestEvent], adapters: list[AdapterEvent]) -> None:
        """Append externally visible events to these lists from now on."""
        self.recorder.events, self.adapter_events = requests, adapters

    def fetch_by(self, read_end_s: Callable[[str], float]) -> None:
        """Set the function that returns when a version requested now is in host memory."""
        self.read_end_s = read_end_s

    # ---- progress and requests

    def advance(self, until_s: float) -> None:
        """Simulate all steps that begin before this time; the last one may end after it."""
        while self.now_s < until_s and not self.is_idle():
            self._go_on(until_s)

    def quiet_until_s(self) -> float:
        """Return a time before which nothing becomes visible from outside, unless a request arrives: no first
        token, no end of a request, no adapter load or eviction. Simulates no step."""
        if self._quiet_s is None:
            self._quiet_s = math.inf if self.is_idle() else self._quiet_until_s()
        return self._quiet_s

    def _quiet_until_s(self) -> float:
        num_steps = self.scheduler.leap_length()
        group = self.scheduler.group if num_steps > 0 else None
        if group is None:
            return self.now_s
        end_s = self.now_s + self._repeats(group).sum_s(num_steps)
        end_s = max(min(end_s, self._next_end_s()), self.now_s)
        if self._leaps and end_s > self.now_s:
            self._found_leap = (group, num_steps)
        return end_s

    def run_to(self, until_s: float) -> float:
        """Simulate all steps with visible results before this time. Unlike `advance`, it does not cut a leap
        of decodes short that has none by then. Return `quiet_until_s` afterwards."""
        while (quiet_s := self.quiet_until_s()) < until_s and self.now_s < until_s:
            self._go_on(until_s)
        return quiet_s

    def _go_on(self, until_s: float) -> None:
        """Simulate a step, or the leap that `quiet_until_s` found."""
        leap = self._found_leap
        self._forget_quiet()
        if leap is not None and leap[0] is self.scheduler.group:  # replaced if it was dissolved meanwhile
            self._leap_within(until_s, *leap)
        else:
            self._step(until_s)

    def _forget_quiet(self) -> None:
        """Invalidate the cached result of `quiet_until_s`."""
        self._quiet_s = None
        self._found_leap = None

    def offer(self, request: WorkloadRequest) -> RequestOutcome:
        """Add a request that arrives now; the engine was advanced to its arrival. Return its outcome, filled
        in later."""
        return self.recorder.arrived(self._enter(request), request)

    def resume(self, request: WorkloadRequest, outcome: RequestOutcome) -> None:
        """Continue a request from another engine: its prompt and the answer so far are computed here."""
        self.recorder.resumed(self._enter(request), outcome, request.arrival_s)

    def hand_over(self, request_id: str) -> tuple[RequestOutcome, int] | None:
        """Give a request up to another engine; return it and its number of output tokens. None if it has
        ended by the end of the step in flight."""
        num_output = self.num_output(request_id)
        if num_output is None:
            return None
        self._forget_quiet()
        self._drop(request_id)
        return self.recorder.left(request_id), num_output

    def num_output(self, request_id: str) -> int | None:
        """Return the number of output tokens of a request so far; None if it has ended."""
        return self.scheduler.num_output(request_id)

    def _drop(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def _enter(self, request: WorkloadRequest) -> str:
        self._forget_quiet()
        self.now_s = max(self.now_s, request.arrival_s)
        number, self.num_offered = self.num_offered, self.num_offered + 1
        request_id = str(number)
        # If there is a prefix cache, use tokens that no other request begins with: nothing is found in it.
        token_id = number if self._memory.pool.keeps_contents else ANY_TOKEN
        self._take(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=_prompt(token_id, request.prompt_tokens),
                params=_params(request.output_tokens),
                adapter=self._adapters[request.adapter] if self._adapters else None,
                tenant=request.tenant,
            )
        )
        return request_id

    def _take(self, request: EngineRequest) -> None:
        self.scheduler.add(request)

    def is_staged(self, version: str) -> bool:
        """Return whether host memory has a complete copy."""
        return version in self._memory.table.host.resident

    def is_idle(self) -> bool:
        return not self.scheduler.has_work() and not self._ends and not self._kv_copies

    def _next_end_s(self) -> float:
        """Return when the next load, read or copy of KV blocks ends; infinity if there is none."""
        loaded_s = self._ends[0][0] if self._ends else math.inf
        return min(loaded_s, self._kv_copies.next_end_s) if self._kv_copies else loaded_s

    def _end_loads(self) -> None:
        for ended in self._kv_copies.take_ended(self.now_s):
            self.scheduler.swap_ended(ended.copies, out=ended.out)
        while self._ends and self._ends[0][0] <= self.now_s:
            _, _, version, is_read = heapq.heappop(self._ends)
            if is_read:
                self.scheduler.adapter_read(version)
            else:
                self._in_flight.pop(version, None)
                self.scheduler.adapter_loaded(version)

    # ---- steps

    def _step(self, next_s: float) -> None:
        """Continue from now, up to the first step that begins at or after `next_s`."""
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
        """Return the next step, after starting the loads in it."""
        plan = self.scheduler.schedule()
        if self.plans is not None:
            self.plans.append(plan)
        if self.adapter_events is not None:
            self.adapter_events += [AdapterEvent("evict", version) for version in plan.adapter_evictions]
        self._start_loads(plan.adapter_reads, plan.adapter_loads)
        self._start_swaps(plan)
        self._wait_for(plan.waits_for)
        return plan

    def _pass_time(self, plan: StepPlan, next_s: float) -> None:
        """Let time pass until there may be something to compute."""
        end_s = self._next_end_s()
        if end_s < math.inf:
            self.now_s = max(self.now_s, min(end_s, next_s))
        elif next_s < math.inf and not plan.adapter_evictions:
            self.now_s = max(self.now_s, next_s)
        self.recorder.passed(self.now_s, num_running=0)

    def _end_s(self, plan: StepPlan, num_waiting: int, begin_s: float) -> float:
        """Return the end of a step that begins at `begin_s`; each layer waits for its own weights."""
        step_s = self._times.step_s(plan, num_waiting)
        if self._in_flight and plan.stalls:
            used: dict[str | None, list[int]] = {}
            for chunk in plan.chunks:
                used.setdefault(chunk.adapter, []).append(chunk.num_tokens)
            loads = [
                (version, _relative(load, begin_s, used[version]))
                for version, load in self._in_flight.items()
                if version in used
            ]
            step_s += self._times.stall_s(step_s, loads)
        return begin_s + step_s

    def _compute(self, plan: StepPlan) -> None:
        self.now_s = self._end_s(plan, self.scheduler.num_waiting, self.now_s)
        self._land_step(plan)

    def _land_step(self, plan: StepPlan) -> None:
        """Record that a step has ended now."""
        pauses = self.scheduler.batcher.pauses
        sampled = [chunk.request_id for chunk in plan.chunks if chunk.samples] if pauses else None
        updates, num_tokens = self.scheduler.land(plan)
        self.recorder.stepped(self.now_s, updates, len(plan.chunks), num_tokens, sampled)

    def _step_beside(self, *, sure: bool = False) -> bool:
        """Simulate a decode step that new requests join with their whole prompts; return False if it has to
        be decided. `sure`: it was found to be possible."""
        chunks = self.scheduler.start_beside(sure=sure)
        if chunks is None:
            return False
        self._end_beside(chunks)
        return True

    def _end_beside(self, chunks: Sequence[Chunk]) -> None:
        """Simulate the step that requests join with these chunks."""
        scheduler = self.scheduler
        group = scheduler.group
        assert group is not None, "they join one"
        step_s = self._times.beside_s(group, chunks)
        now_s = self.now_s = self.now_s + step_s
        scheduler.batcher.pass_time(step_s)
        num_running = len(group) + len(chunks)
        updates = scheduler.end_beside()
        self.recorder.stepped(now_s, updates, num_running=num_running, num_tokens=num_running)

    def _leap(self, next_s: float) -> bool:
        """Simulate all steps up to the next event; return False if the next step has to be decided."""
        most = self.scheduler.leap_length() if next_s > self.now_s and not self._has_news() else 0
        group = self.scheduler.group if most > 0 else None
        if group is None:
            return False
        self._leap_within(next_s, group, most)
        return True

    def _leap_within(self, next_s: float, group: DecodeGroup, most: int) -> None:
        """Leap at most `most` steps, up to the first one that begins at or after `next_s` or the end of a
        load."""
        next_s = min(next_s, self._next_end_s())
        repeats = self._repeats(group)
        self._take_leap(group, repeats.steps_until(next_s - self.now_s, most), repeats)

    def _has_news(self) -> bool:
        """Return whether a read, load or copy has ended that the next decision must take into account."""
        return self._next_end_s() <= self.now_s

    def _repeats(self, group: DecodeGroup) -> Repeats:
        """Return the times of the group's next steps; cached, because they are asked for before being
        simulated."""
        num_waiting = self.scheduler.num_waiting
        state = (group, group.num_changes, num_waiting)
        if state != self._repeats_of:
            self._repeats_of = state
            self._next_repeats = self._times.repeats(group, num_waiting)
        return self._next_repeats

    def _take_leap(self, group: DecodeGroup, num_steps: int, repeats: Repeats) -> None:
        seconds = repeats.sum_s(num_steps)
        now_s = self.now_s = self.now_s + seconds
        self.scheduler.batcher.pass_time(seconds)
        num_running = len(group)
        ended = self.scheduler.leap(num_steps)
        self.recorder.leapt(now_s, ended, num_running, num_steps, repeats)

    # ---- loads

    def _start_loads(self, reads: Sequence[AdapterRead], loads: Sequence[AdapterLoad]) -> None:
        """Queue loads on the bus, and reads from the disk, one after another; loads that one step uses share
        the bus."""
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
            self._in_flight[load.version] = LoadInFlight(
                begin_s if load.awaited else free_s, end_s, load.assisted_layers
            )
            self._bus_free_s = end_s
            heapq.heappush(self._ends, (end_s, next(self._order), load.version, False))
        self.num_loads += len(loads)

    def _start_swaps(self, plan: StepPlan) -> None:
        """Queue copies of KV blocks, which begin when the steps launched so far are over: to the host on a
        bus of their own, and to the device on the bus of adapters."""
        if not (plan.swap_outs or plan.swap_ins):
            return
        assert self._memory.pool.host is not None
        block_bytes, launched_s, copies = (
            self._memory.pool.host.block_bytes,
            self._launched_s(),
            self._kv_copies,
        )
        if plan.swap_outs:
            begin_s = max(copies.out_free_s, launched_s)
            copies.out_free_s = begin_s + self._times.copy_s(len(plan.swap_outs) * block_bytes)
            copies.begin(KVCopies(copies.out_free_s, plan.swap_outs, out=True))
        if plan.swap_ins:
            begin_s = max(self._bus_free_s, launched_s)
            self._bus_free_s = begin_s + self._times.copy_s(len(plan.swap_ins) * block_bytes)
            copies.begin(KVCopies(self._bus_free_s, plan.swap_ins, out=False))

    def _launched_s(self) -> float:
        """Return when the steps launched so far are over."""
        return self.now_s

    def _disk_end_s(self, version: str) -> float:
        """Return the end of a read from disk that begins now, after those in flight."""
        self._disk_free_s = max(self._disk_free_s, self.now_s) + self._times.read_s(version)
        return self._disk_free_s

    def _wait_for(self, versions: frozenset[str]) -> None:
        """Delay the step until these versions are loaded."""
        for end_s, _, version, _ in self._ends:
            if version in versions:
                self.now_s = max(self.now_s, end_s)


class _Clock:
    """A simulator's virtual time, as the scheduler sees it."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def now_s(self) -> float:
        return self._simulator.now_s


def _relative(load: LoadInFlight, now_s: float, num_tokens: Sequence[int]) -> LoadInFlight:
    """Return the load with times relative to `now_s`, for a step with so many tokens of each request. CPU
    workers assist with prompts; a decode waits for the whole adapter."""
    assisted = load.assisted_layers if min(num_tokens) > 1 else 0
    return LoadInFlight(load.begin_s - now_s, load.end_s - now_s, assisted, sum(num_tokens))


def _is_for_later(load: AdapterLoad) -> bool:
    return not load.awaited


@lru_cache(maxsize=4096)
def _prompt(token_id: int, num_tokens: int) -> list[int]:
    """Return a cached list for each length: prompts are never modified, and separate lists for all requests
    of a fleet would evict other data from the CPU caches."""
    return [token_id] * num_tokens


@lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    """Return cached parameters for each length: validating them takes longer than simulating the request."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
