"""The planner's numbers: surrogates on recorded runs, times to plan, plans that hold, and GPUs they take.

    python -m benchmarks.planner --data FOLDER                 all sections, hours without cached datasets
    python -m benchmarks.planner plan_speed own                these; the others keep their figures

Writes results/planner.json.

surrogates  throughput and starvation on recorded runs of vLLM that no profile was fitted to; time to train
rules       the same for one tree of at most 32 rules; nanoseconds of a prediction
plan_speed  seconds to plan 1,280 adapters on four GPUs, by the accurate surrogate and by the small tree
scenarios   the paper's scenarios with Llama: GPUs by packer, and whether the plan starves any by other seeds
scenarios_qwen   the same with Qwen
recorded    single GPUs with the settings of recorded runs: whether they are foretold to serve what is asked
own         10,000 adapters on GPUs with our own engine: GPUs against a lower bound, checked by the twin

`--data` is the folder with the recorded runs of the authors of the digital twin (agullo_*.csv.gz), which
`surrogates`, `rules` and `recorded` need.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numba
import numpy as np

from benchmarks.planner_data import (
    ALL_RUNS,
    HELD_OUT,
    MODELS,
    Model,
    Recorded,
    dataset_of,
    features_of_run,
    profile_of,
    recorded_runs,
)
from benchmarks.planner_scenarios import Scenario, scenarios
from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.errors import UserError
from loraplex.core.whole_file import write_whole
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.planner.check import SEEDS
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.features import FEATURE_NAMES, NUM_PAPER_FEATURES
from loraplex.planner.judge import Judge
from loraplex.planner.make import make_plan, packer_of
from loraplex.planner.packing.improve import LocalImprovement, improve
from loraplex.planner.packing.least_gpus import least_gpus
from loraplex.planner.packing.max_base import MaxBase
from loraplex.planner.packing.max_pack import MaxPack
from loraplex.planner.packing.packer import Packer
from loraplex.planner.packing.random_packing import RandomPacking
from loraplex.planner.packing.testing_points import SLOT_COUNTS
from loraplex.planner.plan import GpuPlan
from loraplex.planner.rules import compiled_rules, rules_source
from loraplex.planner.searches import ModelKind
from loraplex.planner.steady_state import MARGIN, SteadyStateJudge
from loraplex.planner.surrogate import Surrogate, SurrogateJudge
from loraplex.planner.training import (
    split,
    train,
    train_forest,
    train_small_tree,
)
from loraplex.planner.trees import Forest, tree_of
from loraplex.planner.trial import TwinJudge, most_of_base_model, run_gpu
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.predict_run import predict_run, run_limits
from loraplex.twin.recorded_runs import read_runs, without
from loraplex.twin.run_workload import WorkloadBook
from loraplex.twin.scores import in_authors_unit, macro_f1, smape

RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "planner.json"
NUM_ROWS: Final = 1500
MOST_GPUS: Final = 4
MOST_JUDGEMENTS: Final = 20_000
CHECKED_S: Final = 900.0
_REPEATS: Final = 5
_NUM_TIMED: Final = 1_000_000
_LONGEST: Final = 3000
_OWN: Final = "h200-llama-2-7b"
_OWN_ADAPTERS, _OWN_RPS, _OWN_SKEW, _OWN_GPUS = 10_000, 2300.0, 0.6, 64
_OWN_SECONDS, _OWN_SEEDS = 240.0, (1,)


@cache
def forest(model: Model) -> Surrogate:
    return train_forest(dataset_of(model, NUM_ROWS))


@cache
def small_tree(model: Model) -> Surrogate:
    return train_small_tree(dataset_of(model, NUM_ROWS))


def on_recorded(runs: Sequence[Recorded], throughput_tok_s: Any, is_starved: Any) -> dict[str, Any]:
    """Score predictions of runs that were measured."""
    measured = [each.measured.total_tok_s for each in runs]
    starved = [not each.is_feasible for each in runs]
    return {
        "num_runs": len(runs),
        "num_starved": sum(starved),
        "smape_authors_unit": in_authors_unit(smape(list(zip(throughput_tok_s, measured, strict=True)))),
        "starvation_macro_f1": macro_f1(list(zip(map(bool, is_starved), starved, strict=True))),
        "num_misjudged": sum(bool(one) != other for one, other in zip(is_starved, starved, strict=True)),
    }


def surrogates(data: Path) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        rows, held_out = split(dataset_of(model, NUM_ROWS))
        runs = recorded_runs(data / HELD_OUT, model)
        features = np.array([features_of_run(each.setup) for each in runs])
        began_s = time.perf_counter()
        ours = forest(model)
        train_s = time.perf_counter() - began_s
        found = {
            "boosted trees of the capacity": {
                **on_recorded(runs, *ours.predict_all(features)),
                "simulated": dict(ours.accuracy),
                "train_s": train_s,
                "microseconds": _microseconds(partial(ours.predict, features[0])),
            }
        }
        for kind in ModelKind:
            trained = train(rows, kind, num_jobs=None)
            wide = features[:, :NUM_PAPER_FEATURES].astype(np.float64)
            found[f"as the paper, {kind.value}"] = {
                **on_recorded(runs, trained.throughput.predict(wide), trained.starvation.predict(wide)),
                "simulated": trained.accuracy(held_out),
                "train_s": trained.train_s,
            }
        for name, mean_lengths in (("the twin itself", False), ("the twin, mean lengths", True)):
            found[name] = by_twin(data, model, runs, mean_lengths=mean_lengths)
        cases[model.name] = {"num_rows": NUM_ROWS, "models": found}
        print(f"surrogates: {model.name}", file=sys.stderr, flush=True)
    return {"models": cases}


def by_twin(data: Path, model: Model, runs: Sequence[Recorded], *, mean_lengths: bool) -> dict[str, Any]:
    """Score the twin on the same runs. It knows each adapter's rate, and from other runs how many requests
    were sent."""
    others = without(read_runs(data / ALL_RUNS), [each.setup.key for each in runs])
    known = [(each, others.measured[each.key]) for each in others.setups if each.key in others.measured]
    book = WorkloadBook(known, mean_lengths=mean_lengths)
    predicted = [predict_run(profile_of(model), book, each.setup) for each in runs]
    return on_recorded(
        runs,
        [0.0 if each is None else each.total_tok_s for each in predicted],
        [each is None or each.is_starved for each in predicted],
    )


def _microseconds(call: Callable[[], object], times: int = 2000) -> float:
    call()
    began_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began_s) / times * 1e6


def rules(data: Path) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        began_s = time.perf_counter()
        found = small_tree(model)
        train_s = time.perf_counter() - began_s
        runs = recorded_runs(data / HELD_OUT, model)
        features = np.array([features_of_run(each.setup) for each in runs])
        cases[model.name] = {
            **on_recorded(runs, *found.predict_all(features)),
            "simulated": dict(found.accuracy),
            "num_rules": [each.num_rules for each in _trees(found)],
            "train_s": train_s,
            "prediction_ns": [_nanoseconds(each, FEATURE_NAMES, features) for each in _trees(found)],
        }
    return {"models": cases}


def _trees(found: Surrogate) -> tuple[Forest, Forest]:
    assert found.starvation is not None
    return found.throughput, found.starvation


def _nanoseconds(forest: Forest, names: Sequence[str], features: Any) -> float:
    """Return the time of a prediction by the compiled rules, called from compiled code."""
    predict = compiled_rules(rules_source(tree_of(forest), names, "predict"), "predict")

    @numba.njit  # type: ignore[untyped-decorator]
    def many(rows: Any, times: int) -> float:
        total = 0.0
        for number in range(times):
            row = rows[number % len(rows)]
            total += predict(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9])
        return total

    rows = features.astype(np.float64)
    many(rows, 1)
    took_s = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        many(rows, _NUM_TIMED)
        took_s.append(time.perf_counter() - began_s)
    return min(took_s) / _NUM_TIMED * 1e9


def judge_by(surrogate: Surrogate, model: Model) -> SurrogateJudge:
    lengths = model.lengths
    return SurrogateJudge(
        surrogate, profile_of(model), prompt_tokens=lengths.prompt, output_tokens=lengths.output
    )


def plan_speed(data: Path) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        demand = Scenario(rates="low", sizes="mixed", num_adapters=1280).demand(model)
        accurate, fast = judge_by(forest(model), model), judge_by(small_tree(model), model)
        packers: dict[str, Packer] = {
            "max-pack, accurate": MaxPack(judge=accurate),
            "max-pack, fast": MaxPack(judge=fast),
            "improved, accurate": LocalImprovement(
                packer=MaxPack(judge=accurate), judge=accurate, most_judgements=MOST_JUDGEMENTS
            ),
        }
        found = {}
        for name, packer in packers.items():
            took_s, plans = [], packer.pack(demand, 2 * MOST_GPUS)
            for _ in range(4 * _REPEATS):
                began_s = time.perf_counter()
                packer.pack(demand, 2 * MOST_GPUS)
                took_s.append(time.perf_counter() - began_s)
            found[name] = {"seconds": median(took_s), "least_s": min(took_s), "num_gpus": len(plans)}
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


def in_scenario(model: Model, scenario: Scenario, base_tok_s: float) -> dict[str, Any]:
    demand = scenario.demand(model)
    quick = judge_by(forest(model), model)
    checked = _Checked(model, demand)
    packers: dict[str, Callable[[], Sequence[GpuPlan]]] = {
        "the paper's": partial(least_gpus, MaxPack(judge=quick), demand, len(demand.adapters)),
        "ours": partial(_ours, model, demand, quick),
        "MaxBase": partial(MaxBase(base_tok_s=base_tok_s).pack, demand, len(demand.adapters)),
        "MaxBase*": partial(
            MaxBase(base_tok_s=base_tok_s, slots_per_adapter=0.5).pack, demand, len(demand.adapters)
        ),
    }
    found: dict[str, Any] = {}
    for name, pack in packers.items():
        found[name] = _outcome(pack, checked)
    # They take all GPUs, and get as many as the paper's needs.
    num_gpus = found["the paper's"]["num_gpus"] or MOST_GPUS
    spreading = {
        "Random": RandomPacking(seed=0),
        "dLoRA": packer_of("dlora", profile_of(model), demand, quick),
    }
    for name, packer in spreading.items():
        found[name] = _outcome(partial(packer.pack, demand, num_gpus), checked)
    if (fewer := (found["ours"]["num_gpus"] or 1) - 1) > 0:
        found["ours"]["share_with_one_fewer"] = _share_of_a_part(model, demand, fewer)
    return found


def _share_of_a_part(model: Model, demand: Demand, num_gpus: int) -> float:
    """Return the share of its tokens that a GPU serves of the adapters divided evenly among so many GPUs,
    with the best number of slots."""
    ordered = sorted(demand.adapters, key=lambda each: (each.rank, each.rate_rps))
    part = tuple(ordered[::num_gpus])
    gpus = [GpuPlan(adapters=part, num_slots=number) for number in SLOT_COUNTS if number <= len(part)]
    runs = [run_gpu(profile_of(model), demand, gpu, duration_s=CHECKED_S, seed=0) for gpu in gpus]
    return max(run.served_tok_s / run.offered_tok_s for run in runs)


def _ours(model: Model, demand: Demand, quick: Judge) -> Sequence[GpuPlan]:
    """Improve the paper's plan by the surrogate; the twin then repairs what it finds starving."""
    packer = LocalImprovement(packer=MaxPack(judge=quick), judge=quick, most_judgements=MOST_JUDGEMENTS)
    plans = packer.pack(demand, len(demand.adapters))
    return improve(plans, demand, TwinJudge(profile_of(model), demand), most_judgements=0)


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


