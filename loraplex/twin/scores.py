"""How far predictions are from what was measured."""

from __future__ import annotations

from collections.abc import Sequence


def smape(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (predicted, measured): the mean of |p - m| / ((|p| + |m|) / 2), in percent."""
    assert pairs, "nothing to compare"
    terms = [200 * abs(p - m) / (abs(p) + abs(m)) if p or m else 0.0 for p, m in pairs]
    return sum(terms) / len(terms)


def macro_f1(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Of (predicted, measured): the mean of both classes' F1. A class that neither side has counts as 1."""
    assert pairs, "nothing to compare"
    return (_f1(pairs, True) + _f1(pairs, False)) / 2


def _f1(pairs: Sequence[tuple[bool, bool]], label: bool) -> float:
    hits = sum(p == m == label for p, m in pairs)
    misses = sum(p != m for p, m in pairs)
    return 2 * hits / (2 * hits + misses) if hits + misses else 1.0
