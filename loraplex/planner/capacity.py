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

from typing import Any, Final

import numpy as np

from loraplex.planner.dataset import Dataset
from loraplex.twin.slot_state import Floats

_KEPT_UP: Final = 0.97
"""Share of what is offered above which a run is one that kept up: its end leaves some requests unfinished."""
_NEAR: Final = 0.3
"""Share of what the GPU can, by the fit so far, below which a run that kept up says nothing."""
_NUM_FITS: Final = 2
_SEED: Final = 0
_WEIGHT_NEAR: Final = 0.3
_WEIGHT_FAR: Final = 0.1
"""Weights, in the fit of a small tree, of runs that kept up, with more or less than half of what a GPU
can."""
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


def fit_tree(rows: Dataset, max_rules: int) -> Any:
    """Return one tree of at most so many rules for the same, fitted to what boosted trees say of the rows."""
    from sklearn.tree import DecisionTreeRegressor

    most = _at_most(fit_boosted(rows), rows)
    of_those = np.where(rows.offered_tok_s > most / 2, _WEIGHT_NEAR, _WEIGHT_FAR)
    tree = DecisionTreeRegressor(
        max_leaf_nodes=max_rules, min_samples_leaf=_LEAST_IN_LEAF, random_state=_SEED
    )
    return tree.fit(rows.features, np.log(most), sample_weight=np.where(_kept_up(rows), of_those, 1.0))


def _kept_up(rows: Dataset) -> Any:
    return rows.throughput_tok_s >= _KEPT_UP * rows.offered_tok_s


def _at_most(model: Any, rows: Dataset) -> Floats:
    """Return what each row's GPU serves at most: as it showed, otherwise by the model, but no less than it
    served."""
    guessed = np.exp(model.predict(rows.features))
    served = np.maximum(rows.throughput_tok_s, 1.0)
    found: Floats = np.where(_kept_up(rows), np.maximum(guessed, served), served)
    return found
