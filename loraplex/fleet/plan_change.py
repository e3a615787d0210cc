"""Change from one plan to the next while a fleet serves: an adapter moves when its new replicas have it.

    the plan in effect ──decide──▶ replicas that lack an adapter are asked for it ──all have answered──▶ moved
          ▲ requests follow it meanwhile                                      └─ none has it: stays ─┘

So an adapter's old replicas serve it until the new ones can. If none of the old ones serves any more, there
is nothing to wait for: the new ones take effect at once, and load it when a request needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from loraplex.fleet.plan import Entry, Plan


class Stage(NamedTuple):
    """A replica that should have an adapter in its host memory."""

    replica: int
    adapter: int


@dataclass(kw_only=True, slots=True)
class Pending:
    """The new entry of an adapter, not in effect yet. `waiting`: replicas that have not reported whether they
    have it; `failed`: those that could not load it."""

    entry: Entry
    waiting: set[int]
    failed: set[int] = field(default_factory=set)


class PlanChange:
    """Puts plans into effect."""

    def __init__(self, has: Callable[[int, int], bool]) -> None:
        """`has`: returns whether a replica has an adapter in its memory."""
        self._has = has
        self._pending: dict[int, Pending] = {}

    @property
    def pending(self) -> Mapping[int, Pending]:
        """The adapters that wait for their new replicas, with their new entries."""
        return self._pending

    def restore(self, pending: Mapping[int, Pending]) -> None:
        """Continue from another change's state."""
        self._pending = dict(pending)

    def begin(self, current: Plan, target: Plan, serving: Set[int]) -> tuple[Plan, list[Stage]]:
        """Return the plan in effect now, on the way to `target`, and the loads that the rest of it needs.
        Replicas that were asked already are not asked again. `serving`: replicas that take requests."""
        stages: list[Stage] = []
        entries = current.entries()
        before, self._pending = self._pending, {}
        for adapter, entry in enumerate(target.entries()):
            now = entries[adapter]
            if entry == now:
                continue
            waiting = {
                replica
                for replica in entry.replicas
                if replica not in now.replicas and not self._has(replica, adapter)
            }
            is_served = not serving.isdisjoint(now.replicas)
            if waiting and is_served:
                self._pending[adapter] = Pending(entry=entry, waiting=waiting)
            else:
                entries[adapter] = entry
            asked: Iterable[int] = before[adapter].waiting if adapter in before else ()
            stages += [Stage(replica, adapter) for replica in sorted(waiting.difference(asked))]
        return _unless_same(current, entries), stages

    def staged(self, current: Plan, stage: Stage, *, is_there: bool) -> Plan:
        """Return the plan in effect after a replica has loaded an adapter, or could not."""
        pending = self._pending.get(stage.adapter)
        if pending is None or stage.replica not in pending.waiting:
            return current
        pending.waiting.remove(stage.replica)
        if not is_there:
            pending.failed.add(stage.replica)
        if pending.waiting:
            return current
        del self._pending[stage.adapter]
        found = pending.entry.limited_to(set(pending.entry.replicas) - pending.failed)
        if found is None:
            return current
        return current.with_entry(stage.adapter, found)

    def forget(self, adapter: int) -> None:
        """Drop the pending entry of an adapter that was removed."""
        self._pending.pop(adapter, None)


def _unless_same(current: Plan, entries: list[Entry]) -> Plan:
    """Return the plan with these entries; the same object if it is equal, so that callers need not
    compare."""
    found = Plan.of_entries(entries)
    return current if found == current else found
