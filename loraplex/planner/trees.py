"""Decision trees and forests as flat arrays, evaluated by compiled code.

Nodes are in preorder: the left child of an inner node follows it, `right` is the other one.

| feature   | number      | meaning                                                  |
|-----------|-------------|----------------------------------------------------------|
| 0, 1, ... | threshold   | left if the feature is at most the threshold, else right |
| LEAF      | value       | the value itself                                         |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from loraplex.planner.features import Features
from loraplex.twin.slot_state import Floats, Ints

LEAF: Final = -1

Node = tuple[int, float]
"""Feature and number."""


class Forest(NamedTuple):
    """Trees behind one another; the forest's value is the mean of theirs. `roots`: index of each tree's first
    node. `right`: an index among the nodes of all trees; 0 for leaves."""

    roots: Ints
    feature: npt.NDArray[np.int8]
    number: Floats
    right: npt.NDArray[np.int32]

    @property
    def num_rules(self) -> int:
        """Return the number of leaves: each is a rule, with the conditions on the way to it."""
        return int((self.feature < 0).sum())

    def value(self, features: Features) -> float:
        return float(forest_value(self, features))

    def values(self, features: npt.NDArray[np.float32]) -> Floats:
        """Return the values of many queries, one per row."""
        found: Floats = forest_values(self, np.ascontiguousarray(features, np.float32))
        return found


@numba.njit(cache=True, nogil=True)
def forest_value(forest, features):  # type: ignore[no-untyped-def]
    total = 0.0
    for root in forest.roots:
        at = root
        while forest.feature[at] >= 0:
            at = at + 1 if features[forest.feature[at]] <= forest.number[at] else forest.right[at]
        total += forest.number[at]
    return total / len(forest.roots)


@numba.njit(cache=True, nogil=True)
def forest_values(forest, features):  # type: ignore[no-untyped-def]
    found = np.empty(len(features))
    for row in range(len(features)):
        found[row] = forest_value(forest, features[row])
    return found


class Tree(NamedTuple):
    """A tree as nested nodes, to be changed or written out. A leaf has no children."""

    feature: int
    number: float
    left: Tree | None = None
    right: Tree | None = None

    @property
    def num_leaves(self) -> int:
        return sum(1 for each in self.walk() if each.left is None)

    def walk(self) -> Sequence[Tree]:
        """Return all nodes in preorder."""
        found, left = [], [self]
        while left:
            node = left.pop()
            found.append(node)
            if node.left is not None and node.right is not None:
                left += (node.right, node.left)
        return found


def collapsed(tree: Tree) -> Tree:
    """Return the same function without splits whose two sides are equal leaves."""
    if tree.left is None or tree.right is None:
        return tree
    left, right = collapsed(tree.left), collapsed(tree.right)
    if left.left is None and right.left is None and left == right:
        return left
    return tree._replace(left=left, right=right)


def forest_of(trees: Sequence[Tree]) -> Forest:
    roots: list[int] = []
    features: list[int] = []
    numbers: list[float] = []
    rights: list[int] = []

    for tree in trees:
        roots.append(len(features))
        # Each entry: a node, and the inner node whose right child it is.
        left: list[tuple[Tree, int | None]] = [(tree, None)]
        while left:
            node, parent = left.pop()
            if parent is not None:
                rights[parent] = len(features)
            if node.left is not None and node.right is not None:
                left += ((node.right, len(features)), (node.left, None))
            features.append(node.feature)
            numbers.append(node.number)
            rights.append(0)
    return Forest(
        roots=np.array(roots, np.int64),
        feature=np.array(features, np.int8),
        number=np.array(numbers, np.float64),
        right=np.array(rights, np.int32),
    )


def tree_of(forest: Forest) -> Tree:
    """Return the only tree of a forest."""
    assert len(forest.roots) == 1, "several trees"
    feature, number, right = forest.feature.tolist(), forest.number.tolist(), forest.right.tolist()

    def node(at: int) -> Tree:
        if feature[at] < 0:
            return Tree(feature[at], number[at])
        return Tree(feature[at], number[at], node(at + 1), node(right[at]))

    return node(0)


def mapped_leaves(forest: Forest, change: Callable[[Floats], Floats]) -> Forest:
    """Return the forest with other values in its leaves."""
    is_leaf = forest.feature < 0
    number = forest.number.copy()
    number[is_leaf] = change(number[is_leaf])
    return forest._replace(number=number)
