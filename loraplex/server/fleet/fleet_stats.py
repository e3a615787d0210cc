"""Combine the figures of several replicas into those of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from loraplex.core.stats import AdapterStats, EngineStats

_TIERS: Final = ("disk", "host", "loading", "device")
"""Tiers of an adapter, the fastest last."""

_COUNTERS: Final = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_steps", "adapter_file_reads"),
    *("adapter_fetches", "adapter_bytes_fetched", "adapter_fetch_failures", "num_switches", "num_merges"),
    *("num_merged_steps", "num_pauses", "num_step_adapters"),
    *("kv_blocks_swapped_out", "kv_blocks_swapped_in", "host_kv_hits"),
)
"""The figures of an engine that only grow, until it restarts."""


class NewCounts(NamedTuple):
    """The increments of a report over the previous one."""

    adapter_loads: int
    adapter_fetches: int


class LastingCounters:
    """Sums of engines' counters that outlive the engines: a restarted engine counts from zero, and the counts
    of one that leaves would be lost."""

    def __init__(self) -> None:
        self._reported: dict[int, dict[str, int]] = {}  # by engine and counter, or version for its loads
        self._totals: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()

    def saw(self, number: int, stats: EngineStats) -> NewCounts:
        """Add what this engine, or its predecessor under this number, has not reported yet. Reports must be
        passed in the order they were made. Loads are counted only for known versions.

        An engine that is temporarily away reports zeros, which are ignored.
        """
        reported = self._reported.setdefault(number, {})
        for name in _COUNTERS:
            self._totals[name] += (added := _added(reported, name, getattr(stats, name)))
            if name == "adapter_fetches":
                num_fetches = added
        num_loads = 0
        for adapter in stats.adapters:
            if adapter.loads != reported.get(adapter.version, 0) and adapter.version in self._loads:
                self._loads[adapter.version] += (added := _added(reported, adapter.version, adapter.loads))
                num_loads += added
        return NewCounts(num_loads, num_fetches)

    def lasting(self, stats: EngineStats) -> EngineStats:
        """Return figures with their counters replaced by the sums."""
        return replace(
            stats,
            **{name: self._totals[name] for name in _COUNTERS},
            adapters=tuple(
                each if each.loads == (loads := self._loads[each.version]) else replace(each, loads=loads)
                for each in stats.adapters
            ),
        )

    def know(self, version: str) -> None:
        """Count the loads of a version from now on."""
        self._loads.setdefault(version, 0)

    def forget(self, version: str) -> None:
        """Stop counting a version. An engine may still report it for a moment."""
        self._loads.pop(version, None)
        for reported in self._reported.values():
            reported.pop(version, None)


def _added(reported: dict[str, int], name: str, count: int) -> int:
    before = reported.get(name, 0)
    if count:
        reported[name] = count
    return count - before if count >= before else count


def sum_of(each: Sequence[EngineStats]) -> EngineStats:
    """Return the sums over all replicas; the tier of an adapter is the fastest that any has it in."""
    adapters: dict[str, AdapterStats] = {}
    for stats in each:
        for adapter in stats.adapters:
            adapters[adapter.version] = _merged(adapters.get(adapter.version), adapter)
    numbers = [field for field in EngineStats.__dataclass_fields__ if field != "adapters"]
    return EngineStats(
        **{name: sum(getattr(stats, name) for stats in each) for name in numbers},
        adapters=tuple(adapters.values()),
    )


def _merged(one: AdapterStats | None, other: AdapterStats) -> AdapterStats:
    if one is None:
        return other
    return AdapterStats(
        version=one.version,
        tier=max(one.tier, other.tier, key=_TIERS.index),
        num_bytes=_bytes_of_both(one, other),
        in_flight=one.in_flight + other.in_flight,
        loads=one.loads + other.loads,
    )


def _bytes_of_both(one: AdapterStats, other: AdapterStats) -> int:
    """Return the memory that both take; if neither has it in memory, what one would take."""
    held = [each.num_bytes for each in (one, other) if each.tier != "disk"]
    return sum(held) if held else max(one.num_bytes, other.num_bytes)
