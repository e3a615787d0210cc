"""Trains surrogates from a dataset. Only this needs scikit-learn, and imports it when called."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from loraplex.core.errors import UserError
from loraplex.core.progress import Report
from loraplex.planner import capacity
from loraplex.planner.dataset import Dataset, DatasetError
from loraplex.planner.features import NUM_PAPER_FEATURES
from loraplex.planner.searches import (
    ModelKind,
    Options,
    Search,
    class_options,
    regression_options,
    small_tree_options,
)
from loraplex.planner.surrogate import STARVED_ABOVE, Surrogate
from loraplex.planner.trees import LEAF, Forest, Tree, collapsed, forest_of, mapped_leaves, tree_of
from loraplex.twin.scores import in_authors_unit, macro_f1, smape
from loraplex.twin.slot_state import Flags, Floats

MAX_RULES: Final = 32
_FOLDS: Final = 5
_SEED: Final = 0
_LEAST_ROWS: Final = 100
_HELD_OUT: Final = 5
"""One row in so many is held out, to measure the accuracy."""
_TOO_COMPLEX: Final = -1e9
_MAX_SVM_ITERATIONS: Final = 1_000_000
_ROUND_FACTOR: Final = 3
"""In each round of the search, a third of the candidates is kept, for three times as many rows."""


class NoTrainerError(UserError):
    """A package that training needs is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Models of scikit-learn. `options`: what the search chose for each."""

    kind: ModelKind
    throughput: Any
    starvation: Any
    options: Mapping[str, Mapping[str, Any]]
    train_s: float

    def accuracy(self, held_out: Dataset) -> dict[str, float]:
        features = held_out.features[:, :NUM_PAPER_FEATURES]
        return accuracy(self.throughput.predict(features), self.starvation.predict(features), held_out)


def split(dataset: Dataset, seed: int = _SEED) -> tuple[Dataset, Dataset]:
    """Return rows to train on, and rows held out."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    num_held_out = len(dataset) // _HELD_OUT
    return dataset.subset(np.sort(order[num_held_out:])), dataset.subset(np.sort(order[:num_held_out]))


def accuracy(throughput_tok_s: Floats, is_starved: Flags, held_out: Dataset) -> dict[str, float]:
    """Return the errors of predictions for these rows. SMAPE in the authors' unit, see `scores`."""
    pairs = zip(throughput_tok_s.tolist(), held_out.throughput_tok_s.tolist(), strict=True)
    classes = zip(is_starved.tolist(), held_out.is_starved.tolist(), strict=True)
    return {
        "num_held_out": float(len(held_out)),
        "throughput_smape_authors_unit": in_authors_unit(smape(list(pairs))),
        "throughput_r2": r_squared(throughput_tok_s, held_out.throughput_tok_s),
        "starvation_macro_f1": macro_f1(list(classes)),
    }


def r_squared(predicted: Floats, measured: Floats) -> float:
    """Return the share of the variance that predictions explain."""
    missed = ((predicted - measured) ** 2).sum()
    return float(1 - missed / ((measured - measured.mean()) ** 2).sum())


def surrogate_accuracy(surrogate: Surrogate, held_out: Dataset) -> dict[str, float]:
    return accuracy(*surrogate.predict_all(held_out.features.astype(np.float32)), held_out)


def train_forest(
    dataset: Dataset,
    search: Search | None = None,
    *,
    num_jobs: int | None = -1,
    progress: Report | None = None,
) -> Surrogate:
    """Return a forest with its accuracy. `search`: None for boosted trees of what a GPU serves at most (see
    `capacity`); otherwise random forests, as in the paper."""

    def fit(rows: Dataset) -> Surrogate:
        if search is None:
            return capacity_forest(rows)
        return forest_surrogate(train(rows, ModelKind.FOREST, search, num_jobs, progress), rows)

    return _with_accuracy(dataset, fit, is_quick=search is None)


def train_small_tree(
    dataset: Dataset,
    search: Search | None = None,
    *,
    num_jobs: int | None = -1,
    progress: Report | None = None,
) -> Surrogate:
    """Return trees of at most 32 rules with their accuracy. `search`: as in `train_forest`."""

    def fit(rows: Dataset) -> Surrogate:
        return capacity_trees(rows) if search is None else refine(rows, search, num_jobs, progress)

    return _with_accuracy(dataset, fit, is_quick=search is None)


def _with_accuracy(dataset: Dataset, fit: Callable[[Dataset], Surrogate], *, is_quick: bool) -> Surrogate:
    """Fit most rows, and measure the accuracy on the others. If that is quick, return a fit of all rows,
    which is no worse."""
    rows, held_out = split(dataset)
    found = fit(rows)
    measured = surrogate_accuracy(found, held_out)
    return replace(fit(dataset) if is_quick else found, accuracy=measured)


