"""The order in which adapters are packed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from loraplex.planner.demand import AdapterDemand


def size_first_zigzag(adapters: Iterable[AdapterDemand]) -> list[AdapterDemand]:
    """Return the adapters by rank, largest first, and within a rank by rate in a zigzag: the highest, the
    lowest, the second highest, and so on.

    So adapters of one rank share a GPU, and those that follow never raise its largest rank, for which all
    its slots have memory. Equal rates are ordered by name."""
    by_rank: defaultdict[int, list[AdapterDemand]] = defaultdict(list)
    for each in adapters:
        by_rank[each.rank].append(each)
    ordered: list[AdapterDemand] = []
    for rank in sorted(by_rank, reverse=True):
        falling = sorted(by_rank[rank], key=lambda each: (-each.rate_rps, each.name))
        zigzag = falling.copy()
        num_high = (len(falling) + 1) // 2
        zigzag[::2] = falling[:num_high]
        zigzag[1::2] = falling[: num_high - 1 : -1]
        ordered += zigzag
    return ordered
