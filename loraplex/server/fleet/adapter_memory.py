"""Report replicas whose placed adapters exceed their memory: these are served, but slowly."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from loraplex.core.stats import EngineStats
from loraplex.core.words import plural
from loraplex.server.fleet.live_routing import LiveRouting

logger = logging.getLogger(__name__)


class AdapterMemory:
    """The memory for adapters that replicas last reported. Servers elsewhere do not report the size of
    adapters, so nothing is said about them."""

    def __init__(self) -> None:
        self._reported: dict[int, EngineStats] = {}  # of those whose memory does not hold all adapters
        self._logged: set[int] = set()

    def saw(self, number: int, stats: EngineStats) -> None:
        """Record what a replica reports."""
        if 0 < _memory_bytes(stats) < sum(adapter.num_bytes for adapter in stats.adapters):
            self._reported[number] = stats
        else:
            self._reported.pop(number, None)

    def shortages(self, placed: Sequence[Collection[str]], *, is_everywhere: bool) -> Mapping[int, str]:
        """Return in words, for each replica whose placed versions exceed its memory, by how much they do and
        what to do. `is_everywhere`: each replica is placed with all versions."""
        found = {}
        for number, stats in self._reported.items():
            sizes = {adapter.version: adapter.num_bytes for adapter in stats.adapters}
            needed, there = sum(sizes.get(version, 0) for version in placed[number]), _memory_bytes(stats)
            if needed > there:
                found[number] = _in_words(needed, there, is_everywhere=is_everywhere)
        return found

    def log(self, routing: LiveRouting) -> None:
        """Log replicas that are short of memory and were not when this was last called."""
        if not self._reported:
            self._logged.clear()
            return
        short = self.shortages(routing.placed(), is_everywhere=routing.is_everywhere)
        if new := [number for number in short if number not in self._logged]:
            others = len(new) - 1
            also = f" (and {others} {plural('other', others)} like it)" if others else ""
            logger.warning("replica %d%s: %s", new[0], also, short[new[0]])
        self._logged = set(short)

    def forget(self, number: int) -> None:
        """Forget a replica that has left."""
        self._reported.pop(number, None)


def _memory_bytes(stats: EngineStats) -> int:
    """Return the largest memory that adapters may take, 0 if it is unknown. An adapter on the device also has
    a copy in host memory, if there is room."""
    return max(stats.host_adapter_budget_bytes, stats.device_arena_bytes)


def _in_words(needed: int, there: int, *, is_everywhere: bool) -> str:
    fewer = "place fewer on each replica (--placement auto)" if is_everywhere else "have more replicas"
    return (
        f"the adapters placed on it take {needed:,} bytes, {needed - there:,} more than its memory for "
        "adapters holds; they are served, but those that are not in memory have to be read first: raise "
        f"--host-adapter-memory, or {fewer}"
    )
