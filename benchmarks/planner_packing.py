"""Times to plan, and plans for the paper's scenarios and for our own engine: whether they hold, and how many
GPUs they take."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.planner_data import MODELS, Asked, Model, profile_of
from benchmarks.planner_scenarios import Scenario, scenarios
from benchmarks.planner_surrogates import forest, small_tree
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.planner.check import SEEDS
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.judge import Judge
from loraplex.planner.make import make_plan, packer_of
from loraplex.planner.packing.improve import LocalImprovement
from loraplex.planner.packing.least_gpus import least_gpus
from loraplex.planner.packing.max_base import MaxBase
from loraplex.planner.packing.max_pack import MaxPack
from loraplex.planner.packing.packer import Packer
from loraplex.planner.packing.random_packing import RandomPacking
from loraplex.planner.plan import GpuPlan
from loraplex.planner.steady_state import MARGIN, SteadyStateJudge
from loraplex.planner.surrogate import Surrogate, SurrogateJudge
from loraplex.planner.trial import most_of_base_model, run_gpu
from loraplex.twin.outcome import STARVED_BELOW

MOST_GPUS: Final = 4
MOST_JUDGEMENTS: Final = 20_000
CHECKED_S: Final = 900.0
_REPEATS: Final = 20
_OWN: Final = "h200-llama-2-7b"
_OWN_ADAPTERS, _OWN_RPS, _OWN_SKEW, _OWN_GPUS = 10_000, 2300.0, 0.6, 64
_OWN_SECONDS = 240.0
_OWN_CHECKED_GPUS: Final = 12
"""GPUs that are checked, those with the highest rates: a run takes ten seconds, and all GPUs are alike."""


def judge_by(surrogate: Surrogate, model: Model) -> SurrogateJudge:
    lengths = model.lengths
    return SurrogateJudge(
        surrogate, profile_of(model), prompt_tokens=lengths.prompt, output_tokens=lengths.output
    )


def plan_speed(asked: Asked) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        demand = Scenario(rates="low", sizes="mixed", num_adapters=1280).demand(model)
        accurate, fast = (
            judge_by(forest(model, asked.num_rows), model),
            judge_by(small_tree(model, asked.num_rows), model),
        )
        packers: dict[str, Packer] = {
            "max-pack, accurate": MaxPack(judge=accurate),
            "max-pack, fast": MaxPack(judge=fast),
            "improved, accurate": LocalImprovement(
                packer=MaxPack(judge=accurate),
                judge=accurate,
                most_judgements=MOST_JUDGEMENTS,
                divides_evenly=False,  # As `make_plan` with a surrogate: the twin does.
            ),
        }
        found = {}
        for name, packer in packers.items():
            took_s, cpu_s, plans = [], [], packer.pack(demand, 2 * MOST_GPUS)
            for _ in range(_REPEATS):
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                packer.pack(demand, 2 * MOST_GPUS)
                cpu_s.append(time.process_time() - began_cpu_s)
                took_s.append(time.perf_counter() - began_s)
            found[name] = {
                "seconds": median(took_s),
                "least_s": min(took_s),
                "cpu_s": median(cpu_s),
                "num_gpus": len(plans),
            }
        cases[model.name] = {"num_adapters": len(demand.adapters), "packers": found}
    return {"models": cases}


class _Checked:
    """Runs GPUs in the twin, each only once."""

    def __init__(self, model: Model, demand: Demand) -> None:
        self._run = partial(run_gpu, profile_of(model), demand, duration_s=CHECKED_S)
        self._known: dict[tuple[frozenset[AdapterDemand], int | None], int] = {}

    def num_starved(self, gpu: GpuPlan) -> int:
        """Return the number of seeds by which the GPU starves."""
        key = frozenset(gpu.adapters), gpu.num_slots
        if key not in self._known:
            self._known[key] = sum(self._run(gpu, seed=seed).is_starved for seed in SEEDS)
        return self._known[key]


def in_scenario(model: Model, quick: Judge, base_tok_s: float, scenario: Scenario) -> dict[str, Any]:
    demand = scenario.demand(model)
    checked = _Checked(model, demand)
    found = _by_judged_packers(model, quick, demand, checked)
    most = len(demand.adapters)
    for name, share in (("MaxBase", 1.0), ("MaxBase*", 0.5)):
        packer: Packer = MaxBase(base_tok_s=base_tok_s, slots_per_adapter=share)
        found[name] = _outcome(partial(packer.pack, demand, most), checked)
    # They take all GPUs, and get as many as the paper's needs.
    num_gpus = found["the paper's"]["num_gpus"] or MOST_GPUS
    spreading = {
        "Random": RandomPacking(seed=0),
        "dLoRA": packer_of("dlora", profile_of(model), demand, quick),
    }
    for name, packer in spreading.items():
        found[name] = _outcome(partial(packer.pack, demand, num_gpus), checked)
    return found


def _by_judged_packers(model: Model, quick: Judge, demand: Demand, checked: _Checked) -> dict[str, Any]:
    papers = partial(least_gpus, MaxPack(judge=quick), demand, len(demand.adapters))
    packers: dict[str, Callable[[], Sequence[GpuPlan]]] = {
        "the paper's": papers,
        "ours": partial(_ours, model, demand, quick),
    }
    return {name: _outcome(pack, checked) for name, pack in packers.items()}


def _ours(model: Model, demand: Demand, quick: Judge) -> Sequence[GpuPlan]:
    """Return what `plan make --surrogate --packer improved` plans, with the default room."""
    return make_plan(
        demand,
        profile_of(model),
        profile_name=model.profile,
        packer="improved",
        num_gpus=None,
        judge=quick,
    ).gpus


def _outcome(pack: Callable[[], Sequence[GpuPlan]], checked: _Checked) -> dict[str, Any]:
    began_s = time.perf_counter()
    try:
        plans = pack()
    except PlanError as error:
        return {"num_gpus": None, "why": str(error)}
    plan_s = time.perf_counter() - began_s
    return {
        "num_gpus": len(plans),
        "plan_s": plan_s,
        "num_starved": [checked.num_starved(each) for each in plans],
    }


def in_scenarios(model: Model, asked: Asked) -> dict[str, Any]:
    demand = Scenario(rates="low", sizes="low", num_adapters=1).demand(model)
    base_tok_s = most_of_base_model(profile_of(model), demand)
    quick = judge_by(forest(model, asked.num_rows), model)
    return _in_each(model, partial(in_scenario, model, quick, base_tok_s), list(scenarios()), asked)


def _in_each(
    model: Model, outcomes: Callable[[Scenario], dict[str, Any]], asked_for: list[Scenario], asked: Asked
) -> dict[str, Any]:
    cases = {}
    with ProcessPoolExecutor(asked.num_workers) as pool:
        for scenario, case in zip(asked_for, pool.map(outcomes, asked_for), strict=True):
            cases[scenario.name] = case
            brief = {name: (each["num_gpus"], each.get("num_starved")) for name, each in case.items()}
            print(f"{model.name}, {scenario.name}: {brief}", file=sys.stderr, flush=True)
    return {"model": model.name, "seeds": SEEDS, "checked_s": CHECKED_S, "cases": cases}


def own(asked: Asked) -> dict[str, Any]:
    profile = find_profile(Path(_OWN))
    assert isinstance(profile, CostModel)
    demand = _own_demand()
    began_s = time.perf_counter()
    plan = make_plan(demand, profile, profile_name=_OWN, packer="improved", num_gpus=_OWN_GPUS)
    plan_s = time.perf_counter() - began_s
    fullest = sorted(plan.gpus, key=lambda gpu: -gpu.rate_rps)[:_OWN_CHECKED_GPUS]
    runs = [(gpu, seed) for gpu in fullest for seed in SEEDS]
    shares = []
    with ProcessPoolExecutor(asked.num_workers) as pool:
        for share in pool.map(partial(_share_served, profile, demand), *zip(*runs, strict=True)):
            shares.append(share)
            print(f"own: run {len(shares)}, {share:.3f}", file=sys.stderr, flush=True)
    return {
        "profile": _OWN,
        "num_adapters": len(demand.adapters),
        "rate_rps": _OWN_RPS,
        "num_gpus": len(plan.gpus),
        "plan_s": plan_s,
        "lower_bound": _lower_bound(profile, demand),
        "lower_bound_without_margin": _lower_bound(profile, demand) * MARGIN,
        "highest_rps": fullest[0].rate_rps,
        "mean_rps": _OWN_RPS / len(plan.gpus),
        "num_checked_gpus": len(fullest),
        "checked_s": _OWN_SECONDS,
        "seeds": SEEDS,
        "num_starved": sum(share < STARVED_BELOW for share in shares),
        "least_share_served": min(shares),
        "mean_share_served": sum(shares) / len(shares),
    }


def _share_served(profile: CostModel, demand: Demand, gpu: GpuPlan, seed: int) -> float:
    found = run_gpu(profile, demand, gpu, duration_s=_OWN_SECONDS, seed=seed)
    return found.served_tok_s / found.offered_tok_s


def _own_demand() -> Demand:
    """Return adapters of four ranks whose rates fall by a power law, the ranks independent of the rates."""
    rng = random.Random(0)
    weights = [(place + 1) ** -_OWN_SKEW for place in range(_OWN_ADAPTERS)]
    total = sum(weights)
    return Demand(
        adapters=tuple(
            AdapterDemand(
                name=f"adapter-{place}", rank=rng.choice((8, 16, 32, 64)), rate_rps=_OWN_RPS * weight / total
            )
            for place, weight in enumerate(weights)
        ),
        prompt_tokens=250.0,
        output_tokens=230.0,
    )


def _lower_bound(profile: CostModel, demand: Demand) -> float:
    """Return the optimum of the linear program that may divide adapters among GPUs in any shares, and
    counts each request as if its adapter were alone on a GPU: as other adapters beside it only cost more, no
    plan that the judge finds good takes fewer GPUs. As all GPUs are equal, that optimum is the sum of the
    shares."""
    judge = SteadyStateJudge(profile, demand)
    most = {
        rank: judge.most_tok_s(np.array([1.0]), np.array([float(rank)]))
        for rank in {each.rank for each in demand.adapters}
    }
    return sum(
        STARVED_BELOW * each.rate_rps * judge.request_tokens / most[each.rank] for each in demand.adapters
    )
