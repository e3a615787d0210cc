"""The directory of the fleet's shared adapter pool: which replicas' host memory holds which adapter.

Every adapter always has a complete copy somewhere. A replica that serves an adapter without having it copies
it from one that does, once, however many requests wait for it. A replica that the plan no longer names for an
adapter drops its copy, but only after a replica that the plan names has a complete one, and not while it is
being copied from. A full host evicts the least recently used copies to make room for another one.

Only simulated fleets have such a pool, some host of which must always hold each adapter. What an engine
evicts from its own memory, live or simulated, is decided by `scheduling.victims`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


class Drop(NamedTuple):
    """A decision: the replica drops its copy of the adapter."""

    replica: int
    adapter: int


class Fetch(NamedTuple):
    """A decision: the adapter is copied from this replica, after other copies are dropped to make room."""

    source: int
    drops: list[Drop]


class AdapterPool:
    """The directory of copies, and the decisions about them.

    `num_bytes_held`: bytes by replica, without adapters being copied to it. `most_bytes_held`: the most bytes
    that the host of one replica held at any time, including adapters being copied to it.

    A copy is used when a request for it is sent to its replica and when it was copied from there. A copy is
    never evicted to make room if it is the last one of its adapter, is named by the plan, is in use or is
    being copied from. If there are no others, a fetch takes more memory than there is: requests wait for it,
    and the next fetch makes room again. A copy also stays if the only other one would then be a last copy too
    many for its host: last copies never take more than there is, unless a plan places them so.
    """

    def __init__(
        self,
        adapters: AdapterSizes,
        num_replicas: int,
        plan: Plan | None = None,
        host_bytes: int | None = None,
    ) -> None:
        """Start with each adapter where the plan places it; without a plan each has one home, round robin as
        far as the hosts have room.

        `host_bytes`: bytes for adapters in each replica's host memory; None for no limit. Raises UserError if
        there is no plan and the adapters do not fit.
        """
        self._bytes: list[int] = adapters.num_bytes.tolist()
        self._host_bytes = host_bytes
        self._plan = plan
        self._holders: list[set[int]] = [set() for _ in self._bytes]
        # By replica: its copies that are not the last ones of their adapters, least recently used first.
        self._spares: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._fetches: dict[tuple[int, int], int] = {}  # (adapter, replica): source
        self._readers: Counter[tuple[int, int]] = Counter()  # (adapter, replica): num fetches from there
        self.num_bytes_held = [0] * num_replicas
        self._num_bytes_in_flight = [0] * num_replicas
        self._num_last_bytes = [0] * num_replicas  # of last copies
        first = _homes_in_turn(adapters, num_replicas, host_bytes) if plan is None else plan
        for adapter in range(len(self._bytes)):
            for replica in first.replicas[adapter]:
                self._add(replica, adapter)
        self.most_bytes_held = max(self.num_bytes_held)

    def holders(self, adapter: int) -> frozenset[int]:
        """Return the replicas with a complete copy."""
        return frozenset(self._holders[adapter])

    def has(self, replica: int, adapter: int) -> bool:
        return replica in self._holders[adapter]

    def is_fetching(self, replica: int, adapter: int) -> bool:
        return (adapter, replica) in self._fetches

    def used(self, replica: int, adapter: int) -> None:
        """Record that a replica was sent a request for an adapter."""
        if adapter in self._spares[replica]:
            self._spares[replica].move_to_end(adapter)

    def fetch(
        self,
        replica: int,
        adapter: int,
        free_at_s: Callable[[int], float],
        in_use: Callable[[int, int], bool],
    ) -> Fetch:
        """Begin to fetch an adapter that the replica does not hold and is not fetching. It is copied from the
        holder that can send soonest (`free_at_s`, infinite for one that cannot). `in_use`: returns whether a
        replica has requests for an adapter."""
        assert not self.has(replica, adapter)
        assert not self.is_fetching(replica, adapter)
        source = min(sorted(self._holders[adapter]), key=free_at_s)
        self._fetches[adapter, replica] = source
        self._readers[adapter, source] += 1
        self._num_bytes_in_flight[replica] += self._bytes[adapter]
        drops = self._make_room(replica, in_use)
        taken = self.num_bytes_held[replica] + self._num_bytes_in_flight[replica]
        self.most_bytes_held = max(self.most_bytes_held, taken)
        return Fetch(source, drops)

    def _make_room(self, replica: int, in_use: Callable[[int, int], bool]) -> list[Drop]:
        if self._host_bytes is None:
            return []
        too_many = self.num_bytes_held[replica] + self._num_bytes_in_flight[replica] - self._host_bytes
        drops: list[Drop] = []
        for adapter in list(self._spares[replica]) if too_many > 0 else ():
            if self._stays(replica, adapter, self._host_bytes) or in_use(replica, adapter):
                continue
            drops.append(self._drop(replica, adapter))
            too_many -= self._bytes[adapter]
            if too_many <= 0:
                break
        return drops

    def _stays(self, replica: int, adapter: int, host_bytes: int) -> bool:
        if (adapter, replica) in self._readers:
            return True
        if self._plan is not None and replica in self._plan.replicas[adapter]:
            return True
        if len(self._holders[adapter]) > 2:
            return False
        (other,) = self._holders[adapter] - {replica}
        return self._num_last_bytes[other] + self._bytes[adapter] > host_bytes

    def fetched(self, replica: int, adapter: int) -> list[Drop]:
        """Record that a fetch is complete; return the copies that are dropped now."""
        source = self._fetches.pop((adapter, replica))
        self._readers[adapter, source] -= 1
        if not self._readers[adapter, source]:
            del self._readers[adapter, source]
        self._num_bytes_in_flight[replica] -= self._bytes[adapter]
        self._add(replica, adapter)
        if adapter in self._spares[source]:
            self._spares[source].move_to_end(adapter)
        return self._let_go(adapter)

    def placed(self, plan: Plan | None) -> list[Drop]:
        """Adopt a new plan; return the copies that are dropped now. Others follow after fetches."""
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
        return [self._drop(replica, adapter) for replica in leaving]

    def _add(self, replica: int, adapter: int) -> None:
        holders = self._holders[adapter]
        if len(holders) == 1:
            (other,) = holders
            self._spares[other][adapter] = None
            self._num_last_bytes[other] -= self._bytes[adapter]
        if holders:
            self._spares[replica][adapter] = None
        else:
            self._num_last_bytes[replica] += self._bytes[adapter]
        holders.add(replica)
        self.num_bytes_held[replica] += self._bytes[adapter]

    def _drop(self, replica: int, adapter: int) -> Drop:
        holders = self._holders[adapter]
        holders.remove(replica)
        del self._spares[replica][adapter]
        if len(holders) == 1:
            (last,) = holders
            del self._spares[last][adapter]
            self._num_last_bytes[last] += self._bytes[adapter]
        self.num_bytes_held[replica] -= self._bytes[adapter]
        return Drop(replica, adapter)

    def check_integrity(self) -> None:
        """Assert that every adapter has a copy, and that the sums are right."""
        held, in_flight, last = ([0] * len(self.num_bytes_held) for _ in range(3))
        for adapter, replicas in enumerate(self._holders):
            assert replicas, f"adapter {adapter} has no complete copy"
            for replica in replicas:
                held[replica] += self._bytes[adapter]
                last[replica] += self._bytes[adapter] if len(replicas) == 1 else 0
                assert (adapter in self._spares[replica]) == (len(replicas) > 1)
        for adapter, replica in self._fetches:
            in_flight[replica] += self._bytes[adapter]
        assert (held, in_flight) == (self.num_bytes_held, self._num_bytes_in_flight)
        assert last == self._num_last_bytes
        assert sum(map(len, self._spares)) == sum(len(each) for each in self._holders if len(each) > 1)
        for (adapter, replica), source in self._fetches.items():
            assert source in self._holders[adapter], "the source of a copy was let go"
            assert replica not in self._holders[adapter]
        assert self._readers == Counter((adapter, source) for (adapter, _), source in self._fetches.items())


def _homes_in_turn(adapters: AdapterSizes, num_replicas: int, host_bytes: int | None) -> Plan:
    problem = PlacementProblem(
        adapters=adapters, num_replicas=num_replicas, demand=np.ones(len(adapters)), host_bytes=host_bytes
    )
    return within_host_memory(Plan.of_homes(np.arange(len(adapters)) % num_replicas), problem)
