"""The price of moving adapters between replicas: bytes copied, and seconds of loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.placement_steps import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSize:
    """An adapter's rank and bytes."""

    rank: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """The sum over all steps. `num_moved`: adapters whose replicas change; `num_loads`: loads by a replica;
    `load_s`: seconds that these take one after the other, `longest_s` those of the replica with most."""

    num_moved: int
    num_loads: int
    num_bytes: int
    load_s: float
    longest_s: float


def move_cost(steps: Iterable[Step], sizes: Mapping[str, AdapterSize], profile: Profile) -> MoveCost:
    """Return the price of steps. Loads are taken to be from files that the page cache holds."""
    num_moved = num_loads = num_bytes = 0
    seconds: dict[int, float] = {}
    for step in steps:
        num_moved += 1
        size = sizes[step.adapter]
        for replica in step.loads:
            num_loads += 1
            num_bytes += size.num_bytes
            seconds[replica] = seconds.get(replica, 0.0) + load_s(size, profile)
    return MoveCost(
        num_moved=num_moved,
        num_loads=num_loads,
        num_bytes=num_bytes,
        load_s=sum(seconds.values()),
        longest_s=max(seconds.values(), default=0.0),
    )


def load_s(size: AdapterSize, profile: Profile) -> float:
    """Return the seconds until a replica that does not have an adapter has it on its device."""
    if isinstance(profile, CostModel):
        return profile.read_s(size.num_bytes) + profile.copy_s(size.num_bytes)
    return profile.costs.load.predict(rank=size.rank, from_disk=True)
