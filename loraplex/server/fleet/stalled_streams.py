"""Streams that stall on a server which says that it is well.

A server may answer `/health` while the engine behind it hangs. From outside that looks like a long prompt, a
long queue, or a request that was preempted, so a stream may be silent for a while. The server computes if it
has shown so lately, within `silence_s` and the time that the longest request in flight may take to be read:
by a token of any stream, or a change in its metrics.

    the stream waits for    on a server that computes            on another one
    its first token         without a limit: it is queued        as long as a server may show nothing
    any other               ten times `silence_s`, and the       the same
                            longest request

What is then done about it is for the fleet to decide, which knows whether another replica can go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.stats import EngineStats

_PREFILL_TOKENS_PER_S: Final = 100.0
"""What a slow server reads of a prompt: one on a CPU, with others to serve."""
_PREEMPTED: Final = 10.0
"""So much longer a stream that has tokens may be silent while the server computes others: it was preempted,
and would be read once more elsewhere, where there may be no more room."""


@dataclass(slots=True)
class StreamWait:
    """A request on a server. `num_tokens`: what the server was sent, with the answer so far.
    `waits_since_s`: when it began to wait for what comes next, None while it does not: its adapter is being
    loaded, or the client has not taken what was there."""

    num_tokens: int
    has_tokens: bool = False
    waits_since_s: float | None = None


class StalledStreams:
    """Decides which requests on one server have stalled. `progress_s`: when it showed last that it
    computes."""

    def __init__(self, clock: Clock, silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self.progress_s = clock.now_s()
        self._figures: tuple[int, ...] | None = None

    def progressed(self) -> None:
        """Record a sign that the server computes."""
        self.progress_s = self._clock.now_s()

    def saw(self, stats: EngineStats) -> None:
        """Take over what the server's metrics say. Requests that wait do not count: clients send them. Nor
        does what they say first, as nothing is known to have changed."""
        figures = (
            stats.num_steps,
            stats.num_running,
            stats.num_kv_blocks_used,
            stats.prefix_cache_queries,
            stats.num_preemptions,
        )
        if self._figures not in (None, figures):
            self.progressed()
        self._figures = figures

    def computes(self, waits: Mapping[str, StreamWait]) -> bool:
        """Tell whether the server has shown lately that it computes; `waits`: the requests on it."""
        return self._clock.now_s() - self.progress_s <= self._silence_s + _longest_s(waits)

    def among(self, waits: Mapping[str, StreamWait]) -> list[str]:
        """Return the ids of those requests that have stalled."""
        computes, now_s = self.computes(waits), self._clock.now_s()
        limit_s = self._silence_s * (_PREEMPTED if computes else 1.0) + _longest_s(waits)

        def is_stalled(wait: StreamWait) -> bool:
            if wait.waits_since_s is None or (computes and not wait.has_tokens):
                return False
            return now_s - wait.waits_since_s > limit_s

        return [request_id for request_id, wait in waits.items() if is_stalled(wait)]


def _longest_s(waits: Mapping[str, StreamWait]) -> float:
    return max((wait.num_tokens for wait in waits.values()), default=0) / _PREFILL_TOKENS_PER_S
