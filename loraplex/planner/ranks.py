"""The largest ranks that the engines of a profile serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from loraplex.adapters import peft_config
from loraplex.core.modules import MAX_RANK as MAX_GPU_RANK
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.demand import AdapterDemand, PlanError

LARGEST_RANK: Final = peft_config.MAX_RANK
"""The largest rank of any adapter that can be loaded; only a CPU serves all of them."""


def serves(profile: Profile, adapter: AdapterDemand) -> bool:
    """Return whether the engines take an adapter of this rank."""
    return adapter.rank <= (LARGEST_RANK if _is_on_cpu(profile) else MAX_GPU_RANK)


def too_large(profile: Profile, adapter: AdapterDemand) -> str:
    """Say of an adapter that the engines do not take why that is so."""
    most = f"{LARGEST_RANK:,}" if _is_on_cpu(profile) else f"{MAX_GPU_RANK} on a GPU"
    return f"adapter {adapter.name!r} has rank {adapter.rank:,}, and engines serve ranks up to {most}"


def check_ranks(profile: Profile, adapters: Iterable[AdapterDemand]) -> None:
    """Raise PlanError for an adapter that the engines do not take."""
    for each in adapters:
        if not serves(profile, each):
            raise PlanError(
                f"{too_large(profile, each)}; leave it out of the plan, and serve it apart, merged into its "
                "base model"
            )


def _is_on_cpu(profile: Profile) -> bool:
    return isinstance(profile, CostModel) and profile.subject.device == "cpu"
