"""Which replicas' host memory holds which adapter: the directory of the fleet's shared adapter pool.

Every adapter has a complete copy somewhere at every moment. A replica that serves an adapter without having
it fetches it from one that does, once, however many requests wait for it. A replica that the plan names no
longer for an adapter lets its copy go, but only after a replica that the plan names has a complete one, and
not while somebody is copying from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loraplex.fleet.arrays import IntArray
from loraplex.fleet.plan import Plan


class Drop(NamedTuple):
    """A decision: the replica lets its copy of the adapter go."""

    replica: int
    adapter: int


class AdapterPool:
    """`num_bytes_held`: by replica."""

    def __init__(self, num_bytes: IntArray, num_replicas: int, plan: Plan | None = None) -> None:
        """At first each adapter is where the plan has it; without a plan each has one home, in turn."""
        self._bytes: list[int] = num_bytes.tolist()
        self._plan = plan
        if plan is None:
            homes: Sequence[Sequence[int]] = [
                (adapter % num_replicas,) for adapter in range(len(self._bytes))
            ]
        else:
            homes = plan.replicas
        self._holders: list[set[int]] = [set(replicas) for replicas in homes]
        self._fetches: dict[tuple[int, int], int] = {}  # (adapter, replica): where from
        self._readers: Counter[tuple[int, int]] = Counter()  # (adapter, replica): fetches from there
        self.num_bytes_held = [0] * num_replicas
        for adapter, replicas in enumerate(self._holders):
            for replica in replicas:
                self.num_bytes_held[replica] += self._bytes[adapter]

    def holders(self, adapter: int) -> frozenset[int]:
        """The replicas with a complete copy."""
        return frozenset(self._holders[adapter])

    def has(self, replica: int, adapter: int) -> bool:
        return replica in self._holders[adapter]

    def is_fetching(self, replica: int, adapter: int) -> bool:
        return (adapter, replica) in self._fetches

    def fetch(self, replica: int, adapter: int, free_at_s: Callable[[int], float]) -> int:
        """Begin a fetch of an adapter that the replica does not hold and is not fetching; return the replica
        to copy it from, which is the holder that can send soonest (`free_at_s`)."""
        assert not self.has(replica, adapter)
        assert not self.is_fetching(replica, adapter)
        source = min(sorted(self._holders[adapter]), key=free_at_s)
        self._fetches[adapter, replica] = source
        self._readers[adapter, source] += 1
        return source

    def fetched(self, replica: int, adapter: int) -> list[Drop]:
        """Record that a fetch is complete; return the copies that are let go now."""
        source = self._fetches.pop((adapter, replica))
        self._readers[adapter, source] -= 1
        if not self._readers[adapter, source]:
            del self._readers[adapter, source]
        self._holders[adapter].add(replica)
        self.num_bytes_held[replica] += self._bytes[adapter]
        return self._let_go(adapter)

    def placed(self, plan: Plan | None) -> list[Drop]:
        """Take over a new plan; return the copies that are let go now. Others follow after fetches."""
        previous, self._plan = self._plan, plan
        if plan is None or plan is previous:
            return []
        before = () if previous is None else previous.replicas
        changed = (
            adapter
            for adapter, replicas in enumerate(plan.replicas)
            if adapter >= len(before) or replicas != before[adapter]
        )
        return [drop for adapter in changed for drop in self._let_go(adapter)]

    def _let_go(self, adapter: int) -> list[Drop]:
        if self._plan is None:
            return []
        named, holders = self._plan.replicas[adapter], self._holders[adapter]
        if holders.isdisjoint(named):
            return []
        leaving = [
            replica
            for replica in sorted(holders)
            if replica not in named and (adapter, replica) not in self._readers
        ]
        for replica in leaving:
            holders.discard(replica)
            self.num_bytes_held[replica] -= self._bytes[adapter]
        return [Drop(replica, adapter) for replica in leaving]

    def check_integrity(self) -> None:
        """Assert that nothing is lost, and that the sums are right."""
        held = [0] * len(self.num_bytes_held)
        for adapter, replicas in enumerate(self._holders):
            assert replicas, f"adapter {adapter} has no complete copy"
            for replica in replicas:
                held[replica] += self._bytes[adapter]
        assert held == self.num_bytes_held
        for (adapter, replica), source in self._fetches.items():
            assert source in self._holders[adapter], "the source of a copy was let go"
            assert replica not in self._holders[adapter]
        assert self._readers == Counter((adapter, source) for (adapter, _), source in self._fetches.items())
