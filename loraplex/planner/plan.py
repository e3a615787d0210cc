"""A plan: which adapters each GPU serves, and with how many slots."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.planner.demand import AdapterDemand


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """One GPU. `num_slots`: adapters that it holds on the device at a time; None for an engine without
    slots."""

    adapters: tuple[AdapterDemand, ...]
    num_slots: int | None

    @property
    def max_rank(self) -> int:
        return max((each.rank for each in self.adapters), default=0)
