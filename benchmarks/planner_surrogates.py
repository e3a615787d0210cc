"""Surrogates on recorded runs and on simulated ones: their errors, and the time of a prediction."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np

from benchmarks.planner_data import (
    ALL_RUNS,
    HELD_OUT,
    MODELS,
    Asked,
    Model,
    Recorded,
    dataset_of,
    features_of_run,
    profile_of,
    recorded_runs,
)
from loraplex.planner.features import FEATURE_NAMES, NUM_PAPER_FEATURES
from loraplex.planner.rules import compiled_rules, rules_source
from loraplex.planner.searches import ModelKind
from loraplex.planner.surrogate import Surrogate
from loraplex.planner.training import capacity_forest, r_squared, split, train, train_forest, train_small_tree
from loraplex.planner.trees import Forest, tree_of
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.predict_run import predict_run, run_limits
from loraplex.twin.recorded_runs import read_runs, without
from loraplex.twin.run_workload import WorkloadBook
from loraplex.twin.scores import in_authors_unit, macro_f1, smape

_REPEATS: Final = 5
_NUM_TIMED: Final = 1_000_000
_NUM_CALLED: Final = 100_000
_LONGEST: Final = 3000
_NEAR_LIMIT: Final = 0.05
"""Recorded runs are counted that serve within so much of 0.9, relatively."""
_SIZES: Final = (250, 500, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 10_000)
_MOST_SAMPLES: Final = 3


@cache
def forest(model: Model, num_rows: int) -> Surrogate:
    return train_forest(dataset_of(model, num_rows))


@cache
def small_tree(model: Model, num_rows: int) -> Surrogate:
    return train_small_tree(dataset_of(model, num_rows))


def on_recorded(runs: Sequence[Recorded], throughput_tok_s: Any, is_starved: Any) -> dict[str, Any]:
    """Score predictions of runs that were measured. Of the misjudged, give the place among the runs, and the
    shares of the offered tokens that were served."""
    measured = [each.measured.total_tok_s for each in runs]
    starved = [not each.is_feasible for each in runs]
    return {
        "num_runs": len(runs),
        "num_starved": sum(starved),
        "smape_authors_unit": in_authors_unit(smape(list(zip(throughput_tok_s, measured, strict=True)))),
        "r2": r_squared(np.array(throughput_tok_s), np.array(measured)),
        "starvation_macro_f1": macro_f1(list(zip(map(bool, is_starved), starved, strict=True))),
        "num_misjudged": sum(bool(one) != other for one, other in zip(is_starved, starved, strict=True)),
        "misjudged": [
            {
                "run": number,
                "measured": run.measured.total_tok_s / run.offered_tok_s,
                "predicted": float(throughput_tok_s[number]) / run.offered_tok_s,
            }
            for number, run in enumerate(runs)
            if bool(is_starved[number]) != starved[number]
        ],
    }


def _near_limit(runs: Sequence[Recorded]) -> int:
    shares = [each.measured.total_tok_s / each.offered_tok_s / STARVED_BELOW for each in runs]
    return sum(abs(share - 1) <= _NEAR_LIMIT for share in shares)


def surrogates(asked: Asked) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        rows, held_out = split(dataset_of(model, asked.num_rows))
        runs = recorded_runs(asked.data / HELD_OUT, model)
        features = np.array([features_of_run(each.setup) for each in runs])
        began_s = time.perf_counter()
        ours = train_forest(dataset_of(model, asked.num_rows))
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
                "options": {name: dict(each) for name, each in trained.options.items()},
                "train_s": trained.train_s,
                "microseconds": _microseconds(partial(trained.throughput.predict, wide[:1]), 200),
            }
        for name, mean_lengths in (("the twin itself", False), ("the twin, mean lengths", True)):
            found[name] = by_twin(asked.data, model, runs, mean_lengths=mean_lengths)
        cases[model.name] = {
            "num_near_limit": _near_limit(runs),
            "models": found,
        }
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


def rows(asked: Asked) -> dict[str, Any]:
    """Train with ever more rows, and with several samples of the same size as far as there are."""
    cases: dict[str, Any] = {}
    for model in MODELS:
        dataset = dataset_of(model, asked.num_rows)
        runs = recorded_runs(asked.data / HELD_OUT, model)
        features = np.array([features_of_run(each.setup) for each in runs])
        found = []
        for size in [each for each in _SIZES if each <= asked.num_rows]:
            for sample in range(min(asked.num_rows // size, _MOST_SAMPLES)):
                part = dataset.subset(slice(sample * size, (sample + 1) * size))
                scores = on_recorded(runs, *capacity_forest(part).predict_all(features))
                found.append({"num_rows": size, "sample": sample, **scores})
        cases[model.name] = found
        print(f"rows: {model.name}", file=sys.stderr, flush=True)
    return {"models": cases}


def rules(asked: Asked) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        began_s = time.perf_counter()
        found = train_small_tree(dataset_of(model, asked.num_rows))
        train_s = time.perf_counter() - began_s
        runs = recorded_runs(asked.data / HELD_OUT, model)
        features = np.array([features_of_run(each.setup) for each in runs])
        cases[model.name] = {
            **on_recorded(runs, *found.predict_all(features)),
            "simulated": dict(found.accuracy),
            "num_rules": [each.num_rules for each in _trees(found)],
            "train_s": train_s,
            "prediction_ns": [_nanoseconds(each, FEATURE_NAMES, features) for each in _trees(found)],
            "called_ns": [_called_nanoseconds(each, FEATURE_NAMES, features) for each in _trees(found)],
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


def _called_nanoseconds(forest: Forest, names: Sequence[str], features: Any) -> float:
    """Return the time of a prediction by the compiled rules, called from Python with numbers."""
    predict = compiled_rules(rules_source(tree_of(forest), names, "predict"), "predict")
    row = features.astype(np.float64)[0].tolist()
    return min(_microseconds(partial(predict, *row), _NUM_CALLED) for _ in range(_REPEATS)) * 1e3


def recorded(asked: Asked) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for model in MODELS:
        runs = recorded_runs(asked.data / ALL_RUNS, model)
        held_out = {each.setup.key for each in recorded_runs(asked.data / HELD_OUT, model)}
        profile, surrogate = profile_of(model), forest(model, asked.num_rows)
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
            predicted = fits is not None and not surrogate.predict(features_of_run(setup)).is_starved
            rights.append((predicted == each.is_feasible, setup.key in held_out))
        cases[model.name] = {
            "num_runs": len(runs),
            "num_feasible": sum(each.is_feasible for each in runs),
            "num_right": sum(right for right, _ in rights),
            "num_held_out": sum(held for _, held in rights),
            "num_held_out_right": sum(right for right, held in rights if held),
        }
    return {"models": cases}
