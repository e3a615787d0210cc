"""What became of a simulated workload: each request, and all of them in a few figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loraplex.core.request import FinishReason
from loraplex.scheduling.plan import TokenUpdate
from loraplex.workload.jsonl import WorkloadRequest

Floats = npt.NDArray[np.float64]

STARVED_BELOW: Final = 0.9
"""Of what is asked for: a run that serves less is starved."""


@dataclass(slots=True)
class RequestOutcome:
    """Seconds on the run's clock; None: that did not happen."""

    request: WorkloadRequest
    first_token_s: float | None = None
    finish_s: float | None = None
    failed: bool = False


class Recorder:
    """Takes notes while a workload runs."""

    def __init__(self) -> None:
        self.requests: list[RequestOutcome] = []
        self._open: dict[str, RequestOutcome] = {}
        self._gaps: list[tuple[float, int]] = []
        self._last_s = 0.0
        self.num_steps = 0
        self.running_s = 0.0
        self.waiting_s = 0.0

    def arrived(self, request_id: str, request: WorkloadRequest) -> RequestOutcome:
        outcome = self._open[request_id] = RequestOutcome(request)
        self.requests.append(outcome)
        if self._last_s == 0.0:
            self._last_s = request.arrival_s
        return outcome

    def updated(self, updates: Iterable[TokenUpdate], now_s: float) -> None:
        """Each of these requests has a token more, or has ended, or both."""
        for update in updates:
            outcome, reason = self._open[update.request_id], update.finish_reason
            if reason is not None:
                del self._open[update.request_id]
                outcome.finish_s = now_s
                outcome.failed = reason is FinishReason.ERROR
            if outcome.first_token_s is None and not outcome.failed:
                outcome.first_token_s = now_s

    def stepped(
        self, now_s: float, *, num_running: int, num_waiting: int, num_tokens: int, num_steps: int = 1
    ) -> None:
        """So many steps, all of them alike, that ended now; `num_tokens`: of all."""
        passed_s, self._last_s = now_s - self._last_s, now_s
        self._gaps.append((passed_s / num_steps, num_tokens))
        self.num_steps += num_steps
        self.running_s += passed_s * num_running
        self.waiting_s += passed_s * num_waiting

    def outcome(self, end_s: float) -> Outcome:
        return Outcome(
            requests=self.requests,
            duration_s=end_s,
            num_steps=self.num_steps,
            mean_running=self.running_s / end_s if end_s else 0.0,
            mean_waiting=self.waiting_s / end_s if end_s else 0.0,
            gaps=self._gaps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`gaps`: (seconds between steps, tokens that came with the later one)."""

    requests: Sequence[RequestOutcome]
    duration_s: float
    num_steps: int
    mean_running: float
    mean_waiting: float
    gaps: Sequence[tuple[float, int]]

    def timeline(self, num_points: int = 200) -> dict[str, list[float]]:
        """Requests that run and that wait, at as many moments."""
        arrivals_s = np.sort(_seconds(each.request.arrival_s for each in self.requests))
        firsts_s = np.sort(_seconds(s for each in self.requests if (s := each.first_token_s) is not None))
        ends_s = np.sort(_seconds(s for each in self.requests if (s := each.finish_s) is not None))
        at_s = np.linspace(0.0, self.duration_s, num_points)
        came, began, ended = (
            np.searchsorted(times, at_s, "right") for times in (arrivals_s, firsts_s, ends_s)
        )
        return {
            "at_s": at_s.tolist(),
            "running": (began - ended).tolist(),
            "waiting": (came - began).tolist(),
        }

    def summary(self) -> dict[str, Any]:
        """Seconds, and tokens per second. Latencies are of requests that were served."""
        served = [each for each in self.requests if each.finish_s is not None and not each.failed]
        arrivals_s = _seconds(each.request.arrival_s for each in served)
        first_s = _seconds(each.first_token_s for each in served)
        finish_s = _seconds(each.finish_s for each in served)
        outputs = np.array([each.request.output_tokens for each in served], np.float64)
        num_input = sum(each.request.prompt_tokens for each in served)
        offered_s = max((each.request.arrival_s for each in self.requests), default=0.0)
        offered = sum(each.request.prompt_tokens + each.request.output_tokens for each in self.requests)
        num_gaps = float((outputs - 1).sum())
        served_tok_s = (num_input + float(outputs.sum())) / self.duration_s if self.duration_s else 0.0
        offered_tok_s = offered / max(offered_s, 1e-9) if offered_s else served_tok_s
        return {
            "duration_s": self.duration_s,
            "num_requests": len(self.requests),
            "num_served": len(served),
            "num_failed": sum(each.failed for each in self.requests),
            "num_steps": self.num_steps,
            "input_tok_s": num_input / self.duration_s if self.duration_s else 0.0,
            "output_tok_s": float(outputs.sum()) / self.duration_s if self.duration_s else 0.0,
            "offered_tok_s": offered_tok_s,
            "starved": served_tok_s < STARVED_BELOW * offered_tok_s,
            "itl_mean_s": float((finish_s - first_s).sum()) / num_gaps if num_gaps else None,
            "ttft_s": _percentiles(first_s - arrivals_s),
            "tpt_s": _percentiles((finish_s - arrivals_s) / outputs),
            "e2e_s": _percentiles(finish_s - arrivals_s),
            "itl_s": _weighted_percentiles(self.gaps),
            "mean_running": self.mean_running,
            "mean_waiting": self.mean_waiting,
        }


def _seconds(values: Any) -> Floats:
    return np.array(list(values), np.float64)


def _percentiles(samples: Floats) -> dict[str, float] | None:
    if len(samples) == 0:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(samples, (50, 95, 99)))
    return {"mean": float(samples.mean()), "p50": p50, "p95": p95, "p99": p99}


def _weighted_percentiles(gaps: Sequence[tuple[float, int]]) -> dict[str, float] | None:
    """Steps as long as their tokens are many."""
    total = sum(weight for _, weight in gaps)
    if total == 0:
        return None
    seconds = np.array([gap for gap, _ in gaps])
    weights = np.array([weight for _, weight in gaps], np.float64)
    order = np.argsort(seconds)
    reached = np.cumsum(weights[order]) / total
    names = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: float(seconds[order][np.searchsorted(reached, share)]) for name, share in names.items()}
