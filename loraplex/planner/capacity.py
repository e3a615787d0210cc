"""Fits what a GPU serves at most, from runs of which many do not show it.

What is served is what is offered, or what the GPU can, whichever is less. The former needs no learning; so
only the latter is learnt, and no tree has to follow the rates with steps. It follows from it whether a GPU
starves.

A run that did not keep up shows what the GPU can. One that did only shows that it can so much. From the
former alone, a GPU with rates as low as the others' would be guessed to serve less than it did: so the guess
for these is raised to what they served, and all are fitted again.

The capacity changes smoothly with most features. Boosted trees, each of which corrects those before it,
follow that with far fewer runs than the mean of trees does that a random forest is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from loraplex.planner.dataset import Dataset
from loraplex.planner.features import NUM_PAPER_FEATURES, STD_RATE, SUM_RATE, features_of, with_ratios
from loraplex.planner.grid import draw, whole_grid
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.slot_state import Floats

_KEPT_UP: Final = 0.97
"""Share of what is offered above which a run is one that kept up: its end leaves some requests unfinished."""
_NEAR: Final = 0.3
"""Share of what the GPU can, by the fit so far, below which a run that kept up says nothing."""
_NUM_FITS: Final = 2
_SEED: Final = 0
_WEIGHT_KEPT_UP: Final = 0.1
"""Weight, for a small tree's throughput, of points where more could be served than is offered."""
_NUM_DRAWN: Final = 6000
_SPREAD: Final = 0.5
"""Rates are scaled to what a GPU serves, more or less this, as a logarithm."""
_LEAST_IN_LEAF: Final = 5


def fit_boosted(rows: Dataset) -> Any:
    """Return gradient-boosted trees for the logarithm of the tokens per second that a GPU serves at most."""
    from sklearn.ensemble import GradientBoostingRegressor

    def fitted(features: Floats, most_tok_s: Floats) -> Any:
        model = GradientBoostingRegressor(
            n_estimators=300, max_depth=4, learning_rate=0.05, subsample=0.7, random_state=_SEED
        )
        return model.fit(features, np.log(most_tok_s))

    kept_up = _kept_up(rows)
    served = np.maximum(rows.throughput_tok_s, 1.0)
    model = fitted(rows.features[~kept_up], served[~kept_up])
    for _ in range(_NUM_FITS):
        most = _at_most(model, rows)
        known = ~kept_up | (rows.offered_tok_s > _NEAR * most)
        model = fitted(rows.features[known], most[known])
    return model


class Trees(NamedTuple):
    """Small trees of scikit-learn. `throughput`: the logarithm of the tokens per second that a GPU serves at
    most. `starvation`: whether it starves."""

    throughput: Any
    starvation: Any


def fit_trees(rows: Dataset, max_rules: int) -> Trees:
    """Fit trees of at most so many rules each to what boosted trees say, of many more points than were
    simulated: of the grid, and of the same with rates near what the GPU serves."""
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    limits: dict[str, Any] = {
        "max_leaf_nodes": max_rules,
        "min_samples_leaf": _LEAST_IN_LEAF,
        "random_state": _SEED,
    }
    boosted, request_tokens = fit_boosted(rows), rows.trained_on.request_tokens
    features = _drawn_points(boosted, request_tokens)
    most_tok_s = np.exp(boosted.predict(features))
    offered_tok_s = request_tokens * features[:, SUM_RATE]
    weights = np.where(most_tok_s < offered_tok_s, 1.0, _WEIGHT_KEPT_UP)
    return Trees(
        throughput=DecisionTreeRegressor(**limits).fit(features, np.log(most_tok_s), sample_weight=weights),
        starvation=DecisionTreeClassifier(**limits).fit(features, most_tok_s < STARVED_BELOW * offered_tok_s),
    )


def _drawn_points(boosted: Any, request_tokens: float) -> Floats:
    """Return features of points of the grid, and of the same points with scaled rates."""
    rng, points = np.random.default_rng(_SEED), whole_grid()
    drawn = [draw(points[place], rng) for place in rng.choice(len(points), _NUM_DRAWN, replace=False)]
    of_grid = np.array(
        [features_of(each.rates_rps, each.ranks, each.num_slots) for each in drawn], np.float64
    )
    scaled = of_grid.copy()
    for _ in range(2):  # what a GPU serves at most changes a little with the rates
        share = request_tokens * scaled[:, SUM_RATE] / np.exp(boosted.predict(scaled))
        factor = np.exp(rng.uniform(-_SPREAD, _SPREAD, len(scaled))) / share
        scaled[:, [SUM_RATE, STD_RATE]] *= factor[:, None]
        scaled = with_ratios(scaled[:, :NUM_PAPER_FEATURES]).astype(np.float64)
    return np.concatenate((of_grid, scaled))


def _kept_up(rows: Dataset) -> Any:
    return rows.throughput_tok_s >= _KEPT_UP * rows.offered_tok_s


def _at_most(model: Any, rows: Dataset) -> Floats:
    """Return what each row's GPU serves at most: as it showed, otherwise by the model, but no less than it
    served."""
    guessed = np.exp(model.predict(rows.features))
    served = np.maximum(rows.throughput_tok_s, 1.0)
    found: Floats = np.where(_kept_up(rows), np.maximum(guessed, served), served)
    return found
