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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole plan. `profile`, `packer`: names of what it was made with; `prompt_tokens`, `output_tokens`:
    mean lengths of the requests that it was made for."""

    gpus: tuple[GpuPlan, ...]
    profile: str
    packer: str
    prompt_tokens: float
    output_tokens: float
