"""Throughput and latencies over the last minutes, from the counters that /metrics exports.

A sample costs a copy of two histograms. Rates and means cover a few seconds before each sample, so that a
curve is smooth although requests end one by one. A percentile is interpolated within a bucket, and never
above what was observed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from loraplex.server.metrics import Histogram, ServerMetrics
from loraplex.server.responses import HistorySample
from loraplex.server.waiting import WaitingBook

_INTERVAL_S: Final = 1.0
_SMOOTHED: Final = 5
"""Number of intervals that a rate covers."""
_MAX_SAMPLES: Final = 600
_HIGH: Final = 0.95


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counters at one time. `highest_ttft_s`, `highest_itl_s`: since the time before."""

    at_s: float
    num_tokens: int
    num_prompt_tokens: int
    num_finished: int
    ttft: Histogram
    itl: Histogram
    highest_ttft_s: float
    highest_itl_s: float


class ServerHistory:
    """Samples of one server, oldest first. A bounded number is kept."""

    def __init__(self, metrics: ServerMetrics, waiting: WaitingBook) -> None:
        self._metrics = metrics
        self._waiting = waiting
        self._counts = deque([self._count()], maxlen=_SMOOTHED + 1)
        self._samples: deque[HistorySample] = deque(maxlen=_MAX_SAMPLES)

    async def run(self) -> None:
        """Sample from time to time, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Add a sample, unless the latest one is recent."""
        if self._metrics.clock.now_s() - self._counts[-1].at_s < _INTERVAL_S / 2:
            return
        now = self._count()
        self._counts.append(now)
        self._samples.append(self._sample())

    def after(self, at_s: float) -> list[HistorySample]:
        """Return the samples of later times."""
        return [each for each in self._samples if each.at_s > at_s]

    def _count(self) -> _Counts:
        metrics = self._metrics
        return _Counts(
            metrics.clock.now_s(),
            metrics.num_generation_tokens,
            metrics.num_prompt_tokens,
            metrics.num_finished.total(),
            metrics.ttft.copy(),
            metrics.inter_token.copy(),
            metrics.ttft.take_highest(),
            metrics.inter_token.take_highest(),
        )

    def _sample(self) -> HistorySample:
        before, *later = self._counts
        now = later[-1]
        seconds = now.at_s - before.at_s
        ttft, itl = now.ttft.since(before.ttft), now.itl.since(before.itl)
        return HistorySample(
            at_s=round(now.at_s, 3),
            tokens_per_s=round((now.num_tokens - before.num_tokens) / seconds, 2),
            prompt_tokens_per_s=round((now.num_prompt_tokens - before.num_prompt_tokens) / seconds, 2),
            requests_per_s=round((now.num_finished - before.num_finished) / seconds, 3),
            ttft_s=ttft.mean(),
            ttft_p95_s=_high(ttft, max(each.highest_ttft_s for each in later)),
            itl_s=itl.mean(),
            itl_p95_s=_high(itl, max(each.highest_itl_s for each in later)),
            waiting=self._waiting.num_requests,
            running=self._metrics.num_generating,
        )


def _high(times: Histogram, highest_s: float) -> float | None:
    quantile_s = times.quantile(_HIGH)
    return None if quantile_s is None else min(quantile_s, highest_s)
