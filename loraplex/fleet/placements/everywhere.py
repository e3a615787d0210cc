"""All adapters on all replicas, as Toppings and most gateways assume."""

from __future__ import annotations

from loraplex.core.errors import UserError
from loraplex.fleet.placements.placement import PlacementProblem
from loraplex.fleet.plan import Plan


class EverywherePlacement:
    """Every replica holds every adapter, so that the router alone decides."""

    def place(self, problem: PlacementProblem) -> Plan:
        needed_bytes = int(problem.adapters.num_bytes.sum())
        if problem.host_bytes is not None and needed_bytes > problem.host_bytes:
            raise UserError(
                f"{len(problem.adapters)} adapters take {needed_bytes:,} bytes on every replica, "
                f"{needed_bytes - problem.host_bytes:,} more than the {problem.host_bytes:,} bytes of host "
                "memory that a replica has for adapters; choose a placement that divides them"
            )
        every_replica, num_replicas = tuple(range(problem.num_replicas)), problem.num_replicas
        return Plan(
            replicas=(every_replica,) * len(problem.adapters),
            shares=((1 / num_replicas,) * num_replicas,) * len(problem.adapters),
        )
