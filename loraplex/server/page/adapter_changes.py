"""Loads and evictions as a page shows them: the differences between what was seen last and what is there now.

Nothing is recorded where it happens: engines say how often they have loaded a version and where its weights
are, and looking once a second misses no load, as loads are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.stats import EngineStats
from loraplex.server.responses import AdapterChange, AdapterChangeKind
from loraplex.server.served_adapter import ServedAdapter

TIERS: Final = ("disk", "host", "loading", "device")
"""Tiers of an adapter, the fastest last."""
_MAX_CHANGES: Final = 500
_MIN_INTERVAL_S: Final = 1.0
_STALE_S: Final = 15.0
"""Seconds without a look after which it is no longer known when something happened."""

Holders = Callable[[str], Sequence[int]]
"""The replicas of a fleet that have a version in memory."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A look: versions by name, the tier and number of loads of each version, and the replicas that have it
    in memory, of a fleet."""

    at_s: float
    versions: Mapping[str, str]
    tiers: Mapping[str, tuple[str, int]]
    held: Mapping[str, frozenset[int]] | None


class AdapterChanges:
    """The latest changes, oldest first. A bounded number is kept. They may be read during a look, in another
    thread."""

    def __init__(self) -> None:
        self._changes: tuple[AdapterChange, ...] = ()
        self._seen: _Seen | None = None

    def after(self, at_s: float) -> list[AdapterChange]:
        """Return the changes of later times. No two looks have the same time."""
        return [each for each in self._changes if each.at_s > at_s]

    def is_due(self, now_s: float) -> bool:
        """Return whether the last look is long enough ago for another."""
        return self._seen is None or now_s - self._seen.at_s >= _MIN_INTERVAL_S

    def look(
        self, adapters: Sequence[ServedAdapter], stats: EngineStats, holders: Holders | None, now_s: float
    ) -> None:
        """Record what has changed since the last look, all of it as of now."""
        now_s = round(now_s, 3)
        if self._seen is not None:
            now_s = max(now_s, round(self._seen.at_s + 0.001, 3))
        tiers = {each.version: (each.tier, each.loads) for each in stats.adapters}
        held = None
        if holders is not None:
            held = {
                version: frozenset(holders(version)) for version, (tier, _) in tiers.items() if tier != "disk"
            }
        now = _Seen(now_s, {each.name: each.version for each in adapters}, tiers, held)
        before, self._seen = self._seen, now
        if before is None or now_s - before.at_s > _STALE_S:
            return
        changes = list(_names_changed(before, now))
        moved = dict(_moves(before, now))
        if moved:
            for name, version in now.versions.items():
                changes += [(name, *move) for move in moved.get(version, ())]
        new = [
            AdapterChange(at_s=now_s, name=name, kind=kind, tier=tier, replica=replica)
            for name, kind, tier, replica in changes
        ]
        self._changes = (*self._changes, *new)[-_MAX_CHANGES:]


_Move = tuple[AdapterChangeKind, str | None, int | None]  # kind, tier, replica


def _names_changed(
    before: _Seen, now: _Seen
) -> Iterator[tuple[str, AdapterChangeKind, str | None, int | None]]:
    for name, version in now.versions.items():
        was = before.versions.get(name)
        if was != version:
            yield name, "added" if was is None else "switched", None, None
    for name in before.versions.keys() - now.versions.keys():
        yield name, "removed", None, None


def _moves(before: _Seen, now: _Seen) -> Iterator[tuple[str, list[_Move]]]:
    """Yield the versions whose weights have moved, with their moves."""
    for version, place in now.tiers.items():
        was = before.tiers.get(version, ("disk", 0))
        if now.held is None or before.held is None:
            if place != was and (moves := _tier_moves(*was, *place)):
                yield version, moves
            continue
        held, held_before = now.held.get(version, frozenset()), before.held.get(version, frozenset())
        if held != held_before:
            loaded: list[_Move] = [("loaded", None, replica) for replica in sorted(held - held_before)]
            yield version, loaded + [("evicted", None, replica) for replica in sorted(held_before - held)]


def _tier_moves(was: str, loads_before: int, tier: str, loads: int) -> list[_Move]:
    """Return the moves of one version in a single engine."""
    is_higher = TIERS.index(tier) > TIERS.index(was)
    if tier == "loading":
        return []  # reported when it has arrived
    if was == "loading":
        return [("loaded", tier, None)] if loads > loads_before else []
    if loads > loads_before and not is_higher:  # evicted since, or before
        return (
            [("loaded", None, None)]
            if tier == was != "disk"
            else [("loaded", None, None), ("evicted", tier, None)]
        )
    if is_higher:
        return [("loaded", tier, None)]
    return [] if tier == was else [("evicted", tier, None)]
