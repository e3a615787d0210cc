"""A plan beside one GPU more or less and the baselines' plans, all simulated on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.check import PlanCheck, check_plan
from loraplex.planner.demand import PlanError
from loraplex.planner.judge import Judge
from loraplex.planner.make import BASELINES, BASELINES_WITHOUT_SLOTS, default_judge, make_plan
from loraplex.planner.one_gpu_more import with_one_less, with_one_more
from loraplex.planner.packing.packer import NotEnoughGpusError
from loraplex.planner.plan import Plan
from loraplex.planner.plan_file import demand_of

THIS_PLAN: Final = "this plan"
_SEEDS: Final = (0,)
"""Plans are compared roughly: the seed that packers judge by is enough. One plan's figures with other seeds
are of other requests, and must not stand beside these."""

_MOST_TIMES: Final = 4
"""Times the plan's GPUs up to which the baselines' number is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One alternative. `checked`: None if there is no such plan; `why_not`: the reason then."""

    name: str
    checked: PlanCheck | None
    why_not: str | None = None


def alternatives(
    plan: Plan, profile: Profile, report: Callable[[str, float], None] = lambda name, share: None
) -> Iterator[Alternative]:
    """Yield the plan itself, what one GPU more and one less would change, then the plan of each baseline for
    the same demand, with the least GPUs that will do. `report`: gets the name of the next, and the share that
    is done."""
    made: list[tuple[str, Callable[[], Plan]]] = [
        (THIS_PLAN, lambda: plan),
        ("one GPU more", lambda: with_one_more(plan)),
    ]
    if len(plan.gpus) > 1:
        made.append(("one GPU less", lambda: with_one_less(plan)))
    demand = demand_of(plan)
    judge = default_judge(profile, demand, plan.objective)
    has_slots = not isinstance(profile, CostModel)
    for packer in BASELINES if has_slots else BASELINES_WITHOUT_SLOTS:
        if packer != plan.packer:
            made.append((packer, _maker(plan, profile, packer, judge)))
    for number, (name, make) in enumerate(made):
        report(name, number / len(made))
        try:
            checked = check_plan(make(), profile, seeds=_SEEDS, duration_s=None)
        except NotEnoughGpusError:
            yield Alternative(
                name=name, checked=None, why_not=f"starves GPUs even with {_MOST_TIMES * len(plan.gpus)}"
            )
        except PlanError as error:
            yield Alternative(name=name, checked=None, why_not=str(error))
        else:
            yield Alternative(name=name, checked=checked)


def _maker(plan: Plan, profile: Profile, packer: str, judge: Judge) -> Callable[[], Plan]:
    def make() -> Plan:
        return make_plan(
            demand_of(plan),
            profile,
            profile_name=plan.profile,
            packer=packer,
            num_gpus=None,
            most_gpus=_MOST_TIMES * len(plan.gpus),
            judge=judge,
            objective=plan.objective,
        )

    return make
