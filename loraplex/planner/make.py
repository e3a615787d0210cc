"""Makes a plan: chooses the packer by name, and the judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from loraplex.core.modules import GROUPS
from loraplex.core.words import unknown_name
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.fingerprint import fingerprint
from loraplex.planner.headroom import DEFAULT as DEFAULT_HEADROOM
from loraplex.planner.headroom import with_headroom, without_headroom
from loraplex.planner.judge import Judge, Verdict
from loraplex.planner.objectives import NO_LIMITS, Objective
from loraplex.planner.packing.dlora import DLoraPacking
from loraplex.planner.packing.hardest import check_hardest
from loraplex.planner.packing.improve import LocalImprovement, improve
from loraplex.planner.packing.judged import Judged
from loraplex.planner.packing.least_gpus import least_gpus
from loraplex.planner.packing.least_rate import LeastRate
from loraplex.planner.packing.max_base import MaxBase
from loraplex.planner.packing.max_pack import MaxPack
from loraplex.planner.packing.packer import NotEnoughGpusError, Packer
from loraplex.planner.packing.random_packing import RandomPacking
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.ranks import check_ranks
from loraplex.planner.steady_state import SteadyStateJudge
from loraplex.planner.trial import TwinJudge, check_lengths, most_of_base_model

PACKERS: Final = {
    "max-pack": "fills one GPU after the other, as far as it serves what is asked of it",
    "improved": "as max-pack or evenly divided, whichever takes fewer GPUs, and evens their load",
    "least-rate": "puts each adapter on the GPU with the lowest rate; for short latencies",
    "max-base": "fills GPUs to what the base model serves without adapters; a baseline",
    "max-base-half": "as max-base, with half as many slots as adapters; a baseline",
    "random": "puts each adapter on a GPU by chance; a baseline",
    "dlora": "dLoRA's proactive placement, with copies of busy adapters on several GPUs; a baseline",
}
"""Name of each packer, and what it does."""
BASELINES: Final = ("max-base", "max-base-half", "random", "dlora")
"""Packers whose plans are not judged."""
BASELINES_WITHOUT_SLOTS: Final = ("max-base", "random", "dlora")
"""Baselines that differ on an engine without slots."""
_SPREADS_BLINDLY: Final = ("random", "dlora")
"""Baselines that take all GPUs: a judge tells how few will do."""
_SPREADS: Final = ("least-rate", *_SPREADS_BLINDLY)
"""Packers that do not tell how many GPUs they need."""
_BEGIN_WITH: Final = 0.6
"""They begin with this share of the GPUs that would be needed if adapters cost nothing."""
_MOST_JUDGEMENTS: Final = 60
_MOST_QUICK_JUDGEMENTS: Final = 20_000
"""Most questions by which a packing is improved: to the twin, which takes seconds for each, or to a quick
judge."""
_MOST_GPUS: Final = 10_000


class ReportingJudge:
    """Passes questions on to another judge, and reports the share of adapters that were asked about: as
    packers fill one GPU after the other, about the share that is placed."""

    def __init__(self, judge: Judge, num_adapters: int, report: Callable[[float], None]) -> None:
        self._judge = judge
        self._num_adapters = num_adapters
        self._report = report
        self._seen: set[str] = set()

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        """See `Judge`."""
        verdict = self._judge.judge(adapters, num_slots)
        self._seen.update(each.name for each in adapters)
        self._report(min(len(self._seen) / self._num_adapters, 1.0))
        return verdict

    def fits(self, max_rank: int, num_slots: int) -> bool:
        """See `Judge`."""
        return self._judge.fits(max_rank, num_slots)


def make_plan(
    demand: Demand,
    profile: Profile,
    *,
    profile_name: str,
    packer: str,
    num_gpus: int | None,
    most_gpus: int = _MOST_GPUS,
    judge: Judge | None = None,
    objective: Objective = NO_LIMITS,
    headroom: float | None = None,
    report: Callable[[float], None] = lambda share: None,
) -> Plan:
    """Return a plan for so many GPUs; None: for as few as will do, up to `most_gpus`. `judge`: a surrogate;
    None for the steady state of our own engine, and the twin of others. `headroom`: share by which each GPU
    shall be able to serve more than is asked for; None for the default, which is 0 where the steady state
    judges, as that leaves room itself. Baselines leave none. `report`: gets the share of adapters that the
    twin was asked about.

    Baselines are not judged, so that with a given number of GPUs their plans may starve.
    Adapters without requests are planned too: they need a place where their first request will find them.
    Raises PlanError if there is no such plan, or no such packer."""
    if objective.has_limits and not (judge is None or isinstance(judge, TwinJudge)):
        raise PlanError(
            "a surrogate knows throughput and starvation, but neither TTFT nor ITL; leave --surrogate out, "
            "and the twin judges, or leave --slo-ttft and --slo-itl out"
        )
    check_ranks(profile, demand.adapters)
    check_lengths(profile, demand)
    if headroom is None:
        leaves_room = judge is None and isinstance(
            default_judge(profile, demand, objective), SteadyStateJudge
        )
        headroom = 0.0 if leaves_room else DEFAULT_HEADROOM
    if packer in BASELINES:
        headroom = 0.0
    wanted = with_headroom(demand, headroom)
    try:
        gpus = _packed(wanted, profile, packer, num_gpus, most_gpus, judge, objective, report)
    except PlanError as error:
        if headroom > 0:
            error.args = (f"{error} (rates are taken {headroom:.0%} higher, by --headroom)",)
        raise
    return Plan(
        gpus=gpus if headroom == 0 else without_headroom(gpus, demand),
        profile=profile_name,
        packer=packer,
        prompt_tokens=demand.prompt_tokens,
        output_tokens=demand.output_tokens,
        objective=objective,
        num_spare_gpus=0 if num_gpus is None else max(num_gpus - len(gpus), 0),
        profile_sha256=fingerprint(profile),
    )


def _packed(
    demand: Demand,
    profile: Profile,
    packer: str,
    num_gpus: int | None,
    most_gpus: int,
    trained: Judge | None,
    objective: Objective,
    report: Callable[[float], None],
) -> tuple[GpuPlan, ...]:
    """Return the plan of a packer. `trained`: a surrogate; None for the judge that needs no training."""
    has_slots = not isinstance(profile, CostModel)
    judge = trained or default_judge(profile, demand, objective)
    is_quick = not isinstance(judge, TwinJudge)
    asked = judge if is_quick else ReportingJudge(judge, len(demand.adapters), report)
    most_judgements = _MOST_QUICK_JUDGEMENTS if is_quick else _MOST_JUDGEMENTS
    # Of a surrogate's plan, the twin judges each GPU afterwards, and tries the even divisions.
    chosen = packer_of(
        packer, profile, demand, asked, most_judgements=most_judgements, divides_evenly=trained is None
    )
    if packer in ("least-rate", "random") and trained is None:  # surrogates know nothing of single adapters
        check_hardest(demand, asked, has_slots=has_slots)
    if num_gpus is None:
        if packer in _SPREADS_BLINDLY:
            chosen = Judged(packer=chosen, judge=asked)
        most = min(most_gpus, len(demand.adapters))
        gpus = least_gpus(chosen, demand, most, at_least=_fewest(packer, profile, demand))
    else:
        gpus = chosen.pack(demand, num_gpus)
    if packer == "improved" and trained is not None:
        reporting = ReportingJudge(TwinJudge(profile, demand), len(demand.adapters), report)
        gpus = improve(gpus, demand, reporting, most_judgements=0)
        if num_gpus is not None and len(gpus) > num_gpus:
            raise NotEnoughGpusError(
                f"too few GPUs ({num_gpus}): the twin finds some starving, and {len(gpus)} would do; give "
                "more GPUs",
                plans=gpus,
            )
    return gpus


def default_judge(profile: Profile, demand: Demand, objective: Objective = NO_LIMITS) -> Judge:
    """Return the judge that needs no training."""
    if isinstance(profile, CostModel) and not objective.has_limits:
        return SteadyStateJudge(profile, demand)
    return TwinJudge(profile, demand, objective=objective)


def _fewest(packer: str, profile: Profile, demand: Demand) -> int:
    """Return a number of GPUs to begin with, fewer than which certainly starve."""
    if packer not in _SPREADS:
        return 1
    offered_tok_s = demand.offered_tok_s(demand.adapters)
    return max(int(_BEGIN_WITH * offered_tok_s / most_of_base_model(profile, demand)), 1)


def packer_of(
    name: str,
    profile: Profile,
    demand: Demand,
    judge: Judge,
    *,
    most_judgements: int = _MOST_JUDGEMENTS,
    divides_evenly: bool = True,
) -> Packer:
    """Return the packer of that name. `most_judgements`, `divides_evenly`: for those that improve. Raises
    PlanError if there is none."""
    has_slots = not isinstance(profile, CostModel)
    match name:
        case "max-pack":
            return MaxPack(judge=judge, has_slots=has_slots)
        case "improved":
            packer = MaxPack(judge=judge, has_slots=has_slots)
            return LocalImprovement(
                packer=packer, judge=judge, most_judgements=most_judgements, divides_evenly=divides_evenly
            )
        case "least-rate":
            return LeastRate(judge=judge, has_slots=has_slots)
        case "max-base" | "max-base-half":
            share = 1.0 if name == "max-base" else 0.5
            most_tok_s = most_of_base_model(profile, demand)
            return MaxBase(base_tok_s=most_tok_s, slots_per_adapter=share if has_slots else None)
        case "random":
            return RandomPacking(seed=0, has_slots=has_slots)
        case "dlora":
            return _dlora(profile)
        case _:
            raise PlanError(unknown_name("packer", name, PACKERS))


def _dlora(profile: Profile) -> DLoraPacking:
    if isinstance(profile, CostModel):
        has = profile.memory
        if has is None or has.arena_bytes is None:
            raise PlanError(
                "dLoRA's placement is about memory that adapters share with requests, and this profile is of "
                "an engine where they do not; choose another --packer"
            )
        return DLoraPacking(
            memory=has.arena_bytes,
            memory_of_rank=lambda rank: has.adapter_bytes(rank, GROUPS["qkv"]),
            has_slots=False,
        )
    tokens = profile.memory
    return DLoraPacking(
        memory=round(tokens.tokens),
        memory_of_rank=lambda rank: max(round(tokens.slot_tokens + tokens.slot_rank_tokens * rank), 1),
    )
