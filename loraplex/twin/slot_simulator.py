"""A simulated engine with slots for adapters that is driven from outside, request by request.

The steps are those of `slot_engine`, with the same results as if all requests had been known from the
beginning. The compiled engine returns after each step with visible results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from loraplex.core.request import FinishReason
from loraplex.perf.slot_profile import SlotCosts
from loraplex.twin.engine_twin import AdapterEvent
from loraplex.twin.outcome import Outcome, RequestEvent, RequestOutcome
from loraplex.twin.slot_costs import compiled_costs
from loraplex.twin.slot_engine import (
    NOW_S,
    NUM_STEPS,
    NUM_TOTALS,
    RUNNING_S,
    STEP_S,
    WAITING_S,
    simulate,
)
from loraplex.twin.slot_state import (
    IS_UNDER_WAY,
    NOTE_END,
    NOTE_EVICT,
    NOTE_FIRST,
    NOTE_LOAD,
    NOTE_READ,
    NUM_ACTIVE,
    NUM_ARRIVED,
    NUM_LOADS,
    NUM_NOTES,
    NUM_PREEMPTIONS,
    NUM_RUNNING,
    NUM_WAITING,
    Floats,
    Ints,
    Limits,
    gap_place,
    gap_seconds,
    new_state,
    no_requests,
    notes_for,
    num_generated,
    requests_of,
    take_arrivals,
    with_adapter,
    with_more_room,
    withdraw,
)
from loraplex.workload.jsonl import WorkloadRequest

_ADAPTER_EVENTS: Final[Mapping[int, Literal["load", "read", "evict"]]] = {
    NOTE_READ: "read",
    NOTE_EVICT: "evict",
    NOTE_LOAD: "load",
}
_FEW: Final = 64
"""Initial capacity in requests; it doubles when it is exceeded."""


class SlotSetup(NamedTuple):
    """An engine with slots. `ranks`, `positions`: by adapter; `positions`: in the order in which the engine
    processes the adapters of a batch. `latency_s`: seconds until a client sees a token. `staged`: adapters
    are in host memory at the start; `resident`: and in slots."""

    limits: Limits
    costs: SlotCosts
    ranks: Floats
    positions: Ints
    latency_s: float
    staged: bool = False
    resident: bool = False


class SlotSimulator:
    """One engine. It numbers adapters itself, in the order of their registration: a step iterates over all of
    them, and each replica of a fleet gets only a few of its adapters."""

    def __init__(self, setup: SlotSetup, *, num_requests: int = _FEW) -> None:
        """`num_requests`: initial capacity."""
        self._setup = setup
        self._limits = setup.limits
        self._costs = compiled_costs(setup.costs)
        self._latency_s = setup.latency_s
        self._requests = no_requests(max(num_requests, 1))
        self._state = new_state(self._requests, setup.limits, np.zeros(0), np.zeros(0, np.int64))
        self._own_numbers: dict[int, int] = {}  # by external adapter number
        self._versions: list[str] = []  # of adapters by own number
        self._totals = np.zeros(NUM_TOTALS)
        self._outcomes: list[RequestOutcome] = []
        self._left: set[int] = set()  # requests that continue on another engine
        self._resumed: set[int] = set()  # requests that arrived with a part of their answer
        self._num_checked = 0  # requests already checked for being lost
        self._read_end_s: Callable[[str], float] | None = None
        self._request_events: list[RequestEvent] | None = None
        self._adapter_events: list[AdapterEvent] | None = None

    # ---- whole workloads

    def run(self, workload: Sequence[WorkloadRequest]) -> Outcome:
        """Simulate a whole workload on an engine without observers."""
        assert self._request_events is None, "requests have no events then"
        assert not self._outcomes, "none has come before"
        assert len(workload) <= len(self._requests.arrival_s), "there is room for them"
        self._register_all()
        self._outcomes = [RequestOutcome(each) for each in workload]
        self._requests = requests_of(workload)
        self._simulate(self._limits.until_s)
        state, num_requests = self._state, len(self._outcomes)
        for outcome, first_s, finish_s, is_lost in zip(
            self._outcomes,
            state.first_s[:num_requests].tolist(),
            state.finish_s[:num_requests].tolist(),
            state.is_lost[:num_requests].tolist(),
            strict=True,
        ):
            outcome.first_token_s = None if math.isnan(first_s) else first_s + self._latency_s
            outcome.finish_s = None if math.isnan(finish_s) else finish_s + self._latency_s
            outcome.lost = is_lost
        return self.outcome(self.end_s(self._limits.until_s))

    def _register_all(self) -> None:
        """Register all adapters under their external numbers."""
        setup = self._setup
        self._state = new_state(self._requests, setup.limits, setup.ranks, np.argsort(setup.positions))
        self._state.is_known[:] = setup.staged
        if setup.resident:
            self._state.is_known[:] = self._state.is_active[:] = True
            self._state.counts[NUM_ACTIVE] = len(setup.ranks)

    # ---- as driven by a fleet

    @property
    def now_s(self) -> float:
        return float(self._totals[NOW_S])

    def watch(self, requests: list[RequestEvent], adapters: list[AdapterEvent]) -> None:
        self._request_events, self._adapter_events = requests, adapters
        self._state = self._state._replace(notes=notes_for(self._limits))

    def fetch_by(self, read_end_s: Callable[[str], float]) -> None:
        """See EngineTwin. The engine computes nothing while it reads adapters, one at a time."""
        assert self._request_events is not None, "reads are known of an engine that is watched"
        self._read_end_s = read_end_s
        self._costs = compiled_costs(self._setup.costs.without_reads)

    def register(self, adapter: int) -> None:
        """Register an adapter, before the first request on it arrives."""
        setup = self._setup
        self._own_numbers[adapter] = len(self._versions)
        self._versions.append(str(adapter))
        self._state = with_adapter(
            self._state,
            rank=setup.ranks[adapter],
            position=setup.positions[adapter],
            is_known=setup.staged,
        )

    def unstage(self, adapter: int) -> None:
        """Evict the copy in host memory; one in a slot stays there."""
        if adapter in self._own_numbers:
            self._state.is_known[self._own_numbers[adapter]] = False

    def is_idle(self) -> bool:
        counts = self._state.counts
        is_empty = counts[NUM_WAITING] == 0 and counts[NUM_RUNNING] == 0
        return bool(is_empty and counts[NUM_ARRIVED] == len(self._outcomes))

    def advance(self, until_s: float) -> None:
        while self.now_s < until_s and not self.is_idle():
            self._simulate(until_s)
            if self._state.counts[IS_UNDER_WAY]:
                self._fetch()
            else:
                self._report()

    def quiet_until_s(self) -> float:
        return math.inf if self.is_idle() else self.now_s

    def run_to(self, until_s: float) -> float:
        self.advance(until_s)
        return self.quiet_until_s()

    def offer(self, request: WorkloadRequest) -> RequestOutcome:
        outcome = RequestOutcome(request)
        self._enter(request, outcome)
        return outcome

    def resume(self, request: WorkloadRequest, outcome: RequestOutcome) -> None:
        number = self._enter(request, outcome)
        if outcome.first_token_s is not None:
            self._resumed.add(number)

    def hand_over(self, request_id: str) -> tuple[RequestOutcome, int] | None:
        take_arrivals(
            self._state, self._requests, len(self._outcomes), self._limits.max_open, self._totals[NOW_S]
        )
        self._report()
        num_output = self.num_output(request_id)
        if num_output is None:
            return None
        number = int(request_id)
        withdraw(self._state, self._requests, number)
        self._left.add(number)
        return self._outcomes[number], num_output

    def num_output(self, request_id: str) -> int | None:
        number, state = int(request_id), self._state
        if number in self._left or state.is_lost[number] or not math.isnan(state.finish_s[number]):
            return None
        return num_generated(state, number)

    def end_s(self, until_s: float) -> float:
        return min(self.now_s, until_s) or 1.0

    def outcome(self, end_s: float) -> Outcome:
        """Summarise everything up to `end_s`, by the engine's clock; clients see the last token later."""
        counts, totals, gaps = self._state.counts, self._totals, self._state.gaps
        outcomes = self._outcomes
        if self._left:
            # A request that left and came back counts under its later number.
            outcomes = [each for number, each in enumerate(outcomes) if number not in self._left]
        return Outcome(
            requests=outcomes,
            duration_s=min(end_s + self._latency_s, self._limits.until_s),
            num_steps=int(totals[NUM_STEPS]),
            num_loads=int(counts[NUM_LOADS]),
            num_preemptions=int(counts[NUM_PREEMPTIONS]),
            mean_running=float(totals[RUNNING_S]) / end_s,
            mean_waiting=float(totals[WAITING_S]) / end_s,
            gaps=[(gap_seconds(place), 0.0, 1, int(gaps[place])) for place in np.flatnonzero(gaps).tolist()],
        )

    def _enter(self, request: WorkloadRequest, outcome: RequestOutcome) -> int:
        if self.is_idle():
            self._totals[NOW_S] = max(self.now_s, request.arrival_s)
        number = len(self._outcomes)
        self._outcomes.append(outcome)
        if number == len(self._requests.arrival_s):
            self._state, self._requests = with_more_room(self._state, self._requests)
        requests = self._requests
        requests.arrival_s[number] = request.arrival_s
        requests.prompt_tokens[number] = request.prompt_tokens
        requests.output_tokens[number] = request.output_tokens
        requests.adapter[number] = self._own_numbers[request.adapter]
        return number

    def _simulate(self, until_s: float) -> None:
        simulate(
            self._state,
            self._requests,
            len(self._outcomes),
            self._limits,
            self._costs,
            self._totals,
            float(until_s),
            self._read_end_s is not None,
        )

    def _fetch(self) -> None:
        """Add the time to read adapters that are not in host memory to the step in flight."""
        assert self._read_end_s is not None
        counts, totals = self._state.counts, self._totals
        begin_s = self.now_s
        for kind, adapter in self._state.notes[: counts[NUM_NOTES]].tolist():
            if kind == NOTE_READ:
                totals[NOW_S] = self._read_end_s(self._versions[adapter])
        totals[STEP_S] += self.now_s - begin_s
        totals[NOW_S] = begin_s

    def _report(self) -> None:
        """Report the events that the last step noted, and requests that were lost."""
        assert self._request_events is not None
        assert self._adapter_events is not None
        counts, now_s = self._state.counts, self.now_s
        for kind, number in self._state.notes[: counts[NUM_NOTES]].tolist():
            if kind == NOTE_FIRST:
                outcome = self._outcomes[number]
                if number in self._resumed:  # it had tokens before, the last one when it moved
                    self._state.gaps[gap_place(now_s - self._requests.arrival_s[number])] += 1
                else:
                    outcome.first_token_s = now_s + self._latency_s
                if self._requests.output_tokens[number] > 1:  # otherwise its end is reported instead
                    self._request_events.append(RequestEvent(now_s, str(number), None))
            elif kind == NOTE_END:
                self._outcomes[number].finish_s = now_s + self._latency_s
                self._request_events.append(RequestEvent(now_s, str(number), FinishReason.LENGTH))
            else:
                self._adapter_events.append(AdapterEvent(_ADAPTER_EVENTS[kind], self._versions[number]))
        counts[NUM_NOTES] = 0
        first, self._num_checked = self._num_checked, int(counts[NUM_ARRIVED])
        if first < self._num_checked:
            for number in np.flatnonzero(self._state.is_lost[first : self._num_checked]).tolist():
                self._outcomes[first + number].lost = True
                at_s = float(self._requests.arrival_s[first + number])
                self._request_events.append(RequestEvent(at_s, str(first + number), FinishReason.ERROR))
