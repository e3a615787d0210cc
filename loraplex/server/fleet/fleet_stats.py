"""Figures of several replicas as those of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loraplex.core.stats import AdapterStats, EngineStats

_TIERS: Final = ("disk", "host", "loading", "device")
"""Where an adapter may be, the nearest to its use last."""


def sum_of(each: Sequence[EngineStats]) -> EngineStats:
    """Return the sums over all replicas; an adapter is where it is nearest to its use."""
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
        num_bytes=one.num_bytes + other.num_bytes,
        in_flight=one.in_flight + other.in_flight,
        loads=one.loads + other.loads,
    )
