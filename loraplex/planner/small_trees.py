"""Better leaves for a small tree that predicts throughput.

A GPU that keeps up serves what is offered, in proportion to the rate; one that does not serves what it can,
whatever the rate. A rule that may say either needs no further rules for each step of the rate.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loraplex.planner.features import SUM_RATE
from loraplex.planner.trees import LEAF, LEAF_PER_RATE, Tree
from loraplex.twin.slot_state import Floats

_QUANTILES: Final = np.linspace(0.02, 0.98, 49)
"""Candidates for a leaf's number, among the values of its rows."""


def with_best_leaves(tree: Tree, features: Floats, throughput_tok_s: Floats) -> Tree:
    """Return the tree with the number in each leaf, as it is or per rate, that has the least SMAPE for these
    rows."""
    if tree.left is None or tree.right is None:
        return _best_leaf(tree, features[:, SUM_RATE], throughput_tok_s)
    is_left = features[:, tree.feature].astype(np.float32) <= tree.number
    return tree._replace(
        left=with_best_leaves(tree.left, features[is_left], throughput_tok_s[is_left]),
        right=with_best_leaves(tree.right, features[~is_left], throughput_tok_s[~is_left]),
    )


def _best_leaf(leaf: Tree, rates: Floats, throughput_tok_s: Floats) -> Tree:
    if len(rates) == 0:
        return leaf
    found = []
    for kind, per in ((LEAF, np.ones_like(rates)), (LEAF_PER_RATE, rates)):
        numbers = np.quantile(throughput_tok_s / per, _QUANTILES)
        predicted = numbers[:, None] * per
        sums = predicted + throughput_tok_s
        # Both are zero where nothing was served, and predicted to be.
        errors = np.abs(predicted - throughput_tok_s) / np.where(sums > 0, sums, 1.0)
        best = int(errors.sum(axis=1).argmin())
        found.append((float(errors[best].sum()), kind, float(numbers[best])))
    _, kind, number = min(found)
    return Tree(kind, number)
