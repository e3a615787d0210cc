"""The outcome of a simulated workload: each request, and summary figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.core.request import FinishReason
from loraplex.scheduling.plan import TokenUpdate
from loraplex.twin.slo import Slo
from loraplex.twin.times import Repeats
from loraplex.workload.jsonl import WorkloadRequest

Floats = npt.NDArray[np.float64]

STARVED_BELOW: Final = 0.9
"""Share of the offered tokens: a run that serves less is starved."""
_GROWS_ABOVE: Final = 1.2
"""Ratio of queue lengths above which the queue counts as growing."""


@dataclass(slots=True)
class RequestOutcome:
    """Times in seconds on the run's clock; None if it did not happen. `lost`: its client had no connection
    left, and the engine never received it. `refused`: the server did not accept it."""

    request: WorkloadRequest
    first_token_s: float | None = None
    finish_s: float | None = None
    failed: bool = False
    lost: bool = False
    refused: bool = False

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def is_served(self) -> bool:
        return self.finish_s is not None and not self.failed

    @property
    def is_unfinished(self) -> bool:
        """Return whether it was still running or waiting when the run ended."""
        return self.finish_s is None and self.was_taken

    @property
    def was_taken(self) -> bool:
        """Return whether an engine received it."""
        return not (self.lost or self.refused)

    def at_best(self, now_s: float) -> RequestOutcome:
        """Return the outcome if all missing tokens of an unfinished request came now: the shortest times that
        it can still have."""
        first_s = now_s if self.first_token_s is None else self.first_token_s
        return replace(self, first_token_s=first_s, finish_s=now_s)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None if there is none."""
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpt_s(self) -> float | None:
        """Seconds per token, from arrival to the last token; None if it was not served."""
        if self.finish_s is None or self.failed:
            return None
        return (self.finish_s - self.request.arrival_s) / self.request.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if it was not served, or if there is no such token."""
        num_after = self.request.output_tokens - 1
        if self.finish_s is None or self.first_token_s is None or self.failed or not num_after:
            return None
        return (self.finish_s - self.first_token_s) / num_after


Gaps = tuple[float, float, int, int]
"""Gaps between tokens of the same requests in consecutive steps: seconds of the first step, seconds that each
takes more than the one before, number of steps, and number of tokens per step that were not a request's
first."""


class RequestEvent(NamedTuple):
    """A request's first token, or its end. `reason`: None if it goes on."""

    at_s: float
    request_id: str
    reason: FinishReason | None


