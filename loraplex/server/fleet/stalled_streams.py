"""Streams that stall on a server which says that it is well.

A server may answer `/health` while the engine behind it hangs. From outside that looks like a long prompt, a
long queue, or a request that was preempted, so a stream may be silent for a while:

    its first token   `silence_s` and the time that the longest prompt in flight may take, from the last sign
                      that the server computes anything: a token of any stream, a change in its metrics
    any other         the same from the token before it, whatever else the server does

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


@dataclass(slots=True)
class StreamWait:
    """A request on a server. `waits_since_s`: when it began to wait for what comes next, None while it does
    not: its adapter is being loaded, or the client has not taken what was there."""

    num_prompt_tokens: int
    has_tokens: bool = False
    waits_since_s: float | None = None


class StalledStreams:
    """Decides which requests on one server have stalled."""

    def __init__(self, clock: Clock, silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._progress_s = clock.now_s()
        self._figures: tuple[int, ...] = ()

    def progressed(self) -> None:
        """The server has sent a token."""
        self._progress_s = self._clock.now_s()

    def saw(self, stats: EngineStats) -> None:
        """Take over what the server's metrics say. Requests that wait do not count: clients send them."""
        figures = (
            stats.num_steps,
            stats.num_running,
            stats.num_kv_blocks_used,
            stats.prefix_cache_queries,
            stats.num_preemptions,
        )
        if figures != self._figures:
            self._figures = figures
            self.progressed()

    def among(self, waits: Mapping[str, StreamWait]) -> list[str]:
        """Return the ids of those requests that have stalled."""
        if not waits:
            return []
        longest = max(wait.num_prompt_tokens for wait in waits.values())
        limit_s = self._silence_s + longest / _PREFILL_TOKENS_PER_S
        now_s = self._clock.now_s()

        def is_stalled(wait: StreamWait) -> bool:
            if wait.waits_since_s is None:
                return False
            begun_s = wait.waits_since_s if wait.has_tokens else max(wait.waits_since_s, self._progress_s)
            return now_s - begun_s > limit_s

        return [request_id for request_id, wait in waits.items() if is_stalled(wait)]
