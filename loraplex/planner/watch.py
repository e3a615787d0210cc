"""Finds out whether a fleet's placement still fits its traffic, and plans again when it does not.

The fleet was planned for some rates. A GPU that is asked for more than planned is simulated with what was
measured, and starving is a reason for another plan, as is missing a limit on latency. So is traffic far below
the plan, if fewer GPUs do with room to spare. A reason must hold in several looks in a row, and is acted on
once; if that fails, again at the next look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

import numpy as np

from loraplex.fleet.placements.assignment import least_cost_assignment
from loraplex.fleet.plan import Entry
from loraplex.perf.named_profiles import Profile
from loraplex.planner.check import PlanCheck, check_plan
from loraplex.planner.demand import Demand, PlanError
from loraplex.planner.fingerprint import fingerprint
from loraplex.planner.make import PACKERS, default_judge, make_plan
from loraplex.planner.move_cost import AdapterSize
from loraplex.planner.packing.improve import improve
from loraplex.planner.placement_steps import Holders
from loraplex.planner.plan import GpuPlan, Plan

SEEDS: Final = (1, 2)
LOOKED_S: Final = 600.0
"""A GPU is simulated for so many seconds with each seed; it starves if it does with all of them, and misses a
limit by the mean of all."""
SMALL_SHARE: Final = 0.7
"""Share of the planned tokens below which fewer GPUs are looked for."""
HEADROOM: Final = 1.25
"""A proposal is made for so many times the measured rates, so that the next fluctuation does not end it."""
NUM_LOOKS: Final = 2
"""A reason must hold in so many looks in a row before it is acted on."""
_SEARCH_AGAIN_BELOW: Final = 0.9
"""Share of the last search's traffic below which fewer GPUs are looked for again."""


class Finding(StrEnum):
    """The result of a look at a fleet."""

    HOLDS = "holds"
    TOO_SMALL = "too small"
    """A GPU starves or misses a limit."""
    TOO_LARGE = "too large"
    """Far less is asked for than planned."""


class Hysteresis:
    """Decides from the verdicts of looks when to plan again. `num_looks`: how many in a row must say the
    same."""

    def __init__(self, num_looks: int = NUM_LOOKS) -> None:
        self._num_looks = num_looks
        self._last = Finding.HOLDS
        self._num_same = 0
        self._acted_tok_s: float | None = None  # traffic when this verdict was acted on last

    def is_due(self, verdict: Finding, measured_tok_s: float) -> bool:
        """Record a look's verdict, and return whether it is time to plan again. While the verdict lasts it
        stays time until `acted`."""
        if verdict is not self._last:
            self._last, self._num_same, self._acted_tok_s = verdict, 0, None
        self._num_same += 1
        if verdict is Finding.HOLDS or self._num_same < self._num_looks:
            return False
        acted = self._acted_tok_s
        return acted is None or (
            verdict is Finding.TOO_LARGE and measured_tok_s < _SEARCH_AGAIN_BELOW * acted
        )

    def acted(self, measured_tok_s: float) -> None:
        """Record that the last verdict was acted on."""
        self._acted_tok_s = measured_tok_s


def served_now(plan: Plan, demand: Demand, replicas: Sequence[Mapping[str, float]]) -> Plan:
    """Return the plan with the measured rates and lengths, as the fleet serves them. `replicas`: for each
    GPU, the share of the requests of each adapter that it gets."""
    known = {each.name: each for each in demand.adapters}
    return replace(
        plan,
        gpus=tuple(
            GpuPlan(
                adapters=tuple(
                    replace(known[name], rate_rps=known[name].rate_rps * share)
                    for name, share in shares.items()
                    if name in known
                ),
                num_slots=gpu.num_slots,
            )
            for gpu, shares in zip(plan.gpus, replicas, strict=True)
        ),
        prompt_tokens=demand.prompt_tokens,
        output_tokens=demand.output_tokens,
    )