def in_scenarios(model: Model, data: Path) -> dict[str, Any]:
    demand = Scenario(rates="low", sizes="low", num_adapters=1).demand(model)
    base_tok_s = most_of_base_model(profile_of(model), demand)
    cases = {}
    for scenario in scenarios():
        cases[scenario.name] = in_scenario(model, scenario, base_tok_s)
        brief = {
            name: (each["num_gpus"], each.get("num_starved")) for name, each in cases[scenario.name].items()
        }
        print(f"{model.name}, {scenario.name}: {brief}", file=sys.stderr, flush=True)
    return {"model": model.name, "seeds": SEEDS, "checked_s": CHECKED_S, "cases": cases}


def recorded(data: Path) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        runs = recorded_runs(data / ALL_RUNS, model)
        held_out = {each.setup.key for each in recorded_runs(data / HELD_OUT, model)}
        profile, surrogate = profile_of(model), forest(model)
        rights: list[tuple[bool, bool]] = []
        for each in runs:
            setup = each.setup
            fits = run_limits(
                profile,
                num_slots=setup.num_slots,
                max_rank=setup.max_rank,
                longest=_LONGEST,
                duration_s=setup.duration_s,
                max_running=setup.max_running,
            )
            foretold = fits is not None and not surrogate.predict(features_of_run(setup)).is_starved
            rights.append((foretold == each.is_feasible, setup.key in held_out))
        cases[model.name] = {
            "num_runs": len(runs),
            "num_feasible": sum(each.is_feasible for each in runs),
            "num_right": sum(right for right, _ in rights),
            "num_held_out": sum(held for _, held in rights),
            "num_held_out_right": sum(right for right, held in rights if held),
        }
    return {"models": cases}


