"""Routers by the names that commands use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from loraplex.core.errors import UserError
from loraplex.core.words import unknown_name
from loraplex.fleet.routers.affinity import AffinityRouter
from loraplex.fleet.routers.auto import AutoRouter
from loraplex.fleet.routers.first_fit import FirstFitRouter
from loraplex.fleet.routers.most_idle import MostIdleRouter
from loraplex.fleet.routers.pending_time import PendingTimeRouter
from loraplex.fleet.routers.random_router import RandomRouter
from loraplex.fleet.routers.rank_aware import RankAwareRouter
from loraplex.fleet.routers.rendezvous import RendezvousRouter
from loraplex.fleet.routers.round_robin import RoundRobinRouter
from loraplex.fleet.routers.router import Router
from loraplex.fleet.routers.routing_table import Division, RoutingTableRouter

ROUTERS: Final[Mapping[str, Callable[[int], Router]]] = {
    "random": RandomRouter,
    "round-robin": lambda seed: RoundRobinRouter(),
    "first-fit": lambda seed: FirstFitRouter(),
    "most-idle": lambda seed: MostIdleRouter(),
    "pending-time": lambda seed: PendingTimeRouter(),
    "rank-aware": lambda seed: RankAwareRouter(),
    "routing-table": lambda seed: RoutingTableRouter(),
    "routing-table-random": lambda seed: RoutingTableRouter(Division.RANDOM, seed),
    "affinity": lambda seed: AffinityRouter(),
    "rendezvous": lambda seed: RendezvousRouter(),
    "auto": lambda seed: AutoRouter(),
}
"""Factories that make a router from a seed, which deterministic routers ignore."""


def router_named(name: str, seed: int = 0) -> Router:
    """Return a new router. Raises UserError for an unknown name."""
    if name not in ROUTERS:
        raise UserError(unknown_name("routing", name, ROUTERS))
    return ROUTERS[name](seed)