def shares_by_gpu(entries: Mapping[str, Entry], num_gpus: int) -> list[dict[str, float]]:
    """Return the share of each adapter's requests that each GPU gets."""
    found: list[dict[str, float]] = [{} for _ in range(num_gpus)]
    for name, entry in entries.items():
        for gpu, share in zip(entry.replicas, entry.shares, strict=True):
            found[gpu][name] = share
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look at a fleet. `served`: see `served_now`. `checked`: the GPUs that are asked for more than
    planned, simulated with the measured demand; None if there are none."""

    verdict: Finding
    served: Plan
    planned_tok_s: float
    measured_tok_s: float
    checked: PlanCheck | None

    @property
    def num_failing(self) -> int:
        """Number of GPUs that starve with all seeds, or miss a limit."""
        gpus = () if self.checked is None else self.checked.gpus
        return sum(gpu.num_starved == len(gpu.runs) or bool(gpu.missed) for gpu in gpus)


def look_at(
    plan: Plan,
    served: Plan,
    profile: Profile,
    report: Callable[[float], None] = lambda share: None,
    *,
    is_rough: bool = False,
) -> Look:
    """Judge what a fleet serves by the plan that it was given. `is_rough`: too few requests were counted to
    say that the plan is too large: the fleet may just have started."""
    planned, measured = _tok_s(plan), _tok_s(served)
    more = [
        gpu
        for gpu, planned_gpu, now, then in zip(served.gpus, plan.gpus, measured, planned, strict=True)
        if gpu.adapters and (now > then or len(gpu.adapters) > len(planned_gpu.adapters))
    ]
    checked = None
    if more:
        checked = check_plan(
            replace(served, gpus=tuple(more)), profile, seeds=SEEDS, duration_s=LOOKED_S, report=report
        )
    look = Look(
        verdict=Finding.HOLDS,
        served=served,
        planned_tok_s=sum(planned),
        measured_tok_s=sum(measured),
        checked=checked,
    )
    if look.num_failing:
        return replace(look, verdict=Finding.TOO_SMALL)
    if not is_rough and len(plan.gpus) > 1 and sum(measured) < SMALL_SHARE * sum(planned):
        return replace(look, verdict=Finding.TOO_LARGE)
    return look


def plan_again(plan: Plan, look: Look, demand: Demand, profile: Profile) -> Plan | None:
    """Return a plan for the measured demand with headroom. Where GPUs are too few for it, the present
    placement is repaired, with the same GPUs if they will do, or packed anew if the packer has a plan that
    needs fewer than repairing. Where they are too many, it is packed anew; None if that needs no fewer, or if
    the packer finds no plan."""
    wanted = replace(
        demand,
        adapters=tuple(replace(each, rate_rps=each.rate_rps * HEADROOM) for each in demand.adapters),
    )
    num_gpus = len(plan.gpus)
    packer = plan.packer if plan.packer in PACKERS else "max-pack"
    make = partial(
        make_plan, wanted, profile, profile_name=plan.profile, objective=plan.objective, headroom=0.0
    )
    repaired = None if look.verdict is Finding.TOO_LARGE else _repaired(plan, look.served, wanted, profile)
    if repaired is not None and len(repaired.gpus) <= num_gpus:
        return _with_unused(repaired, num_gpus)
    try:
        least = make(packer=packer, num_gpus=None)
    except PlanError:
        if look.verdict is Finding.TOO_LARGE:
            return None
        if repaired is None:
            raise
        return repaired
    if look.verdict is Finding.TOO_LARGE:
        return least if len(least.gpus) < num_gpus else None
    if repaired is not None and len(repaired.gpus) <= len(least.gpus):
        return repaired
    if len(least.gpus) >= num_gpus:
        return least
    try:
        return make(packer="least-rate", num_gpus=num_gpus)
    except PlanError:
        return _with_unused(least, num_gpus)


def _repaired(plan: Plan, served: Plan, wanted: Demand, profile: Profile) -> Plan | None:
    """Return the present placement with the moves that make all its GPUs serve what is wanted, and with more
    GPUs where it has to be. None if it has copies of adapters, or if there is no such plan."""
    known = {each.name: each for each in wanted.adapters}
    if sorted(each.name for gpu in served.gpus for each in gpu.adapters) != sorted(known):
        return None
    present = [
        replace(gpu, adapters=tuple(known[each.name] for each in gpu.adapters))
        for gpu in served.gpus
        if gpu.adapters
    ]
    judge = default_judge(profile, wanted, plan.objective)
    try:
        gpus = improve(present, wanted, judge, most_judgements=0, divides_evenly=False)
    except PlanError:
        return None
    return replace(
        plan,
        gpus=gpus,
        profile_sha256=fingerprint(profile),
        prompt_tokens=wanted.prompt_tokens,
        output_tokens=wanted.output_tokens,
        num_spare_gpus=0,
    )


def _with_unused(plan: Plan, num_gpus: int) -> Plan:
    """Return the plan with so many GPUs, the last of which may have no adapters."""
    unused = GpuPlan(adapters=(), num_slots=plan.gpus[0].num_slots)
    return replace(plan, gpus=(*plan.gpus, *[unused] * (num_gpus - len(plan.gpus))))


def with_least_moves(plan: Plan, present: Holders, sizes: Mapping[str, AdapterSize]) -> Plan:
    """Return the plan with its GPUs in the order in which the fewest bytes have to be loaded. `present`: the
    numbers of the GPUs that have each adapter now."""
    num_gpus = len(plan.gpus)
    held: defaultdict[int, set[str]] = defaultdict(set)
    for name, gpus in present.items():
        for gpu in gpus:
            held[gpu].add(name)
    costs = np.zeros((num_gpus, num_gpus), np.int64)
    for row, gpu_plan in enumerate(plan.gpus):
        for place in range(num_gpus):
            costs[row, place] = -sum(
                sizes[each.name].num_bytes for each in gpu_plan.adapters if each.name in held[place]
            )
    place_of: list[int] = least_cost_assignment(costs).tolist()
    ordered = dict(zip(place_of, plan.gpus, strict=True))
    return replace(plan, gpus=tuple(ordered[place] for place in range(num_gpus)))


def least_served(checked: PlanCheck) -> float:
    """Return the share of its requests' tokens that the worst GPU serves."""
    return min((gpu.share_served for gpu in checked.gpus), default=1.0)


def lost_tok_s(checked: PlanCheck) -> float:
    """Return the tokens per second that are asked for and not served, by the mean of the seeds."""
    return sum(
        max((gpu.mean("offered_tok_s") or 0.0) - (gpu.mean("served_tok_s") or 0.0), 0.0)
        for gpu in checked.gpus
    )


def _tok_s(plan: Plan) -> list[float]:
    """Return the tokens per second that each GPU is asked for."""
    return [
        sum(each.rate_rps for each in gpu.adapters) * (plan.prompt_tokens + plan.output_tokens)
        for gpu in plan.gpus
    ]
