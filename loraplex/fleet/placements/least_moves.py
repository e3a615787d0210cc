"""Choose which replica each group of adapters goes to, so that as little as possible has to be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from loraplex.core.arrays import IntArray
from loraplex.fleet.placements.assignment import least_cost_assignment
from loraplex.fleet.placements.placement import PlacementProblem


def least_moves(groups_of: Sequence[Iterable[int]], sizes: IntArray, problem: PlacementProblem) -> list[int]:
    """Return the replica for each group. `groups_of`: the groups of each adapter; there are as many groups as
    replicas. `sizes`: the cost of copying each adapter."""
    num_replicas = problem.num_replicas
    if problem.previous is None:
        return list(range(num_replicas))
    copies = problem.previous.copies()
    was_held = np.zeros((len(problem.adapters), num_replicas), dtype=bool)
    was_held[copies.adapters, copies.replicas] = True
    contents: list[list[int]] = [[] for _ in range(num_replicas)]
    for adapter, groups in enumerate(groups_of):
        for group in groups:
            contents[group].append(adapter)
    held = [sizes[adapters] @ was_held[adapters] for adapters in contents]
    # The cost is that of the group's adapters minus those already held. The former does not depend on the
    # assignment, so only the latter matters.
    replica_of_group: list[int] = least_cost_assignment(-np.array(held)).tolist()
    return replica_of_group
