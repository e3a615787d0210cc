"""Detect streams that stall on a server which reports that it is healthy.

A server may answer `/health` while the engine behind it hangs, or while its answers are delayed on their way.
From outside that looks like a long prompt, a long queue, or a preempted request, so a stream may be silent
for a while. The server counts as computing if it has shown so recently, within `silence_s` plus the time that
the prefill of the longest request in flight may take: by a token of any stream, or by a change in its metrics
while it has more requests than were sent from here. If it has no others, it computes ours, and their tokens
would have arrived.

    the stream waits for    on a server that computes                          on another one
    its first token         ten times `silence_s`, and the longest request,    `silence_s` and the
                            since any stream had a token: it is queued         longest request
    any other               the same, since its own last token                 the same

The fleet decides what to do about it, because it knows whether another replica can continue the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.stats import EngineStats

_PREFILL_TOKENS_PER_S: Final = 100.0
"""Prefill rate in tokens/s of a slow server: one on a CPU, with others to serve."""
_BEHIND_OTHERS: Final = 10.0
"""Factor on the allowed silence of a stream while the server computes others: it is queued or was preempted,
and would be prefilled again elsewhere, where there may be no more room."""


@dataclass(slots=True)
class StreamWait:
    """A request on a server. `num_tokens`: tokens sent to the server, including the output so far.
    `waits_since_s`: since when it waits for its next output; None while it does not, because its adapter is
    being loaded or the client has not taken the last output."""

    num_tokens: int
    has_tokens: bool = False
    waits_since_s: float | None = None


class StalledStreams:
    """Decides which requests on one server have stalled."""

    def __init__(self, clock: Clock, silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._arrived_s = self._computed_s = clock.now_s()
        self._figures: tuple[int, ...] | None = None

    def arrived(self) -> None:
        """Record that a token came from the server."""
        self._arrived_s = self._computed_s = self._clock.now_s()

    @property
    def tokens_come(self) -> bool:
        """Return whether a token of any stream came recently."""
        return self._clock.now_s() - self._arrived_s <= self._silence_s

    def saw(self, stats: EngineStats, *, num_ours: int) -> None:
        """Record the server's metrics; it has `num_ours` requests from here. Waiting requests do not show
        that it computes, because clients send them. Neither does the first report, because there is none to
        compare it with."""
        figures = (
            stats.num_steps,
            stats.num_running,
            stats.num_kv_blocks_used,
            stats.prefix_cache_queries,
            stats.num_preemptions,
        )
        has_others = stats.num_running + stats.num_waiting > num_ours
        if self._figures not in (None, figures) and has_others:
            self._computed_s = self._clock.now_s()
        self._figures = figures

    def computes(self, waits: Mapping[str, StreamWait]) -> bool:
        """Return whether the server has shown recently that it computes; `waits`: the requests on it."""
        return self._clock.now_s() - self._computed_s <= self._silence_s + _longest_s(waits)

    def among(self, waits: Mapping[str, StreamWait]) -> list[str]:
        """Return the ids of the requests that have stalled."""
        computes, now_s = self.computes(waits), self._clock.now_s()
        limit_s = self._silence_s * (_BEHIND_OTHERS if computes else 1.0) + _longest_s(waits)

        def is_stalled(wait: StreamWait) -> bool:
            if (since_s := wait.waits_since_s) is None:
                return False
            if computes and not wait.has_tokens:
                since_s = max(since_s, self._arrived_s)
            return now_s - since_s > limit_s

        return [request_id for request_id, wait in waits.items() if is_stalled(wait)]


def _longest_s(waits: Mapping[str, StreamWait]) -> float:
    return max((wait.num_tokens for wait in waits.values()), default=0) / _PREFILL_TOKENS_PER_S
