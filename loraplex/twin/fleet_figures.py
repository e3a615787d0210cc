"""The figures that policies are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final

import numpy as np

from loraplex.twin.fleet import FleetOutcome
from loraplex.twin.slo import Slo


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFigures:
    """One run, or the mean of several.

    `attainment`: share of requests that attain the SLO, without the `num_undecided` that the end of the run
    interrupted while they were within it; None if there are no others. `tpot_mean_s`: seconds per token after
    the first. `tpt_mean_s`: seconds per token, from arrival to end. `busiest_over_mean`: ratio of tokens
    served. `bytes_moved`: bytes of adapters copied to the replicas' hosts; None if their sizes are not known.
    Figures of requests are None if none was served.
    """

    attainment: float | None
    num_undecided: float
    ttft_p95_s: float | None
    tpot_mean_s: float | None
    tpt_mean_s: float | None
    adapter_loads: float
    busiest_over_mean: float
    bytes_moved: float | None


NAMES: Final = tuple(field.name for field in fields(PolicyFigures))
_STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95% quantiles with 1, 2, ... degrees of freedom; beyond, the last one, which overestimates."""


def figures_of(outcome: FleetOutcome, slo: Slo) -> PolicyFigures:
    summary = outcome.all.summary()
    ttft_s, tpot_s, tpt_s = summary["ttft_s"], outcome.all.tpot_percentiles(), summary["tpt_s"]
    tokens = [each.num_tokens for each in outcome.replicas]
    mean = sum(tokens) / len(tokens)
    counts = outcome.all.slo_counts(slo)
    return PolicyFigures(
        attainment=counts.attainment,
        num_undecided=counts.num_undecided,
        ttft_p95_s=None if ttft_s is None else ttft_s["p95"],
        tpot_mean_s=None if tpot_s is None else tpot_s["mean"],
        tpt_mean_s=None if tpt_s is None else tpt_s["mean"],
        adapter_loads=outcome.all.num_loads,
        busiest_over_mean=max(tokens) / mean if mean else 1.0,
        bytes_moved=outcome.bytes_moved,
    )


def mean_of(runs: Sequence[PolicyFigures]) -> PolicyFigures:
    """Return the mean of each figure over the runs that have it."""
    means = {name: _mean([getattr(each, name) for each in runs]) for name in NAMES}
    return PolicyFigures(**means)  # type: ignore[arg-type]


def interval_of(runs: Sequence[PolicyFigures]) -> dict[str, float]:
    """Return half the width of each mean's 95% confidence interval, by Student's distribution."""
    found: dict[str, float] = {}
    for name in NAMES:
        values = [value for each in runs if (value := asdict(each)[name]) is not None]
        half = half_interval(values)
        if half is not None:
            found[name] = half
    return found


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95% confidence interval; None for a single value."""
    if len(values) < 2:
        return None
    factor = _STUDENT[min(len(values), len(_STUDENT) + 1) - 2]
    return float(factor * np.std(values, ddof=1) / np.sqrt(len(values)))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
