"""A plan: which adapters each GPU serves, and with how many slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from loraplex.planner.demand import AdapterDemand
from loraplex.planner.objectives import NO_LIMITS, Objective

SLOT_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank; 1, which only its latest releases take, is left out."""


def slot_rank(max_rank: int) -> int:
    """Return the rank of vLLM's slots that hold adapters up to this one. There are none for ranks beyond the
    largest, which is returned as it is."""
    return next((rank for rank in SLOT_RANKS if rank >= max_rank), max_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """One GPU. `adapters`: each with the requests per second that this GPU gets, which are all of them unless
    other GPUs have copies of it. `num_slots`: adapters that it holds on the device at a time; None for an
    engine without slots."""

    adapters: tuple[AdapterDemand, ...]
    num_slots: int | None

    @property
    def rate_rps(self) -> float:
        return sum(each.rate_rps for each in self.adapters)

    @property
    def max_rank(self) -> int:
        return max((each.rank for each in self.adapters), default=0)

    @property
    def slot_rank(self) -> int:
        """The rank that its slots have room for."""
        return slot_rank(self.max_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole plan. `profile`, `packer`: names of what it was made with; `profile_sha256`: a hash of that
    profile's content, None in old files; `prompt_tokens`, `output_tokens`: mean lengths of the requests that
    it was made for; `objective`: what each GPU has to attain; `num_spare_gpus`: how many it has no need of,
    of a number of GPUs that was asked for."""

    gpus: tuple[GpuPlan, ...]
    profile: str
    packer: str
    prompt_tokens: float
    output_tokens: float
    objective: Objective = NO_LIMITS
    num_spare_gpus: int = 0
    profile_sha256: str | None = None


def whole_adapters(gpus: Iterable[GpuPlan]) -> tuple[AdapterDemand, ...]:
    """Return the adapters of these GPUs, each once: its rate is that of all its copies. They are in the order
    in which they come first."""
    found: dict[str, AdapterDemand] = {}
    for gpu in gpus:
        for copy in gpu.adapters:
            known = found.get(copy.name)
            found[copy.name] = (
                copy if known is None else replace(copy, rate_rps=known.rate_rps + copy.rate_rps)
            )
    return tuple(found.values())
