"""S-LoRA Random of the LoRAServe paper: each adapter on one randomly drawn replica."""

from __future__ import annotations

import numpy as np

from loraplex.fleet.placements.host_memory import within_host_memory
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


class RandomPlacement:
    """A placement with one random draw for each adapter, from the problem's seed.

    It is static: neither demand nor adapters added later change what was drawn."""

    def place(self, problem: PlacementProblem) -> Plan:
        drawn = np.random.default_rng(problem.seed).random(len(problem.adapters))
        homes = (drawn * problem.num_replicas).astype(np.int64)
        return within_host_memory(Plan.of_homes(homes), problem)
