"""S-LoRA Random of the LoRAServe paper: each adapter on a replica drawn once."""

from __future__ import annotations

import numpy as np

from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


class RandomPlacement:
    """One draw for each adapter, by the problem's seed.

    It is static: neither demand nor an adapter that is added later changes what was drawn."""

    def place(self, problem: PlacementProblem) -> Plan:
        drawn = np.random.default_rng(problem.seed).random(len(problem.adapters))
        homes = (drawn * problem.num_replicas).astype(np.int64)
        return within_host_memory(Plan.of_homes(homes), problem)
