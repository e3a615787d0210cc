"""Counters of the server's work as plain numbers; the /metrics page gives them Prometheus names.

A token costs a few integer additions, without locks or label lookups: everything happens in one event loop,
and each request holds its counters.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.request import FinishReason, PhaseTimes
from loraplex.engine.text_engine import TextDelta
from loraplex.server.failure import Failure
from loraplex.server.recent_demand import RecentDemand
from loraplex.server.tenants.objective import Objective, Reached

TTFT_BUCKETS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
ADAPTER_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ITL_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
LATENCY_BUCKETS_S: Final = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0,
)  # fmt: skip
_SLOW_READER: Final = 0.1
"""Part of the time from the first token to the last one that sending may take before the time per token is
taken to be the client's."""


class Histogram:
    """Counts of observations by bucket; a value equal to an upper bound belongs to that bucket."""

    __slots__ = ("_highest", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._highest = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self._highest:
            self._highest = value

    def take_highest(self) -> float:
        """Return the highest value observed since the last call; 0 without any."""
        highest, self._highest = self._highest, 0.0
        return highest

    def add(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def since(self, earlier: Histogram) -> Histogram:
        """Return the observations that an earlier copy of this histogram does not have."""
        newer = Histogram(self.bounds)
        newer.counts = [now - then for now, then in zip(self.counts, earlier.counts, strict=True)]
        newer.total = self.total - earlier.total
        return newer

    def mean(self) -> float | None:
        count = sum(self.counts)
        return self.total / count if count else None

    def quantile(self, share: float) -> float | None:
        """Return a quantile, as Prometheus' histogram_quantile does: linear within a bucket, and the highest
        bound for what lies above all of them. None without observations."""
        rank, below, lower = share * sum(self.counts), 0, 0.0
        if not rank:
            return None
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * (rank - below) / count
            below, lower = below + count, bound
        return self.bounds[-1]

    def copy(self) -> Histogram:
        copied = Histogram.__new__(Histogram)
        copied.bounds, copied.counts, copied.total = self.bounds, self.counts[:], self.total
        copied._highest = self._highest
        return copied

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations up to it) pairs, as Prometheus expects them."""
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


class Traffic:
    """Counters of the requests for one adapter name. `num_reached`: those with an objective; None before
    the first."""

    __slots__ = (
        "num_canary_requests", "num_hits", "num_reached", "num_requests", "num_running", "num_tokens",
        "num_waiting", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_canary_requests = 0
        self.num_hits = 0
        self.num_tokens = 0
        self.num_waiting = 0
        self.num_running = 0
        self.num_reached: Counter[Reached] | None = None
        self.ttft = Histogram(ADAPTER_TTFT_BUCKETS_S)

    @property
    def num_in_flight(self) -> int:
        return self.num_waiting + self.num_running

    @classmethod
    def sum_of(cls, each: Iterable[Traffic | None]) -> Traffic:
        """Return the sum of several adapters' counts; None stands for an adapter without requests."""
        total = cls()
        for traffic in each:
            if traffic is not None:
                total._add(traffic)
        return total

    def _add(self, other: Traffic) -> None:
        self.num_requests += other.num_requests
        self.num_canary_requests += other.num_canary_requests
        self.num_hits += other.num_hits
        self.num_tokens += other.num_tokens
        self.num_waiting += other.num_waiting
        self.num_running += other.num_running
        self.ttft.add(other.ttft)
        if other.num_reached is not None:
            self.reached().update(other.num_reached)

    def reached(self) -> Counter[Reached]:
        """Return the counter of requests with an objective, created on first use."""
        if self.num_reached is None:
            self.num_reached = Counter()
        return self.num_reached

    def copy(self) -> Traffic:
        copied = Traffic.__new__(Traffic)
        copied.num_requests, copied.num_tokens = self.num_requests, self.num_tokens
        copied.num_hits, copied.num_canary_requests = self.num_hits, self.num_canary_requests
        copied.num_waiting, copied.num_running = self.num_waiting, self.num_running
        copied.num_reached = None if self.num_reached is None else self.num_reached.copy()
        copied.ttft = self.ttft.copy()
        return copied


class ServerMetrics:
    """Counters of one server since its start."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.inter_token = Histogram(ITL_BUCKETS_S)
        self.per_output_token = Histogram(ITL_BUCKETS_S)
        self.e2e = Histogram(LATENCY_BUCKETS_S)
        self.num_generating = 0
        """Requests in flight that have their first token."""
        self.demand = RecentDemand(clock)
        self._traffic: dict[str, Traffic] = {}

    def traffic(self, adapter: str) -> Traffic:
        """Return the counters of an adapter, created on first use."""
        traffic = self._traffic.get(adapter)
        if traffic is None:
            traffic = self._traffic[adapter] = Traffic()
        return traffic

    @property
    def names(self) -> Iterable[str]:
        """The adapters that were requested, in the order of their first requests."""
        return self._traffic

    def find_traffic(self, adapter: str) -> Traffic | None:
        """Return the counters of an adapter; None if it was never requested."""
        return self._traffic.get(adapter)

    def snapshot(self) -> ServerMetrics:
        """Return a copy for another thread to read, without `demand`. Its cost grows with the adapters in
        use."""
        copied = ServerMetrics(self.clock)
        copied.num_prompt_tokens = self.num_prompt_tokens
        copied.num_generation_tokens = self.num_generation_tokens
        copied.num_finished = self.num_finished.copy()
        copied.ttft, copied.inter_token = self.ttft.copy(), self.inter_token.copy()
        copied.per_output_token, copied.e2e = self.per_output_token.copy(), self.e2e.copy()
        copied._traffic = {name: traffic.copy() for name, traffic in self._traffic.items()}
        return copied

    def forget(self, adapter: str) -> None:
        """Drop an adapter's counters; requests in flight keep counting into the dropped object."""
        self._traffic.pop(adapter, None)
        self.demand.forget(adapter)

    def meter(
        self,
        *,
        adapter: str | None,
        num_prompt_tokens: int,
        num_prompts: int = 1,
        num_choices: int,
        arrival_s: float,
        is_canary: bool = False,
        objective: Objective | None = None,
    ) -> RequestMeter:
        """Begin to measure a request; the caller must call `close` on the result. `num_prompt_tokens`: of its
        `num_prompts` prompts, each counted once; `num_choices`: of all of them. `objective`: its targets, if
        it has any."""
        # A request for the base model counts into a Traffic that is not exported.
        traffic = Traffic() if adapter is None else self.traffic(adapter)
        traffic.num_canary_requests += is_canary
        num_computed = num_prompt_tokens * num_choices // max(num_prompts, 1)
        self.demand.arrived(adapter, num_choices=num_choices, num_prompt_tokens=num_computed)
        demand = None if adapter is None else self.demand
        if objective is not None:
            objective = objective.counted_in(traffic.reached())
        return RequestMeter(self, traffic, demand, num_prompt_tokens, num_choices, arrival_s, objective)


class RequestMeter:
    """Measures one HTTP request, from its arrival to its end."""

    def __init__(
        self,
        metrics: ServerMetrics,
        traffic: Traffic,
        demand: RecentDemand | None,
        num_prompt_tokens: int,
        num_choices: int,
        arrival_s: float,
        objective: Objective | None = None,
    ) -> None:
        self._metrics = metrics
        self._objective = objective
        self._traffic = traffic
        self._demand = demand
        self._num_prompt_tokens = num_prompt_tokens
        self.num_choices = num_choices
        self.finish_reasons: Counter[FinishReason] = Counter()
        self.failure: Failure | None = None
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.phases: PhaseTimes | None = None
        self._last_token_s: dict[int, float] = {}
        self._num_tokens = 0
        self._sending_s = 0.0
        self._closed = False
        traffic.num_requests += 1
        traffic.num_waiting += 1

    def on_batch(self, batch: Sequence[TextDelta]) -> None:
        """Count one batch; all its tokens are taken to have arrived now."""
        metrics, now_s = self._metrics, self._metrics.clock.now_s()
        num_tokens = 0
        for delta in batch:
            count = delta.num_sampled
            if count:
                last_s = self._last_token_s.get(delta.choice)
                if last_s is not None:
                    metrics.inter_token.observe((now_s - last_s) / count, count)
                self._last_token_s[delta.choice] = now_s
                num_tokens += count
            if delta.finish_reason is not None:
                metrics.num_finished[delta.finish_reason] += 1
                self.finish_reasons[delta.finish_reason] += 1
        if self.first_token_s is None:
            # At most one hit per request: the other choices share what the first one loads.
            self._traffic.num_hits += batch[0].adapter_hit is True
            self.phases = batch[0].times
            self._on_first_batch(now_s)
        self.last_token_s = now_s
        self._num_tokens += num_tokens
        metrics.num_generation_tokens += num_tokens
        self._traffic.num_tokens += num_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, once it is there."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def is_complete(self) -> bool:
        """Return whether all choices have ended as they should. Not for a request that is closed."""
        return self.failure is None and self.finish_reasons.total() == self.num_choices

    @property
    def tpt_s(self) -> float | None:
        """Seconds for each token after the first, of a complete answer that has any; None too if its client
        read so slowly that this says more about the client than about the engine. Not for a request that is
        closed."""
        tokens_each = self._num_tokens / self.num_choices
        if self.first_token_s is None or tokens_each <= 1 or not self.is_complete:
            return None
        seconds = self.last_token_s - self.first_token_s
        return None if self._sending_s > _SLOW_READER * seconds else seconds / (tokens_each - 1)

    def now_s(self) -> float:
        return self._metrics.clock.now_s()

    def sent(self, since_s: float) -> None:
        """Record that tokens were sent, which took since then: long if the client does not read them. Those
        sent after the last token came delay none."""
        if not self.is_complete:
            self._sending_s += self.now_s() - since_s

    def fail(self, error: Exception) -> None:
        """Record the error that ends the request; not called if the client disconnected."""
        self.failure = Failure.of(error)

    def close(self) -> None:
        """End the request, whether it was answered, failed or was cancelled. Idempotent."""
        if self._closed:
            return
        self._closed, tpt_s = True, self.tpt_s
        num_unfinished = self.num_choices - self.finish_reasons.total()
        if num_unfinished:
            reason = FinishReason.CANCELLED if self.failure is None else self.failure.finish_reason
            self._metrics.num_finished[reason] += num_unfinished
            self.finish_reasons[reason] += num_unfinished
        if self.first_token_s is None:
            self._traffic.num_waiting -= 1
            if self._objective is not None and self.failure is not None:
                self._objective.first_token(math.inf)
            return
        self._traffic.num_running -= 1
        self._metrics.num_generating -= 1
        if num_unfinished:
            return  # cut short: its duration says nothing about the server
        if self._demand is not None:
            self._demand.answered(num_choices=self.num_choices, num_output_tokens=self._num_tokens)
        now_s = self._metrics.clock.now_s()
        self._metrics.e2e.observe(now_s - self.arrival_s)
        if self._num_tokens > 1:
            tokens_after_first = self._num_tokens - 1
            self._metrics.per_output_token.observe((now_s - self.first_token_s) / tokens_after_first)
        if self._objective is not None and tpt_s is not None:
            self._objective.later_tokens(tpt_s)

    def _on_first_batch(self, now_s: float) -> None:
        metrics = self._metrics
        self.first_token_s = now_s
        metrics.num_prompt_tokens += self._num_prompt_tokens
        metrics.ttft.observe(now_s - self.arrival_s)
        if self._objective is not None:
            self._objective.first_token(now_s - self.arrival_s)
        self._traffic.ttft.observe(now_s - self.arrival_s)
        self._traffic.num_waiting -= 1
        self._traffic.num_running += 1
        metrics.num_generating += 1
