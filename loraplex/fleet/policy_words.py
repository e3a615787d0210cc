"""One-line descriptions of routings and placements."""

from __future__ import annotations

from typing import Final

ROUTINGS_EXPLAINED: Final = {
    "random": "any replica, by chance",
    "round-robin": "each replica in turn",
    "first-fit": "the first replica with room",
    "most-idle": "the replica with the fewest requests",
    "pending-time": "where its first step begins soonest",
    "rank-aware": "where it slows the others down least",
    "routing-table": "its adapter's replicas, by the placement's shares",
    "routing-table-random": "its adapter's replicas, by chance with the placement's shares",
    "affinity": "where its adapter is in use, queues are short and KV memory is free",
    "rendezvous": "the first in its adapter's own order that is not too busy",
    "auto": "where it costs least time per token, or little more with its adapter there",
    "oracle": "as auto, knowing what will come: the gain there is, in simulations only",
}
PLACEMENTS_EXPLAINED: Final = {
    "everywhere": "every replica",
    "contiguous": "one replica, by its rank, for good",
    "random": "one replica, by chance, for good",
    "burst-tolerance": "as many replicas as keep room for a burst of its requests",
    "loraserve": "replicas of its rank's budget, filled to equal utilisation",
    "auto": "its piece of a line of all by rank, cut for equally busy replicas",
}
