"""The models that surrogates are chosen from, and the options that are searched for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

Options = Mapping[str, Sequence[Any]]


class ModelKind(StrEnum):
    """Kinds of model. Only forests become surrogates, the others are to compare with."""

    FOREST = "forest"
    SVM = "svm"
    KNN = "knn"


class Search(StrEnum):
    """Sizes of the search: all of the paper's options, or a few of them that are good for most datasets."""

    PAPER = "paper"
    QUICK = "quick"


_FOREST: Final[Options] = {
    "n_estimators": (32, 128, 256),
    "max_depth": (None, 5, 10, 20),
    "min_samples_split": (2, 5, 10, 20),
    "min_samples_leaf": (1, 2, 5, 10, 32, 128),
}
_SVM: Final[Options] = {
    "C": (0.1, 1, 10, 100, 1000, 10000),
    "kernel": ("linear", "poly", "rbf", "sigmoid"),
    "degree": (2, 3, 4, 5),
    "gamma": ("scale", "auto", 0.01, 0.1, 1, 10),
    "coef0": (0, 0.1, 0.5, 1),
}
_KNN: Final[Options] = {
    "p": (1, 2),
    "n_neighbors": (1,),
    "leaf_size": (8,),
    "weights": ("uniform",),
    "algorithm": ("kd_tree",),
}
# Where the paper has "auto", all features: what it meant for regression.
_FOREST_REGRESSION: Final[Options] = {
    "criterion": ("squared_error", "absolute_error", "friedman_mse", "poisson"),
    "max_features": (1.0, "sqrt", "log2"),
}
_FOREST_CLASSES: Final[Options] = {
    "criterion": ("gini", "entropy", "log_loss"),
    "max_features": (None, "sqrt", "log2"),
}
_QUICK: Final[Mapping[ModelKind, Options]] = {
    ModelKind.FOREST: {"n_estimators": (32,), "max_depth": (None, 10), "min_samples_leaf": (1, 5)},
    ModelKind.SVM: {"C": (10, 1000, 10000), "kernel": ("rbf",), "gamma": ("scale", 1)},
    ModelKind.KNN: _KNN,
}


def regression_options(kind: ModelKind, search: Search) -> Options:
    """Return the options to search for the throughput."""
    if search is Search.QUICK:
        return _QUICK[kind]
    match kind:
        case ModelKind.FOREST:
            return {**_FOREST, **_FOREST_REGRESSION}
        case ModelKind.SVM:
            return {**_SVM, "epsilon": (0.1, 0.5, 1, 5)}
        case ModelKind.KNN:
            return _KNN


def class_options(kind: ModelKind, search: Search) -> Options:
    """Return the options to search for starvation."""
    if search is Search.QUICK:
        return _QUICK[kind]
    match kind:
        case ModelKind.FOREST:
            return {**_FOREST, **_FOREST_CLASSES}
        case ModelKind.SVM:
            return _SVM
        case ModelKind.KNN:
            return _KNN


def small_tree_options(forest: Options, search: Search, max_rules: int) -> list[Options]:
    """Return the grids to search for one small tree, the first from that of forests. The last grid is of
    trees that grow where the error is largest, up to a number of rules; the paper bounds their depth only."""
    one: Options = {"n_estimators": (1,), "bootstrap": (False,)}
    grown = {
        "max_leaf_nodes": sorted({max(max_rules // 2, 2), max(max_rules, 2)}),
        "min_samples_leaf": (1, 5, 10, 32),
        "max_features": (None,),
    }
    of_paper: list[Options] = [{**forest, **one}] if search is Search.PAPER else []
    return [*of_paper, {**grown, **one}]
