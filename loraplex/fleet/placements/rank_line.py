"""Our own placement: adapters in a line by rank, cut into pieces that keep all replicas equally busy.

With padded kernels, a replica is as slow as the largest rank that it serves. So adapters stand in a line, the
largest ranks first, and replica after replica takes the next piece of it: its largest rank is that of the
first adapter in the piece, and each piece holds the tokens that keep a replica of that rank busy for the same
share of its time. That share is as small as possible. An adapter at a cut is served on both sides of it, and
one that needs more than one replica has several to itself.

No piece takes much more than a sixth of all adapters' bytes, however low their demand, so that no host has to
hold nearly everything; this limit does not apply to fleets of two or three replicas.

Among adapters of one rank the line keeps the order of the previous plan: when demand drifts, cuts shift a
little, and only adapters between an old and a new cut move. The adapters with the highest demand get one more
copy, on a neighbouring replica, so that a burst has two places to go; but not in fleets of four or fewer
replicas, where two copies exceed the allowed storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.placements.utilisation import operating_point_of_each
from loraplex.fleet.plan import Plan
from loraplex.fleet.routers.rendezvous import pair_weights

_LEAST_DEMAND: Final = 1e-3
"""Smallest demand that an adapter counts for, relative to the mean: adapters without demand are spread
too."""
_SPARE_SHARE: Final = 0.1
"""Share of a replica's load from which on an adapter gets a spare copy."""
_STORAGE: Final = 0.25
"""Most copies in total, relative to all adapters on all replicas; one of each if that is more."""
_ON_ONE: Final = 0.175
"""Most bytes on one replica, relative to all adapters: a burst brings it others for a while."""
_OVER_EVEN: Final = 1.1
"""Most bytes on one replica relative to an even share, if there are few replicas."""
_FEW: Final = 4
"""Number of replicas below which one replica may hold any number of bytes."""
_SPARE_PART: Final = 0.1
"""Part of its demand expected at a spare copy, relative to the smallest part of its other replicas."""
_BISECTIONS: Final = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLinePlacement:
    """A placement along a line of ranks. `token_rates`: tokens/s of a replica, by rank. `padded`: kernels pad
    to the largest rank in a batch."""

    token_rates: Mapping[int, float]
    padded: bool

    def place(self, problem: PlacementProblem) -> Plan:
        adapters, num_replicas = problem.adapters, problem.num_replicas
        if not len(adapters):
            return Plan(replicas=(), shares=())
        points = operating_point_of_each(adapters, self.token_rates)
        demand = np.maximum(problem.demand, _LEAST_DEMAND * (problem.demand.mean() or 1.0))
        order = self._order(problem)
        sizes = adapters.num_bytes[order].astype(float)
        line = _Line(demand[order], points[order], sizes, num_replicas, padded=self.padded)
        weights = line.cut()
        spares = _spare_copies(line, weights)
        placed: list[dict[int, float]] = [{} for _ in range(len(adapters))]
        for place, adapter in enumerate(order.tolist()):
            placed[adapter] = weights[place] | spares.get(place, {})
        return within_host_memory(Plan.of_weights(placed), problem)

    def _order(self, problem: PlacementProblem) -> IntArray:
        """Return the adapters in the order of the line."""
        num_adapters = len(problem.adapters)
        mixed = pair_weights(0, np.arange(num_adapters))
        before = np.full(num_adapters, problem.num_replicas)
        if problem.previous is not None:
            homes = [replicas[0] for replicas in problem.previous.replicas]
            before[: len(homes)] = homes
        keys = [mixed, before]
        if self.padded:
            keys.append(-problem.adapters.ranks)
        return np.lexsort(keys)


