"""Trees, and rules written from them, compute the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import NAMES, random_features

from loraplex.planner.rules import compiled_rules, rules_source, rules_text
from loraplex.planner.trees import LEAF, Tree, collapsed, forest_of, mapped_leaves, tree_of

ROWS = random_features(np.random.default_rng(0), 200)


def random_tree(rng: np.random.Generator, depth: int = 0) -> Tree:
    """Return a tree that splits at values which rows have, so that the edges are met."""
    if depth == 6 or rng.random() < 0.25:
        return Tree(LEAF, float(rng.choice((1.0, 2.5))))
    feature = int(rng.integers(len(NAMES)))
    left, right = random_tree(rng, depth + 1), random_tree(rng, depth + 1)
    return Tree(feature, float(rng.choice(ROWS[:, feature])), left, right)


SEEDS = st.integers(0, 2**32)
TREES = SEEDS.map(lambda seed: random_tree(np.random.default_rng(seed)))


def followed(tree: Tree, row: np.ndarray) -> float:
    while tree.left is not None and tree.right is not None:
        tree = tree.left if float(row[tree.feature]) <= tree.number else tree.right
    return tree.number


@given(st.lists(TREES, min_size=1, max_size=4))
def test_a_forest_is_the_mean_of_its_trees(trees: list[Tree]) -> None:
    expected = [np.mean([followed(tree, row) for tree in trees]) for row in ROWS]
    forest = forest_of(trees)
    assert forest.values(ROWS) == pytest.approx(expected)
    assert forest.value(ROWS[0]) == pytest.approx(expected[0])
    assert forest.num_rules == sum(tree.num_leaves for tree in trees)


@given(TREES)
def test_a_collapsed_tree_is_the_same_function_without_needless_splits(tree: Tree) -> None:
    found = collapsed(tree)
    assert (forest_of([found]).values(ROWS) == forest_of([tree]).values(ROWS)).all()
    assert found.num_leaves <= tree.num_leaves
    assert tree_of(forest_of([found])) == found
    for node in found.walk():
        assert node.left is None or node.left.left is not None or node.left != node.right


def test_splits_collapse_from_below() -> None:
    leaf = Tree(LEAF, 1.0)
    assert collapsed(Tree(0, 5.0, leaf, Tree(1, 2.0, leaf, leaf))) == leaf


@given(TREES)
def test_rules_are_the_tree_they_came_from(tree: Tree) -> None:
    source = rules_source(tree, NAMES, "predict")
    found: dict[str, object] = {}
    exec(source, found)
    values = [found["predict"](*row) for row in ROWS.astype(np.float64).tolist()]  # type: ignore[operator]
    assert values == forest_of([tree]).values(ROWS).tolist()


@settings(max_examples=5, deadline=None)
@given(TREES)
def test_compiled_rules_are_the_tree_they_came_from(tree: Tree) -> None:
    predict = compiled_rules(rules_source(tree, NAMES, "predict"), "predict")
    values = [predict(*row) for row in ROWS.astype(np.float64).tolist()]
    assert values == forest_of([tree]).values(ROWS).tolist()


def test_rules_are_read_without_repetition() -> None:
    inner = Tree(1, 2.0, Tree(LEAF, 10.0), Tree(6, 144.0, Tree(LEAF, 3.5), Tree(LEAF, 1234.567)))
    tree = Tree(1, 8.0, inner, Tree(LEAF, 0.0))
    assert rules_text(tree, NAMES) == [
        "sum_rate <= 2 -> 10",
        "2 < sum_rate <= 8 and adapter_slots <= 144 -> 3.5",
        "2 < sum_rate <= 8 and adapter_slots > 144 -> 1235",
        "sum_rate > 8 -> 0",
    ]
    assert rules_text(Tree(LEAF, 1.0), NAMES, lambda value: f"{value} tok/s") == ["always -> 1 tok/s"]


def test_only_leaves_are_mapped() -> None:
    forest = forest_of([Tree(0, 5.0, Tree(LEAF, 1.0), Tree(LEAF, 2.0))])
    assert mapped_leaves(forest, lambda values: values * 10).number.tolist() == [5.0, 10.0, 20.0]