class Recorder:
    """Records outcomes while a workload runs."""

    def __init__(self) -> None:
        self.requests: list[RequestOutcome] = []
        self._open: dict[str, RequestOutcome] = {}
        self._resumed: set[str] = set()  # arrived with a part of their answer, no token from here yet
        self._left: set[int] = set()  # by identity: requests that continue on another engine
        self._gaps: list[Gaps] = []
        self._token_s: dict[str, float] = {}  # of each request's last token
        self._last_s = 0.0
        self.num_steps = 0
        self.events: list[RequestEvent] | None = None  # if a list is set here, events are appended to it
        self.running_s = 0.0
        self.waiting_s = 0.0

    def arrived(self, request_id: str, request: WorkloadRequest) -> RequestOutcome:
        if self._open:
            # Correct for the time between the arrival and the end of the last step, in either direction.
            self.waiting_s += self._last_s - request.arrival_s
        else:
            self._last_s = request.arrival_s
        outcome = self._open[request_id] = RequestOutcome(request)
        self.requests.append(outcome)
        return outcome

    def left(self, request_id: str) -> RequestOutcome:
        """Remove a request that continues on another engine."""
        outcome = self._open.pop(request_id)
        self._left.add(id(outcome))
        self._resumed.discard(request_id)
        return outcome

    def resumed(self, request_id: str, outcome: RequestOutcome, now_s: float) -> None:
        """Add a request that comes from another engine, possibly with a part of its answer."""
        if self._open:
            self.waiting_s += self._last_s - now_s  # as in `arrived`
        else:
            self._last_s = now_s
        self._open[request_id] = outcome
        if id(outcome) in self._left:  # it was here before
            self._left.remove(id(outcome))
        else:
            self.requests.append(outcome)
        if outcome.first_token_s is not None:
            self._resumed.add(request_id)

    def updated(self, updates: Iterable[TokenUpdate], now_s: float) -> int:
        """Record that each of these requests has one more token, or has ended, or both. Return how many
        tokens were first tokens."""
        num_first = 0
        for update in updates:
            outcome, reason = self._open[update.request_id], update.finish_reason
            if reason is not None:
                del self._open[update.request_id]
                outcome.finish_s = now_s
                outcome.failed = reason is FinishReason.ERROR
            is_first = outcome.first_token_s is None and not outcome.failed
            if is_first:
                outcome.first_token_s = now_s
                num_first += 1
            if self._resumed and update.request_id in self._resumed:
                self._resumed.remove(update.request_id)
                is_first = True  # observers count it as running from now on
            if self.events is not None and (is_first or reason is not None):
                self.events.append(RequestEvent(now_s, update.request_id, reason))
        return num_first

    def passed(self, now_s: float, num_running: int) -> float:
        """Advance the clock to `now_s`: `num_running` requests were in steps meanwhile, all others waited.
        Return the seconds passed."""
        passed_s, self._last_s = now_s - self._last_s, now_s
        self.running_s += passed_s * num_running
        self.waiting_s += passed_s * (len(self._open) - num_running)
        return passed_s

    def stepped(
        self,
        now_s: float,
        updates: Iterable[TokenUpdate],
        num_running: int,
        num_tokens: int,
        sampled: Iterable[str] | None = None,
    ) -> None:
        """Record a step of `num_running` requests that ended and produced `num_tokens`. `updates`: at least
        those of requests that have their first token now or have ended. `sampled`: the requests with a token,
        where steps may leave requests out."""
        passed_s = self.passed(now_s, num_running)
        if sampled is not None:
            self._add_own_gaps(now_s, sampled)
            self.updated(updates, now_s)
        else:
            self._gaps.append((passed_s, 0.0, 1, num_tokens - self.updated(updates, now_s)))
        self.num_steps += 1

    def _add_own_gaps(self, now_s: float, sampled: Iterable[str]) -> None:
        """Add the gap of each request since its own last token."""
        gaps_s = Counter(
            now_s - self._token_s[request_id] for request_id in sampled if request_id in self._token_s
        )
        self._gaps += [(gap_s, 0.0, 1, count) for gap_s, count in gaps_s.items()]
        self._token_s = {each: s for each, s in self._token_s.items() if each in self._open}
        self._token_s.update((each, now_s) for each in sampled if each in self._open)

    def leapt(
        self, now_s: float, ended: Sequence[TokenUpdate], num_running: int, num_steps: int, took: Repeats
    ) -> None:
        """Record that the same requests decoded for `num_steps` steps; `ended`: requests that ended with the
        last one."""
        self.passed(now_s, num_running)
        first_s, growth_s, once_s = took
        if once_s == 0.0:
            self._gaps.append((first_s, growth_s, num_steps, num_running))
        else:
            self._gaps.append((first_s + once_s, 0.0, 1, num_running))
            self._gaps.append((first_s + growth_s, growth_s, num_steps - 1, num_running))
        self.num_steps += num_steps
        if ended:
            self.updated(ended, now_s)

    def outcome(self, end_s: float, *, num_loads: int, num_preemptions: int) -> Outcome:
        return Outcome(
            requests=[each for each in self.requests if id(each) not in self._left]
            if self._left
            else self.requests,
            duration_s=end_s,
            num_steps=self.num_steps,
            num_loads=num_loads,
            num_preemptions=num_preemptions,
            mean_running=self.running_s / end_s if end_s else 0.0,
            mean_waiting=self.waiting_s / end_s if end_s else 0.0,
            gaps=self._gaps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Numbers of running and waiting requests, as means over intervals; `at_s`: the middles of the
    intervals."""

    interval_s: float
    at_s: Sequence[float]
    running: Sequence[float]
    waiting: Sequence[float]


class SloCounts(NamedTuple):
    """Numbers of requests by SLO result. `num_undecided`: requests that the end of the run interrupted while
    they were within every limit."""

    num_attained: int
    num_missed: int
    num_undecided: int

    @property
    def attainment(self) -> float | None:
        """Share of the decided requests that attain the SLO; None if there are none."""
        num_decided = self.num_attained + self.num_missed
        return self.num_attained / num_decided if num_decided else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a run. `num_loads`: adapter loads to the device. `gaps`: gaps between tokens in time
    order; if a request was preempted in between, only the step with the later token counts.
    `num_swapped_out`, `num_swapped_in`: KV blocks copied to the host and back. `num_merges` and the fields
    after it: as in `EngineStats`; `num_step_adapters`: None where they are not counted."""

    requests: Sequence[RequestOutcome]
    duration_s: float
    num_steps: int
    num_loads: int
    num_preemptions: int
    mean_running: float
    mean_waiting: float
    gaps: Sequence[Gaps]
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_merges: int = 0
    num_merged_steps: int = 0
    num_pauses: int = 0
    num_step_adapters: int | None = None

    def timeline(self, num_intervals: int = 200) -> Timeline:
        """Return the numbers of running and waiting requests as means over intervals of equal length. A
        request waits up to its first token, unless it fails before that."""
        known = [each for each in self.requests if each.was_taken]
        begun = [each for each in known if each.first_token_s is not None]
        edges_s = np.linspace(0.0, self.duration_s, num_intervals + 1)
        interval_s = self.duration_s / num_intervals

        def mean_by_then(moments: Iterable[float | None]) -> Floats:
            """Return how many of the moments had passed, as the mean over each interval."""
            happened_s = np.sort(_seconds(each for each in moments if each is not None))
            count = np.searchsorted(happened_s, edges_s, "right")
            sums_s = np.concatenate([[0.0], np.cumsum(happened_s)])
            past_s = count * edges_s - sums_s[count]  # seconds since each moment, summed
            means: Floats = np.diff(past_s) / (interval_s or 1.0)
            return means

        came = mean_by_then(each.request.arrival_s for each in known)
        began = mean_by_then(each.first_token_s for each in begun)
        ended = mean_by_then(each.finish_s for each in begun)
        gave_up = mean_by_then(each.finish_s for each in known if each.first_token_s is None)
        return Timeline(
            interval_s=interval_s,
            at_s=((edges_s[:-1] + edges_s[1:]) / 2).tolist(),
            # Rounded: differences of large sums have rounding errors.
            running=(began - ended).round(6).tolist(),
            waiting=(came - began - gave_up).round(6).tolist(),
        )

    def summary(self) -> dict[str, Any]:
        """Return figures in seconds and tokens per second. First tokens, tokens and gaps between them are of
        all requests that have begun; figures of whole answers (`itl_mean_s`, `tpt_s`, `e2e_s`) are of served
        requests."""
        begun = [each for each in self.requests if each.first_token_s is not None]
        served = [each for each in begun if each.is_served]
        arrivals_s = _seconds(each.request.arrival_s for each in served)
        first_s = _seconds(each.first_token_s for each in served)
        finish_s = _seconds(each.finish_s for each in served)
        outputs = np.array([each.request.output_tokens for each in served], np.float64)
        num_gaps = float((outputs - 1).sum())
        num_output = len(begun) + sum(num_steps * num_tokens for _, _, num_steps, num_tokens in self.gaps)
        waits_s = _seconds(each.ttft_s for each in begun)
        duration_s = self.duration_s or 1.0
        return {
            "duration_s": self.duration_s,
            "num_requests": len(self.requests),
            "num_served": len(served),
            "num_failed": sum(each.failed for each in self.requests),
            "num_lost": sum(each.lost for each in self.requests),
            "num_refused": sum(each.refused for each in self.requests),
            "num_unfinished": sum(each.is_unfinished for each in self.requests),
            "num_steps": self.num_steps,
            "num_loads": self.num_loads,
            "num_preemptions": self.num_preemptions,
            "num_swapped_out": self.num_swapped_out,
            "num_swapped_in": self.num_swapped_in,
            "num_merges": self.num_merges,
            "num_merged_steps": self.num_merged_steps,
            "num_pauses": self.num_pauses,
            **({} if self.num_step_adapters is None else {"adapters_per_step": self._adapters_per_step}),
            "input_tok_s": sum(each.request.prompt_tokens for each in begun) / duration_s,
            "output_tok_s": num_output / duration_s,
            "offered_tok_s": self._num_offered / (self._offered_s or duration_s),
            "starved": self._is_starved(),
            "itl_mean_s": float((finish_s - first_s).sum()) / num_gaps if num_gaps else None,
            "ttft_s": _percentiles(waits_s),
            "tpt_s": _percentiles(_seconds(each.tpt_s for each in served)),
            "e2e_s": _percentiles(finish_s - arrivals_s),
            "itl_s": _gap_percentiles(self.gaps),
            "mean_running": self.mean_running,
            "mean_waiting": self.mean_waiting,
        }

    @property
    def _adapters_per_step(self) -> float:
        return (self.num_step_adapters or 0) / max(self.num_steps, 1)

    def tpot_percentiles(self) -> dict[str, float] | None:
        """Return mean and percentiles of seconds per token after the first, over served requests with such a
        token; None if there are none."""
        return _percentiles(_seconds(s for each in self.requests if (s := each.tpot_s) is not None))

    def is_overloaded(self) -> bool:
        """Return whether less than 90% of the offered tokens are served, and requests are lost or the queue
        still grows when the last ones arrive. A queue due to a burst or to the first loads of adapters that
        shrinks by then is no overload."""
        return self._is_starved() and (
            not all(each.was_taken for each in self.requests) or self._queue_grows()
        )

    def _queue_grows(self) -> bool:
        """Return whether the mean queue over the last third of the arrivals is longer than over the third
        before it: with steady growth their ratio is 5 to 3."""
        known = [each for each in self.requests if each.was_taken]
        arrivals_s = np.sort(_seconds(each.request.arrival_s for each in known))
        ends_s = (each.finish_s if each.first_token_s is None else each.first_token_s for each in known)
        left_s = np.sort(_seconds(np.inf if each is None else each for each in ends_s))
        waiting = np.arange(1, len(known) + 1) - np.searchsorted(left_s, arrivals_s, "right")
        third = max(len(known) // 3, 1)
        before = waiting[-2 * third : -third]
        return float(waiting[-third:].mean()) > _GROWS_ABOVE * float(before.mean() if before.size else 0.0)

    def slo_attainment(self, slo: Slo) -> float:
        """Return the share of requests that attain the SLO (`slo_counts`); 1 if none is decided."""
        attainment = self.slo_counts(slo).attainment
        return 1.0 if attainment is None else attainment

    def slo_counts(self, slo: Slo) -> SloCounts:
        """Count the requests that attain the SLO and those that miss it. Requests that were lost or failed
        miss it, and so do unfinished ones that have exceeded a limit by the end of the run. Other unfinished
        ones are undecided."""
        num_attained = sum(map(slo.is_attained, self.requests))
        unfinished = (each.at_best(self.duration_s) for each in self.requests if each.is_unfinished)
        num_undecided = sum(map(slo.is_attained, unfinished))
        return SloCounts(num_attained, len(self.requests) - num_attained - num_undecided, num_undecided)

    def ttft_p99_by_adapter(self) -> dict[int, float]:
        """Return the 99th percentile of TTFT by adapter, over requests that have begun."""
        begun = [each for each in self.requests if each.first_token_s is not None]
        waits_s = _seconds(each.ttft_s for each in begun)
        adapters = np.array([each.request.adapter for each in begun], np.int64)
        order = np.lexsort((waits_s, adapters))
        found, first, number = np.unique(adapters[order], return_index=True, return_counts=True)
        # As np.percentile, but for all adapters at once: one call for each takes seconds for a fleet.
        place = 0.99 * (number - 1)
        low = place.astype(np.int64)
        sorted_s = waits_s[order]
        low_s, high_s = sorted_s[first + low], sorted_s[first + np.minimum(low + 1, number - 1)]
        return dict(zip(found.tolist(), (low_s + (place - low) * (high_s - low_s)).tolist(), strict=True))

    @property
    def _offered_s(self) -> float:
        return max((each.request.arrival_s for each in self.requests), default=0.0)

    @property
    def _num_offered(self) -> int:
        return sum(each.num_tokens for each in self.requests)

    def _is_starved(self) -> bool:
        """Return whether less than 90% of the offered tokens are served, by rate: tokens of requests that
        have begun, up to the last first token. The time that answers take after that, and the shortest time
        to a first token, do not count as delay. A run is not starved either if every request has begun and
        none waited as long as the quickest answer took."""
        begun = [(s, each) for each in self.requests if (s := each.first_token_s) is not None]
        offered_s = self._offered_s
        if not begun:
            return bool(self.requests) and offered_s >= self.duration_s
        stays_s = (s - each.request.arrival_s for each in self.requests if (s := each.finish_s) is not None)
        most_wait_s = max(first_s - each.request.arrival_s for first_s, each in begun)
        if most_wait_s < min(stays_s, default=self.duration_s) and len(begun) == len(self.requests):
            return False
        num_begun = sum(each.num_tokens for _, each in begun)
        least_wait_s = min(first_s - each.request.arrival_s for first_s, each in begun)
        busy_s = max(max(first_s for first_s, _ in begun) - least_wait_s, offered_s)
        return num_begun * offered_s < STARVED_BELOW * self._num_offered * busy_s


def _seconds(values: Any) -> Floats:
    return np.array(list(values), np.float64)


def _percentiles(samples: Floats) -> dict[str, float] | None:
    if len(samples) == 0:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(samples, (50, 95, 99)))
    return {"mean": float(samples.mean()), "p50": p50, "p95": p95, "p99": p99}


def _gap_percentiles(gaps: Sequence[Gaps]) -> dict[str, float] | None:
    """Return mean and percentiles over tokens: a step is weighted by its tokens."""
    if not any(num_tokens for *_, num_tokens in gaps):
        return None
    table = np.array(gaps, np.float64)
    num_steps = table[:, 2].astype(np.int64)
    first_s, growth_s, _, weights = np.repeat(table, num_steps, axis=0).T
    place = np.arange(len(first_s)) - np.repeat(np.cumsum(num_steps) - num_steps, num_steps)
    seconds = first_s + growth_s * place
    order = np.argsort(seconds)
    reached = np.cumsum(weights[order])
    at = np.searchsorted(reached, np.array((0.5, 0.95, 0.99)) * reached[-1])
    mean = float(np.average(seconds, weights=weights))
    return {"mean": mean, **dict(zip(("p50", "p95", "p99"), seconds[order][at].tolist(), strict=True))}