def capacity_forest(rows: Dataset) -> Surrogate:
    """Return boosted trees of what a GPU serves at most."""
    _check(rows)
    require_scikit_learn()
    model = capacity.fit_boosted(rows)
    first = float(model.init_.constant_[0, 0])
    times = len(model.estimators_) * model.learning_rate
    # The sum of all trees, as the mean that a forest is.
    trees = [_tree(each.tree_, first + times * each.tree_.value[:, 0, 0]) for each in model.estimators_[:, 0]]
    return _surrogate(forest_of(trees), None, rows, in_logarithms=True)


def capacity_trees(rows: Dataset, *, max_rules: int = MAX_RULES) -> Surrogate:
    """Return a tree of what a GPU serves at most, and one of whether it starves, of at most `max_rules`."""
    _check(rows)
    _models(ModelKind.FOREST)
    throughput, starvation = (each.tree_ for each in capacity.fit_trees(rows, max_rules))
    most = _tree(throughput, np.exp(throughput.value[:, 0, 0]))
    starves = _tree(starvation, (_shares(starvation, 1) > STARVED_ABOVE).astype(np.float64))
    return _surrogate(forest_of([collapsed(most)]), forest_of([collapsed(starves)]), rows)


def train(
    rows: Dataset,
    kind: ModelKind,
    search: Search = Search.QUICK,
    num_jobs: int | None = -1,
    progress: Report | None = None,
) -> Trained:
    """Search for the best model of this kind and fit it to all rows, to the features of the paper.
    `num_jobs`: as in scikit-learn."""
    _check(rows)
    began_s = time.monotonic()
    regressor, classifier = _models(kind)
    searches = _Searches(kind, rows, num_jobs, progress)
    throughput = searches.throughput(regressor, regression_options(kind, search), _smape_score)
    starvation = searches.starvation(classifier, class_options(kind, search), "f1_macro")
    return Trained(
        kind=kind,
        throughput=throughput.best_estimator_,
        starvation=starvation.best_estimator_,
        options={"throughput": throughput.best_params_, "starvation": starvation.best_params_},
        train_s=time.monotonic() - began_s,
    )


def refine(
    rows: Dataset,
    search: Search = Search.QUICK,
    num_jobs: int | None = -1,
    progress: Report | None = None,
    *,
    max_rules: int = MAX_RULES,
) -> Surrogate:
    """Search for one tree each, for throughput and for starvation, that has at most `max_rules`, as in the
    paper."""
    _check(rows)
    regressor, classifier = _models(ModelKind.FOREST)
    searches = _Searches("small tree", rows, num_jobs, progress)
    forests = (regression_options(ModelKind.FOREST, search), class_options(ModelKind.FOREST, search))
    of_rate, of_class = _SmallTreeScore(max_rules, False), _SmallTreeScore(max_rules, True)
    _, tree = of_rate.best(
        searches.throughput(regressor, options, of_rate)
        for options in small_tree_options(forests[0], search, max_rules)
    )
    _, class_tree = of_class.best(
        searches.starvation(classifier, options, of_class)
        for options in small_tree_options(forests[1], search, max_rules)
    )
    return _surrogate(forest_of([collapsed(tree)]), forest_of([class_tree]), rows)


def forest_surrogate(trained: Trained, rows: Dataset) -> Surrogate:
    """Export forests that were trained on these rows."""
    assert trained.kind is ModelKind.FOREST, "only forests are exported"
    return _surrogate(_regression_forest(trained.throughput), _class_forest(trained.starvation), rows)


def _surrogate(
    throughput: Forest, starvation: Forest | None, rows: Dataset, *, in_logarithms: bool = False
) -> Surrogate:
    known = rows.features[:, :NUM_PAPER_FEATURES]
    return Surrogate(
        trained_on=rows.trained_on,
        ranges=np.stack((known.min(axis=0), known.max(axis=0)), axis=1),
        throughput=throughput,
        starvation=starvation,
        in_logarithms=in_logarithms,
    )


def _check(rows: Dataset) -> None:
    if len(rows) < _LEAST_ROWS:
        raise DatasetError(
            f"there are {len(rows)} rows to train on, {_LEAST_ROWS} is the least; make more with more --rows"
        )
    _, counts = np.unique(rows.is_starved, return_counts=True)
    if len(counts) < 2 or counts.min() < _FOLDS:
        raise DatasetError(
            f"fewer than {_FOLDS} runs starve, or fewer than {_FOLDS} do not, too few to learn when they do; "
            "make more rows with more --rows"
        )


def require_scikit_learn() -> None:
    """Raise NoTrainerError where scikit-learn is missing, before anything is simulated for it."""
    _models(ModelKind.FOREST)


