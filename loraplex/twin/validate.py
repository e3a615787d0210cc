"""Predicts recorded runs from other ones, and reports the errors.

Runs to be predicted are removed from the runs to fit to, whatever file they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from loraplex.core.errors import UserError
from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin.calibrate import Progress, Run, calibrate, fit_memory, predict_all
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
    "ttft_all": "ttft_all_s",
}
"""Figure of each score. `ttft_all` only counts runs that record how many requests were sent."""
_NO_MEMORY: Final = "the slots leave too little memory for the longest request"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The prediction of one run. `predicted`: None if its slots are predicted to leave no memory to run in,
    or if there is no profile of its model. `reason`: which of these it is."""

    setup: RunSetup
    predicted: Predicted | None
    offered_tok_s: float
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Profiles fitted to runs, by model. `left_out`: models that could not be fitted, and why."""

    profiles: Mapping[str, SlotProfile]
    book: WorkloadBook
    num_runs: int
    left_out: Mapping[str, str] = field(default_factory=dict)


def fit(
    files: Sequence[RunsFile],
    models: Sequence[str],
    *,
    hardware: str = "one GPU",
    progress: Progress = lambda phase, done: None,
) -> Fitted:
    """Fit profiles of these models to all the files; raise if none can be fitted."""
    runs = _runs(files)
    book = WorkloadBook(runs)
    kv_samples = [sample for file in files for sample in file.kv_samples]
    profiles: dict[str, SlotProfile] = {}
    left_out: dict[str, str] = {}
    for index, model in enumerate(models):
        own = [run for run in runs if run[0].model == model]
        try:
            if not own:
                raise UserError(
                    f"there is no run of {model} to learn from; give a file with others than those to be "
                    "predicted, that say at which rates requests came"
                )
            memory = fit_memory(kv_samples, model, own[0][0].max_running)
            part = partial(_report_part, progress, model, index, len(models))
            profiles[model] = calibrate(own, book, memory, hardware=hardware, progress=part)
        except UserError as error:
            left_out[model] = str(error)
    if not profiles:
        raise UserError("; ".join(left_out.values()) or "no runs to predict")
    return Fitted(profiles=profiles, book=book, num_runs=len(runs), left_out=left_out)


def _report_part(
    progress: Progress, model: str, index: int, num_models: int, phase: str, done: float
) -> None:
    """Report the fit of one of several models as a share of all of them."""
    progress(f"{model}: {phase}", (index + done) / num_models)


def fit_for(
    setups: Sequence[RunSetup],
    files: Sequence[RunsFile],
    *,
    progress: Progress = lambda phase, done: None,
) -> Fitted:
    """Fit everything needed to predict these runs, without using them."""
    keys = [setup.key for setup in setups]
    models = sorted({setup.model for setup in setups})
    return fit([without(file, keys) for file in files], models, progress=progress)


def predict(
    fitted: Fitted, setups: Sequence[RunSetup], *, progress: Progress = lambda phase, done: None
) -> list[Prediction]:
    """Return predictions in the order of `setups`."""
    found: dict[str, Predicted | None] = {}
    num_done = 0

    def on_done() -> None:
        nonlocal num_done
        num_done += 1
        progress("simulating runs", num_done / len(setups))

    for model, profile in fitted.profiles.items():
        own = [setup for setup in setups if setup.model == model]
        predicted = predict_all(profile, fitted.book, own, on_done)
        found.update(zip((s.key for s in own), predicted, strict=True))
    return [_prediction(fitted, setup, found.get(setup.key)) for setup in setups]


def _prediction(fitted: Fitted, setup: RunSetup, predicted: Predicted | None) -> Prediction:
    if setup.model not in fitted.profiles:
        why = fitted.left_out.get(setup.model, f"there is no profile of {setup.model}")
        return Prediction(setup=setup, predicted=None, offered_tok_s=0.0, reason=why)
    return Prediction(
        setup=setup,
        predicted=predicted,
        offered_tok_s=fitted.book.offered_tok_s(setup),
        reason=_NO_MEMORY if predicted is None else None,
    )


def report(predictions: Sequence[Prediction], measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the scores over all runs that were measured and predicted, and every row. `not_predicted`:
    number of runs in no score by reason, measured or not."""
    not_predicted = Counter(each.reason for each in predictions if each.reason is not None)
    pairs = [
        (each, each.predicted, measured[each.setup.key])
        for each in predictions
        if each.predicted is not None and each.setup.key in measured
    ]
    if not pairs:
        why = "".join(f"; {count} not predicted: {reason}" for reason, count in not_predicted.items())
        raise UserError(f"none of the runs to predict has figures to compare with{why}")
    starved = [(p.is_starved, m.total_tok_s < STARVED_BELOW * each.offered_tok_s) for each, p, m in pairs]
    return {
        "smape": {
            name: smape(values)
            for name, measure in MEASURES.items()
            if (values := _values([(p, m) for _, p, m in pairs], measure))
        },
        "starvation_f1": macro_f1(starved),
        "num_compared": len(pairs),
        "num_starved": sum(m for _, m in starved),
        "num_not_predicted": not_predicted.total(),
        "not_predicted": dict(not_predicted),
        "rows": [_row(each, measured.get(each.setup.key)) for each in predictions],
    }


def _values(pairs: Sequence[tuple[Predicted, Measured]], measure: str) -> list[tuple[float, float]]:
    """Return (predicted, measured) of a figure, for the runs in which it was measured."""
    found = ((getattr(p, measure), getattr(m, measure)) for p, m in pairs)
    return [(predicted, measured) for predicted, measured in found if measured is not None]


def _row(each: Prediction, found: Measured | None) -> dict[str, Any]:
    return {
        "key": each.setup.key,
        "model": each.setup.model,
        "offered_tok_s": each.offered_tok_s,
        "predicted": None if each.predicted is None else asdict(each.predicted),
        "reason": each.reason,
        "measured": None if found is None else asdict(found),
    }


def _runs(files: Sequence[RunsFile]) -> list[Run]:
    """Return each run once, though several files may contain it."""
    runs = {
        setup.key: (setup, file.measured[setup.key])
        for file in files
        for setup in file.setups
        if setup.key in file.measured
    }
    return list(runs.values())
