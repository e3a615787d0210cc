"""Predicts recorded runs from other ones, and tells how far off that is.

Runs that are among those to be predicted are taken out of those to fit to, whatever file they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from loraplex.core.errors import UserError
from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin.calibrate import Run, calibrate, fit_memory, predict_all
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.predict_run import Predicted
from loraplex.twin.recorded_runs import Measured, RunSetup, RunsFile, without
from loraplex.twin.run_workload import WorkloadBook
from loraplex.twin.scores import macro_f1, smape

MEASURES: Final = {
    "output_throughput": "output_tok_s",
    "total_throughput": "total_tok_s",
    "itl": "itl_s",
    "ttft": "ttft_s",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Of one run; `predicted`: None if its slots are predicted to leave no memory to run in, or if there is
    no profile of its model."""

    setup: RunSetup
    predicted: Predicted | None
    offered_tok_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What was learnt from the runs to fit to, by model. `left_out`: models that no profile could be made of,
    and why."""

    profiles: Mapping[str, SlotProfile]
    book: WorkloadBook
    num_runs: int
    left_out: Mapping[str, str] = field(default_factory=dict)


def fit(
    files: Sequence[RunsFile],
    models: Sequence[str],
    *,
    hardware: str = "one GPU",
    progress: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """Profiles of these models, from all the files; raises if there is none that can be made."""
    runs = _runs(files)
    book = WorkloadBook(runs)
    kv_samples = [sample for file in files for sample in file.kv_samples]
    profiles: dict[str, SlotProfile] = {}
    left_out: dict[str, str] = {}
    for model in models:
        own = [run for run in runs if run[0].model == model]
        try:
            if not own:
                raise UserError(f"no run of {model} in the files to learn from; give one that has some")
            memory = fit_memory(kv_samples, model, own[0][0].max_running)
            say = partial(_say_of, model, progress)
            profiles[model] = calibrate(own, book, memory, hardware=hardware, progress=say)
        except UserError as error:
            left_out[model] = str(error)
    if not profiles:
        raise UserError("; ".join(left_out.values()) or "no runs to predict")
    return Fitted(profiles=profiles, book=book, num_runs=len(runs), left_out=left_out)


def _say_of(model: str, progress: Callable[[str], None], text: str) -> None:
    progress(f"{model}: {text}")


def fit_for(
    setups: Sequence[RunSetup],
    files: Sequence[RunsFile],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """All that is needed to predict these runs, from none of them."""
    keys = [setup.key for setup in setups]
    models = sorted({setup.model for setup in setups})
    return fit([without(file, keys) for file in files], models, progress=progress)


def predict(fitted: Fitted, setups: Sequence[RunSetup]) -> list[Prediction]:
    """In their order."""
    found: dict[str, Predicted | None] = {}
    for model, profile in fitted.profiles.items():
        own = [setup for setup in setups if setup.model == model]
        found.update(zip((s.key for s in own), predict_all(profile, fitted.book, own), strict=True))
    return [
        Prediction(
            setup=setup,
            predicted=found.get(setup.key),
            offered_tok_s=fitted.book.offered_tok_s(setup) if setup.key in found else 0.0,
        )
        for setup in setups
    ]


def report(predictions: Sequence[Prediction], measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Scores over all runs that were measured and predicted, and every row."""
    pairs = [
        (each, each.predicted, measured[each.setup.key])
        for each in predictions
        if each.predicted is not None and each.setup.key in measured
    ]
    if not pairs:
        raise UserError("none of the runs to predict has figures to compare with")
    starved = [(p.is_starved, m.total_tok_s < STARVED_BELOW * each.offered_tok_s) for each, p, m in pairs]
    return {
        "smape": {
            name: smape([(getattr(p, measure), getattr(m, measure)) for _, p, m in pairs])
            for name, measure in MEASURES.items()
        },
        "starvation_f1": macro_f1(starved),
        "num_compared": len(pairs),
        "num_starved": sum(m for _, m in starved),
        "rows": [_row(each, measured.get(each.setup.key)) for each in predictions],
    }


def _row(each: Prediction, found: Measured | None) -> dict[str, Any]:
    return {
        "key": each.setup.key,
        "model": each.setup.model,
        "offered_tok_s": each.offered_tok_s,
        "predicted": None if each.predicted is None else asdict(each.predicted),
        "measured": None if found is None else asdict(found),
    }


def _runs(files: Sequence[RunsFile]) -> list[Run]:
    """Each run once, though several files may have it."""
    runs = {
        setup.key: (setup, file.measured[setup.key])
        for file in files
        for setup in file.setups
        if setup.key in file.measured
    }
    return list(runs.values())