def own(data: Path) -> dict[str, Any]:
    profile = find_profile(Path(_OWN))
    assert isinstance(profile, CostModel)
    demand = _own_demand()
    began_s = time.perf_counter()
    plan = make_plan(demand, profile, profile_name=_OWN, packer="improved", num_gpus=_OWN_GPUS)
    plan_s = time.perf_counter() - began_s
    runs = []
    for number, gpu in enumerate(plan.gpus):
        for seed in _OWN_SEEDS:
            found = run_gpu(profile, demand, gpu, duration_s=_OWN_SECONDS, seed=seed)
            runs.append(
                {"gpu": number, "seed": seed, "share_served": found.served_tok_s / found.offered_tok_s}
            )
        print(f"own: GPU {number}, {runs[-1]['share_served']:.3f}", file=sys.stderr, flush=True)
    shares = [run["share_served"] for run in runs]
    return {
        "profile": _OWN,
        "num_adapters": len(demand.adapters),
        "rate_rps": _OWN_RPS,
        "num_gpus": len(plan.gpus),
        "plan_s": plan_s,
        "lower_bound_gpus": math.ceil(_lower_bound(profile, demand)),
        "lower_bound": _lower_bound(profile, demand),
        "lower_bound_without_margin": _lower_bound(profile, demand) * MARGIN,
        "checked_s": _OWN_SECONDS,
        "seeds": _OWN_SEEDS,
        "num_starved": sum(share < STARVED_BELOW for share in shares),
        "least_share_served": min(shares),
        "mean_share_served": sum(shares) / len(shares),
    }


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


SECTIONS: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    "surrogates": surrogates,
    "rules": rules,
    "plan_speed": plan_speed,
    "recorded": recorded,
    "scenarios": partial(in_scenarios, MODELS[0]),
    "scenarios_qwen": partial(in_scenarios, MODELS[1]),
    "own": own,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--data", type=Path, default=Path("../shared/data/measurements"))
    parser.add_argument("--out", type=Path, default=RESULTS / FILE)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no section {min(unknown)!r}; there are {', '.join(SECTIONS)}")
    for name in args.sections:
        # Taken first: the code may be edited while this runs.
        here = {
            **environment(("loraplex", "numpy", "numba", "scikit-learn")),
            "sources": fingerprints(FILE, name),
        }
        try:
            found = SECTIONS[name](args.data)
        except UserError as error:
            sys.exit(f"{name}: {error}")
        result = json.loads(args.out.read_text()) if args.out.is_file() else {}
        result[name] = {**here, **found}
        write_whole(args.out, json.dumps(result, indent=1) + "\n")
        print(f"{name} is done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