def _models(kind: ModelKind) -> tuple[Any, Any]:
    """Return a regressor and a classifier. Only distances and kernels need features of the same scale."""
    try:
        from sklearn import ensemble, neighbors, pipeline, preprocessing, svm
    except ImportError as error:
        raise NoTrainerError(
            f"training needs scikit-learn ({error}); install it: pip install scikit-learn"
        ) from error
    match kind:
        case ModelKind.FOREST:
            return (
                ensemble.RandomForestRegressor(random_state=_SEED),
                ensemble.RandomForestClassifier(random_state=_SEED),
            )
        case ModelKind.SVM:
            models = (
                svm.SVR(max_iter=_MAX_SVM_ITERATIONS),
                svm.SVC(max_iter=_MAX_SVM_ITERATIONS, random_state=_SEED),
            )
        case ModelKind.KNN:
            models = neighbors.KNeighborsRegressor(), neighbors.KNeighborsClassifier()
    regressor, classifier = (
        pipeline.Pipeline([("scale", preprocessing.StandardScaler()), ("model", each)]) for each in models
    )
    return regressor, classifier


@dataclass(frozen=True, slots=True)
class _Searches:
    """Searches over the same rows. `name`: of the model, for people."""

    name: str
    rows: Dataset
    num_jobs: int | None
    progress: Report | None

    def throughput(self, model: Any, options: Options, scoring: Any) -> Any:
        return self._search("throughput", model, options, scoring, self.rows.throughput_tok_s)

    def starvation(self, model: Any, options: Options, scoring: Any) -> Any:
        return self._search("starvation", model, options, scoring, self.rows.is_starved)

    def _search(self, target: str, model: Any, options: Options, scoring: Any, values: Any) -> Any:
        from sklearn.experimental import enable_halving_search_cv  # noqa: F401
        from sklearn.model_selection import HalvingGridSearchCV

        if self.progress is not None:
            self.progress(f"searching for a {self.name} for {target}", None)
        prefix = "model__" if hasattr(model, "named_steps") else ""
        found = HalvingGridSearchCV(
            model,
            {prefix + option: list(values) for option, values in options.items()},
            factor=_ROUND_FACTOR,
            cv=_FOLDS,
            scoring=scoring,
            random_state=_SEED,
            n_jobs=self.num_jobs,
        )
        with _quiet():
            return found.fit(self.rows.features[:, :NUM_PAPER_FEATURES], values)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of candidates that fail or do not converge on few rows: they lose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _smape_score(model: Any, features: Floats, throughput_tok_s: Floats) -> float:
    """Return the negated error: searches look for the highest score."""
    predicted = model.predict(features).tolist()
    return -in_authors_unit(smape(list(zip(predicted, throughput_tok_s.tolist(), strict=True))))


@dataclass(frozen=True, slots=True)
class _SmallTreeScore:
    """The usual score of a tree that has few rules, and one that always loses for others."""

    max_rules: int
    is_class: bool

    def __call__(self, model: Any, features: Floats, targets: Any) -> float:
        if self._tree(model).num_leaves > self.max_rules:
            return _TOO_COMPLEX
        if self.is_class:
            return macro_f1(list(zip(model.predict(features).tolist(), targets.tolist(), strict=True)))
        return _smape_score(model, features, targets)

    def best(self, searches: Iterable[Any]) -> tuple[Any, Tree]:
        """Return the best model with few rules, and its tree; a search of complex ones may end without."""
        found = [
            (each.best_score_, each.best_estimator_, self._tree(each.best_estimator_)) for each in searches
        ]
        small = [each for each in found if each[2].num_leaves <= self.max_rules]
        _, model, tree = max(small, key=lambda each: each[0])
        return model, tree

    def _tree(self, model: Any) -> Tree:
        return _class_tree(model) if self.is_class else collapsed(tree_of(_regression_forest(model)))


def _class_tree(model: Any) -> Tree:
    """Return the collapsed tree of a forest of one, whose leaves are 0 or 1: the class that it predicts."""
    forest = mapped_leaves(_class_forest(model), lambda shares: (shares > STARVED_ABOVE).astype(np.float64))
    return collapsed(tree_of(forest))


def _regression_forest(model: Any) -> Forest:
    return forest_of([_tree(each.tree_, each.tree_.value[:, 0, 0]) for each in model.estimators_])


def _class_forest(model: Any) -> Forest:
    """Return a forest of the share of votes for starvation."""
    place = model.classes_.tolist().index(True) if True in model.classes_ else None
    return forest_of([_tree(each.tree_, _shares(each.tree_, place)) for each in model.estimators_])


def _shares(tree: Any, place: int | None) -> Floats:
    if place is None:  # it has seen no starved run
        return np.zeros(tree.node_count)
    votes = tree.value[:, 0, :]
    shares: Floats = votes[:, place] / votes.sum(axis=1)
    return shares


def _tree(tree: Any, values: Floats) -> Tree:
    """Return a tree of scikit-learn as ours. Children come after their parent there."""
    left, right = tree.children_left.tolist(), tree.children_right.tolist()
    feature, threshold, leaf = tree.feature.tolist(), tree.threshold.tolist(), values.tolist()
    found: list[Any] = [None] * len(left)
    for at in reversed(range(len(left))):
        if left[at] < 0:
            found[at] = Tree(LEAF, leaf[at])
        else:
            found[at] = Tree(feature[at], threshold[at], found[left[at]], found[right[at]])
    root: Tree = found[0]
    return root
