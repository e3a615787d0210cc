"""One planned GPU in the twin, and the twin as a judge of what packers try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import CapacityError
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.judge import Verdict
from loraplex.planner.plan import GpuPlan
from loraplex.planner.traffic import LengthsOf, draw_requests
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.replay import ReplayOptions, replay

JUDGED_S: Final = 600.0
"""Simulated seconds by which a packer's choices are judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFigures:
    """Figures of one GPU, in seconds and tokens per second of prompts and answers. `ttft_s`, `itl_s`: means,
    None if no request got so far. `fits`: whether the adapters fit its memory; if not, all others are 0."""

    fits: bool
    offered_tok_s: float
    served_tok_s: float
    ttft_s: float | None = None
    ttft_p95_s: float | None = None
    itl_s: float | None = None
    num_loads: int = 0

    @property
    def is_starved(self) -> bool:
        return not self.fits or self.served_tok_s < STARVED_BELOW * self.offered_tok_s


def run_gpu(
    profile: Profile,
    demand: Demand,
    gpu: GpuPlan,
    *,
    duration_s: float,
    seed: int,
    lengths: LengthsOf = LengthsOf.DRAWN,
) -> GpuFigures:
    """Simulate a GPU for so many seconds, and return its figures."""
    requests = draw_requests(demand, gpu.adapters, duration_s=duration_s, seed=seed, lengths=lengths)
    offered_tok_s = sum(each.prompt_tokens + each.output_tokens for each in requests) / duration_s
    if not requests:
        return GpuFigures(fits=True, offered_tok_s=0.0, served_tok_s=0.0)
    options = ReplayOptions(
        num_adapters=len(gpu.adapters),
        ranks=tuple(each.rank for each in gpu.adapters),
        num_slots=gpu.num_slots,
        slot_rank=None if gpu.num_slots is None else gpu.max_rank,
        until_s=duration_s,
        staged=isinstance(profile, CostModel),
    )
    try:
        outcome = replay(profile, requests, options)
    except CapacityError:
        return GpuFigures(fits=False, offered_tok_s=offered_tok_s, served_tok_s=0.0)
    summary = outcome.summary()
    ttft = summary["ttft_s"] or {}
    return GpuFigures(
        fits=True,
        offered_tok_s=offered_tok_s,
        served_tok_s=(summary["input_tok_s"] + summary["output_tok_s"]) * outcome.duration_s / duration_s,
        ttft_s=ttft.get("mean"),
        ttft_p95_s=ttft.get("p95"),
        itl_s=summary["itl_mean_s"],
        num_loads=outcome.num_loads,
    )


class TwinJudge:
    """Judges by simulation: seconds of the twin for each question, and no training."""

    def __init__(
        self, profile: Profile, demand: Demand, *, seed: int = 0, duration_s: float = JUDGED_S
    ) -> None:
        self._profile = profile
        self._demand = demand
        self._seed = seed
        self._duration_s = duration_s
        self._known: dict[tuple[frozenset[AdapterDemand], int | None], Verdict] = {}

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        """See `Judge`."""
        key = frozenset(adapters), num_slots
        if key not in self._known:
            gpu = GpuPlan(adapters=tuple(adapters), num_slots=num_slots)
            found = run_gpu(self._profile, self._demand, gpu, duration_s=self._duration_s, seed=self._seed)
            self._known[key] = Verdict(found.served_tok_s, found.is_starved)
        return self._known[key]

    def fits(self, max_rank: int, num_slots: int) -> bool:
        """See `Judge`. An engine without slots shares its memory as it goes."""
        if isinstance(self._profile, CostModel):
            return True
        return self._profile.memory.predict(num_slots=num_slots, max_rank=max_rank) > 0
