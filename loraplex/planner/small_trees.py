"""Fewer and better rules for a small tree that predicts throughput.

A GPU that keeps up serves what is offered, in proportion to the rate; one that does not serves what it can,
whatever the rate. A rule that may say either needs no further rules for each step of the rate. Trees are
grown too large, with constants; then such leaves are fitted, and those that say nearly the same are merged.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.planner.features import SUM_RATE
from loraplex.planner.trees import LEAF, LEAF_PER_RATE, Tree
from loraplex.twin.slot_state import Floats

_QUANTILES: Final = np.linspace(0.02, 0.98, 49)
"""Candidates for a leaf's number, among the values of its rows."""


def pruned(tree: Tree, features: Floats, throughput_tok_s: Floats, max_rules: int) -> Tree:
    """Return a tree of at most `max_rules`: inner nodes become leaves where this adds least to the SMAPE for
    these rows. Each leaf's number, as it is or per rate, is the best one for its rows."""
    root = _Fitted.of(tree, features, throughput_tok_s)
    number = itertools.count()  # makes entries of the same error comparable
    ready = [(node.added, next(number), node) for node in root.walk() if node.is_ready]
    heapq.heapify(ready)
    num_rules = tree.num_leaves
    while ready and (num_rules > max_rules or ready[0][0] <= 0.0):
        node = heapq.heappop(ready)[-1]
        node.left = node.right = None
        num_rules -= 1
        if node.parent is not None and node.parent.is_ready:
            heapq.heappush(ready, (node.parent.added, next(number), node.parent))
    return root.as_tree()


@dataclass(slots=True, eq=False)
class _Fitted:
    """A node with the best leaf that it could become, and the error of that."""

    node: Tree
    leaf: Tree
    error: float
    parent: _Fitted | None = None
    left: _Fitted | None = None
    right: _Fitted | None = None

    @classmethod
    def of(cls, tree: Tree, features: Floats, throughput_tok_s: Floats) -> _Fitted:
        leaf, error = _best_leaf(tree, features[:, SUM_RATE], throughput_tok_s)
        found = cls(tree, leaf, error)
        if tree.left is not None and tree.right is not None:
            is_left = features[:, tree.feature].astype(np.float32) <= tree.number
            found.left = cls.of(tree.left, features[is_left], throughput_tok_s[is_left])
            found.right = cls.of(tree.right, features[~is_left], throughput_tok_s[~is_left])
            found.left.parent = found.right.parent = found
        return found

    @property
    def is_ready(self) -> bool:
        """Return whether both children are leaves."""
        if self.left is None or self.right is None:
            return False
        return self.left.left is None and self.right.left is None

    @property
    def added(self) -> float:
        """Return the error that is added if the node becomes a leaf."""
        assert self.left is not None
        assert self.right is not None
        return self.error - self.left.error - self.right.error

    def walk(self) -> list[_Fitted]:
        below = [each for child in (self.left, self.right) if child is not None for each in child.walk()]
        return [self, *below]

    def as_tree(self) -> Tree:
        if self.left is None or self.right is None:
            return self.leaf
        return self.node._replace(left=self.left.as_tree(), right=self.right.as_tree())


def _best_leaf(node: Tree, rates: Floats, throughput_tok_s: Floats) -> tuple[Tree, float]:
    """Return the leaf with the least error, and the sum of |p - m| / (p + m) over the rows."""
    if len(rates) == 0:
        return Tree(LEAF, node.number), 0.0
    found = []
    for kind, per in ((LEAF, np.ones_like(rates)), (LEAF_PER_RATE, rates)):
        numbers = np.quantile(throughput_tok_s / per, _QUANTILES)
        predicted = numbers[:, None] * per
        sums = predicted + throughput_tok_s
        # Both are zero where nothing was served, and predicted to be.
        errors = np.abs(predicted - throughput_tok_s) / np.where(sums > 0, sums, 1.0)
        best = int(errors.sum(axis=1).argmin())
        found.append((float(errors[best].sum()), kind, float(numbers[best])))
    error, kind, number = min(found)
    return Tree(kind, number), error
