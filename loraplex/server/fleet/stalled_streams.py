"""Streams that stall on a server which says that it is well.

A server may answer `/health` while the engine behind it hangs, or while its answers are held up on their way.
From outside that looks like a long prompt, a long queue, or a request that was preempted, so a stream may be
silent for a while. The server computes if it has shown so lately, within `silence_s` and the time that the
longest request in flight may take to be read: by a token of any stream, or by a change in its metrics while
it has more requests than were sent from here. Where it has no others, it computes ours, and their tokens
would be here.

    the stream waits for    on a server that computes                          on another one
    its first token         ten times `silence_s`, and the longest request,    `silence_s` and the
                            since any stream had a token: it is queued         longest request
    any other               the same, since its own last token                 the same

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
_BEHIND_OTHERS: Final = 10.0
"""So much longer a stream may be silent while the server computes others: it is queued or was preempted, and
would be read once more elsewhere, where there may be no more room."""


@dataclass(slots=True)
class StreamWait:
    """A request on a server. `num_tokens`: what the server was sent, with the answer so far.
    `waits_since_s`: when it began to wait for what comes next, None while it does not: its adapter is being
    loaded, or the client has not taken what was there."""

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
        """Tell whether a token came lately, of whichever stream."""
        return self._clock.now_s() - self._arrived_s <= self._silence_s

    def saw(self, stats: EngineStats, *, num_ours: int) -> None:
        """Take over what the server's metrics say, who has `num_ours` requests from here. Requests that wait
        do not show that it computes: clients send them. Nor does what it says first, as nothing is known to
        have changed."""
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
        """Tell whether the server has shown lately that it computes; `waits`: the requests on it."""
        return self._clock.now_s() - self._computed_s <= self._silence_s + _longest_s(waits)

    def among(self, waits: Mapping[str, StreamWait]) -> list[str]:
        """Return the ids of those requests that have stalled."""
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
