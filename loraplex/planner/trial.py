"""One planned GPU in the twin, and the twin as a judge of what packers try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from loraplex.core.errors import CapacityError
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.fingerprint import fingerprint
from loraplex.planner.judge import Verdict
from loraplex.planner.objectives import NO_LIMITS, Objective
from loraplex.planner.plan import GpuPlan, slot_rank
from loraplex.planner.traffic import LengthsOf, draw_requests, longest_request
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.workload.jsonl import WorkloadRequest

_JUDGED_REQUESTS: Final = 3000
_MOST_JUDGED: Final = 50_000
_JUDGED_S: Final = (600.0, 3600.0)
"""A packer's choices are judged by about so many requests, and by simulations of so many seconds: of fewer,
if there would be `_MOST_JUDGED` requests, which no GPU serves in time."""
_JUDGED_S_OF_ADAPTER: Final = 3.0
"""Least seconds for each adapter of an engine with slots. Each is read once, which takes up to half a second
and holds up all requests: a run of ten minutes with 400 adapters would say little about the hours after."""
_OURS_JUDGED_S: Final = 60.0
"""Least seconds of our own engine, whose adapters are in host memory: no first loads to outlast."""
_MOST_RPS: Final = 5000.0
"""Requests per second that are too many for any GPU: of more, only so many are simulated."""
_OVERLOAD_S: Final = 60.0
_OVERLOAD_RPS: Final = 500.0


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


def check_lengths(profile: Profile, demand: Demand) -> None:
    """Raise PlanError if a GPU has no memory for the longest requests even without adapters."""
    prompt, output = longest_request(demand)
    request = WorkloadRequest(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output, adapter=0)
    try:
        replay(profile, [request], ReplayOptions(num_adapters=0))
    except CapacityError as error:
        raise PlanError(
            f"requests are too long for a GPU of this profile: with {demand.prompt_tokens:g} prompt and "
            f"{demand.output_tokens:g} answer tokens on average, single ones have up to {prompt + output:,} "
            f"({error}); plan for shorter ones"
        ) from None


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
    is_idle = not requests
    if is_idle and gpu.adapters:  # one short request on the largest tells whether they fit its memory
        largest = max(range(len(gpu.adapters)), key=lambda number: gpu.adapters[number].rank)
        requests = [WorkloadRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=1, adapter=largest)]
    options = ReplayOptions(
        num_adapters=len(gpu.adapters),
        ranks=tuple(each.rank for each in gpu.adapters),
        num_slots=gpu.num_slots,
        slot_rank=None if gpu.num_slots is None else gpu.slot_rank,
        until_s=duration_s,
        staged=isinstance(profile, CostModel),
    )
    try:
        outcome = replay(profile, requests, options)
    except CapacityError:
        return GpuFigures(fits=False, offered_tok_s=offered_tok_s, served_tok_s=0.0)
    if is_idle:
        return GpuFigures(fits=True, offered_tok_s=0.0, served_tok_s=0.0)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _BaseModel:
    """Everything that the most of the base model depends on: the profile, which is equal if its fingerprint
    is, the mean tokens of prompts and answers, and the seconds of the flood."""

    profile: Profile = field(compare=False)
    profile_sha256: str
    prompt_tokens: float
    output_tokens: float
    duration_s: float


def most_of_base_model(profile: Profile, demand: Demand) -> float:
    """Return the tokens per second, of prompts and answers, that a GPU serves of the base model alone. The
    last figure is kept, as a plan is made, compared and checked by the same one."""
    return _most_of(
        _BaseModel(
            profile=profile,
            profile_sha256=fingerprint(profile),
            prompt_tokens=demand.prompt_tokens,
            output_tokens=demand.output_tokens,
            duration_s=_OVERLOAD_S,
        )
    )


@lru_cache(maxsize=1)
def _most_of(base: _BaseModel) -> float:
    flood = AdapterDemand(name="base model", rank=1, rate_rps=_OVERLOAD_RPS)
    demand = Demand(adapters=(flood,), prompt_tokens=base.prompt_tokens, output_tokens=base.output_tokens)
    requests = draw_requests(demand, [flood], duration_s=base.duration_s, seed=0, lengths=LengthsOf.MEAN)
    options = ReplayOptions(num_adapters=0, until_s=base.duration_s)
    summary = replay(base.profile, requests, options).summary()
    return float(summary["input_tok_s"] + summary["output_tok_s"])


def judged_s(rate_rps: float, profile: Profile, num_adapters: int) -> float:
    """Return the seconds to simulate, so that there are enough requests to tell from, and not too many."""
    least_s, most_s = _JUDGED_S
    if isinstance(profile, CostModel):
        least_s = _OURS_JUDGED_S
    else:
        least_s = min(max(least_s, _JUDGED_S_OF_ADAPTER * num_adapters), most_s)
    if rate_rps <= 0:
        return least_s
    return min(max(_JUDGED_REQUESTS / rate_rps, least_s), most_s, _MOST_JUDGED / rate_rps)


class TwinJudge:
    """Judges by simulation: up to seconds of computing for each question, and no training."""

    def __init__(
        self, profile: Profile, demand: Demand, *, objective: Objective = NO_LIMITS, seed: int = 0
    ) -> None:
        self._profile = profile
        self._demand = demand
        self._objective = objective
        self._seed = seed
        self._known: dict[tuple[frozenset[AdapterDemand], int | None], Verdict] = {}

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        """See `Judge`."""
        key = frozenset(adapters), num_slots
        if key not in self._known:
            rate_rps = sum(each.rate_rps for each in adapters)
            times = min(_MOST_RPS / rate_rps, 1.0) if rate_rps else 1.0
            simulated = tuple(replace(each, rate_rps=each.rate_rps * times) for each in adapters)
            gpu = GpuPlan(adapters=simulated, num_slots=num_slots)
            duration_s = judged_s(rate_rps * times, self._profile, len(adapters))
            found = run_gpu(self._profile, self._demand, gpu, duration_s=duration_s, seed=self._seed)
            is_starved = found.is_starved or times < 1.0
            missed = () if is_starved else self._objective.missed(found.ttft_s, found.itl_s)
            self._known[key] = Verdict(found.served_tok_s, is_starved or bool(missed), missed)
        return self._known[key]

    def fits(self, max_rank: int, num_slots: int) -> bool:
        """See `Judge`. An engine without slots shares its memory as it goes."""
        if isinstance(self._profile, CostModel):
            return True
        return self._profile.memory.predict(num_slots=num_slots, max_rank=slot_rank(max_rank)) > 0