class _Line:
    """Adapters in their order. `sizes`: bytes of each; `most_bytes`: limit for a replica's piece. `_ends`:
    tokens/s of all adapters up to and including each, `_byte_ends`: their bytes."""

    def __init__(
        self, demand: FloatArray, points: FloatArray, sizes: FloatArray, num_replicas: int, *, padded: bool
    ) -> None:
        self.num_replicas = num_replicas
        self.sizes = sizes
        self._byte_ends = np.cumsum(sizes)
        # With room for one adapter that is on both sides of a cut.
        share = max(_ON_ONE, _OVER_EVEN / num_replicas) if num_replicas >= _FEW else 1.0
        self.most_bytes = share * float(self._byte_ends[-1]) + float(sizes.max())
        # Without padding an adapter takes its own share of a replica, whichever others are there.
        self.amounts = demand if padded else demand / points
        self._sustained = points if padded else np.ones(len(points))
        self._ends = np.cumsum(self.amounts)
        self.used = self._least_used()

    def cut(self) -> list[dict[int, float]]:
        """Return the replicas of each adapter, with the part of its demand that each takes."""
        cuts = self._cuts(self.used)
        cuts[-1] = self._ends[-1]  # in spite of rounding
        starts = self._ends - self.amounts
        first = np.searchsorted(cuts, starts, side="right").clip(max=self.num_replicas - 1)
        last = np.searchsorted(cuts, self._ends, side="left").clip(max=self.num_replicas - 1)
        last = np.maximum(first, last)
        found: list[dict[int, float]] = []
        begins = [0.0, *cuts.tolist()]
        for start, end, low, high in zip(
            starts.tolist(), self._ends.tolist(), first.tolist(), last.tolist(), strict=True
        ):
            if low == high:
                found.append({low: 1.0})
                continue
            parts = {
                replica: min(end, begins[replica + 1]) - max(start, begins[replica])
                for replica in range(low, high + 1)
            }
            found.append({replica: part for replica, part in parts.items() if part > 0})
        return found

    def _least_used(self) -> float:
        """Return the smallest share of time that all replicas can be equally busy for."""
        low, high = 0.0, float(self._ends[-1] / self._sustained.min())
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self._cuts(middle)[-1] < self._ends[-1]:
                low = middle
            else:
                high = middle
        return high

    def _cuts(self, used: float) -> FloatArray:
        """Return where each replica's piece ends if each is busy for this share of its time."""
        cuts = np.empty(self.num_replicas)
        reached = 0.0
        for replica in range(self.num_replicas):
            place = min(int(np.searchsorted(self._ends, reached, side="right")), len(self._ends) - 1)
            before = self._byte_ends[place] - self.sizes[place]
            last = int(np.searchsorted(self._byte_ends, before + self.most_bytes, side="right")) - 1
            reached = min(reached + used * float(self._sustained[place]), float(self._ends[max(last, place)]))
            cuts[replica] = reached
        return cuts


def _spare_copies(line: _Line, weights: list[dict[int, float]]) -> dict[int, dict[int, float]]:
    """Return one more replica for the adapters with the most load, by their position in the line. It is
    expected to take little, because it is there for bursts. It is the previous one in the line, if there is
    one: ranks are not smaller there, so no request has to wait for a larger rank than before."""
    num_replicas, num_copies = line.num_replicas, sum(map(len, weights))
    room = np.full(num_replicas, line.most_bytes)
    for size, held in zip(line.sizes.tolist(), weights, strict=True):
        room[list(held)] -= size
    most = max(int(_STORAGE * num_replicas * len(weights)) - num_copies, 0)
    share = line.amounts / line.amounts.sum() * num_replicas
    hottest = np.argsort(-share, kind="stable")[:most]
    found: dict[int, dict[int, float]] = {}
    for place in hottest[share[hottest] >= _SPARE_SHARE].tolist():
        held = weights[place]
        size = line.sizes[place]
        beyond = [replica for replica in (min(held) - 1, max(held) + 1) if 0 <= replica < num_replicas]
        if beyond and room[beyond[0]] >= size:
            room[beyond[0]] -= size
            found[place] = {beyond[0]: _SPARE_PART * min(held.values())}
    return found
