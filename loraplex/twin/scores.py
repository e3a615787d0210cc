"""Errors of predictions against measurements.

Two definitions of SMAPE are in use: ours divides by the mean of both values and has a maximum of 200%, that
of the authors of the recorded runs divides by their sum and has a maximum of 100%. Only figures of the same
definition are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence


def smape(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean of |p - m| / ((|p| + |m|) / 2) over (predicted, measured), in percent."""
    assert pairs, "nothing to compare"
    terms = [200 * abs(p - m) / (abs(p) + abs(m)) if p or m else 0.0 for p, m in pairs]
    return sum(terms) / len(terms)


def in_authors_unit(percent: float) -> float:
    """Convert a SMAPE as `smape` returns it into the mean of |p - m| / (|p| + |m|), in percent."""
    return percent / 2


def ttft_of_all(ttft_s: float, *, num_completed: float, num_sent: float, duration_s: float) -> float:
    """Return the mean TTFT by the authors' definition, from that of the requests that completed.

    A request that did not complete counts with the duration of the run, so that an engine gains nothing by
    leaving requests unanswered.
    """
    num_unfinished = max(num_sent - num_completed, 0.0)
    return (ttft_s * num_completed + duration_s * num_unfinished) / (num_completed + num_unfinished)


def macro_f1(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Return the mean F1 of both classes over (predicted, measured). A class that neither side has counts as
    1."""
    assert pairs, "nothing to compare"
    return (_f1(pairs, True) + _f1(pairs, False)) / 2


def _f1(pairs: Sequence[tuple[bool, bool]], label: bool) -> float:
    hits = sum(p == m == label for p, m in pairs)
    misses = sum(p != m for p, m in pairs)
    return 2 * hits / (2 * hits + misses) if hits + misses else 1.0
