"""S-LoRA Contiguous of the LoRAServe paper: adapters sorted by rank, equally many on each replica."""

from __future__ import annotations

import numpy as np

from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


class ContiguousPlacement:
    """A placement in which similar ranks share a replica; it ignores demand."""

    def place(self, problem: PlacementProblem) -> Plan:
        num_adapters = len(problem.adapters)
        homes = np.empty(num_adapters, dtype=np.int64)
        by_rank = np.argsort(problem.adapters.ranks, kind="stable")
        homes[by_rank] = np.arange(num_adapters) * problem.num_replicas // max(num_adapters, 1)
        return within_host_memory(Plan.of_homes(homes), problem)
