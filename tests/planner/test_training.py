"""Training: what is exported predicts what scikit-learn does, and small trees are small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import NAMES, made_up, random_features

from loraplex.planner.capacity import fit_boosted
from loraplex.planner.dataset import DatasetError
from loraplex.planner.rules import compiled_rules, rules_source
from loraplex.planner.searches import ModelKind, Search, class_options, regression_options
from loraplex.planner.surrogate import Surrogate
from loraplex.planner.surrogate_json import read_surrogate, write_surrogate
from loraplex.planner.training import (
    Trained,
    capacity_forest,
    capacity_trees,
    forest_surrogate,
    r_squared,
    refine,
    split,
    surrogate_accuracy,
    train,
    train_forest,
    train_small_tree,
)
from loraplex.planner.trees import tree_of

ROWS = random_features(np.random.default_rng(7), 500)


@pytest.fixture(scope="module")
def forest() -> Trained:
    return train(made_up(), ModelKind.FOREST, num_jobs=1)


@pytest.fixture(scope="module")
def small_tree() -> Surrogate:
    return train_small_tree(made_up(), num_jobs=1)


@pytest.fixture(scope="module")
def boosted() -> Surrogate:
    return capacity_forest(made_up())


@pytest.mark.slow
def test_a_forests_file_predicts_what_scikit_learn_does(forest: Trained, tmp_path: Path) -> None:
    path = tmp_path / "forest.json"
    write_surrogate(path, forest_surrogate(forest, made_up()))
    found = read_surrogate(path)
    rows = np.concatenate((ROWS, made_up().features.astype(np.float32)))
    of_paper = rows[:, :7]
    assert found.starvation is not None
    assert found.throughput.values(rows) == pytest.approx(forest.throughput.predict(of_paper))
    shares = forest.starvation.predict_proba(of_paper)[:, 1]
    assert found.starvation.values(rows) == pytest.approx(shares)
    starved = [found.predict(row).is_starved for row in rows]
    assert starved == forest.starvation.predict(of_paper).tolist()


@pytest.mark.slow
def test_ranges_are_those_of_the_rows(forest: Trained) -> None:
    rows = made_up()
    found = forest_surrogate(forest, rows)
    assert (found.ranges[:, 0] == rows.features[:, :7].min(axis=0)).all()
    assert (found.ranges[:, 1] == rows.features[:, :7].max(axis=0)).all()
    assert not any(found.predict(row).outside for row in rows.features.astype(np.float32))
    assert found.trained_on == rows.trained_on


def test_a_capacity_forest_predicts_what_scikit_learn_does(boosted: Surrogate) -> None:
    found = boosted
    wanted = np.exp(fit_boosted(made_up()).predict(ROWS))
    assert np.exp(found.throughput.values(ROWS)) == pytest.approx(wanted)
    offered_tok_s = found.trained_on.request_tokens * ROWS[:, 1].astype(np.float64)
    predicted, starved = found.predict_all(ROWS)
    assert predicted == pytest.approx(np.minimum(wanted, offered_tok_s))
    assert starved.tolist() == (wanted < 0.9 * offered_tok_s).tolist()
    one_by_one = [found.predict(row) for row in ROWS]
    assert [each.throughput_tok_s for each in one_by_one] == pytest.approx(predicted.tolist())
    assert [each.is_starved for each in one_by_one] == starved.tolist()


def test_what_runs_that_kept_up_have_served_is_what_a_gpu_can(boosted: Surrogate) -> None:
    rows = made_up()
    kept_up = rows.throughput_tok_s == rows.offered_tok_s
    predicted = np.exp(boosted.throughput.values(rows.features[kept_up].astype(np.float32)))
    assert (predicted > 0.9 * rows.offered_tok_s[kept_up]).mean() > 0.9


def test_a_small_tree_has_few_rules_and_is_not_much_worse(small_tree: Surrogate) -> None:
    assert len(small_tree.throughput.roots) == 1
    assert small_tree.throughput.num_rules <= 32
    assert small_tree.starvation is not None
    assert small_tree.starvation.num_rules <= 32
    assert set(small_tree.starvation.number[small_tree.starvation.feature < 0]) == {0.0, 1.0}
    found = surrogate_accuracy(small_tree, made_up(seed=1))
    assert found["throughput_smape_authors_unit"] < 5
    assert found["starvation_macro_f1"] > 0.85


@pytest.mark.slow
def test_the_papers_small_trees_have_few_rules() -> None:
    found = refine(made_up(), num_jobs=1, max_rules=8)
    assert found.throughput.num_rules <= 8
    assert found.starvation is not None
    assert set(found.starvation.number[found.starvation.feature < 0]) == {0.0, 1.0}


def test_rules_of_a_trained_tree_are_the_tree(small_tree: Surrogate) -> None:
    assert small_tree.starvation is not None
    for forest in (small_tree.throughput, small_tree.starvation):
        predict = compiled_rules(rules_source(tree_of(forest), NAMES, "predict"), "predict")
        values = [predict(*row) for row in ROWS.astype(np.float64).tolist()]
        assert values == forest.values(ROWS).tolist()


@pytest.fixture
def trained_forest() -> Surrogate:
    return train_forest(made_up(), num_jobs=1)


@pytest.mark.parametrize("name", [pytest.param("trained_forest", marks=pytest.mark.slow), "small_tree"])
def test_the_accuracy_is_on_rows_that_were_held_out(name: str, request: pytest.FixtureRequest) -> None:
    found: Surrogate = request.getfixturevalue(name)
    assert found.accuracy.keys() == {
        "num_held_out",
        "throughput_smape_authors_unit",
        "throughput_r2",
        "starvation_macro_f1",
    }
    assert found.accuracy["num_held_out"] == 40
    assert 0 < found.accuracy["throughput_smape_authors_unit"] < 15
    assert 0.7 < found.accuracy["starvation_macro_f1"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ModelKind.SVM, ModelKind.KNN])
def test_other_models_are_trained_to_compare_with(kind: ModelKind) -> None:
    rows, held_out = split(made_up())
    found = train(rows, kind, num_jobs=1).accuracy(held_out)
    assert 0 < found["throughput_smape_authors_unit"] < 40
    assert found["starvation_macro_f1"] > 0.5


@pytest.mark.slow
def test_training_is_the_same_again(small_tree: Surrogate) -> None:
    again = capacity_trees(made_up())
    assert (again.throughput.number == small_tree.throughput.number).all()


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(DatasetError, match="there are 50 rows to train on, 100 is the least; make more"):
        train(made_up(50), ModelKind.KNN)
    rows = made_up()
    with pytest.raises(DatasetError, match="too few to learn when they do; make more rows"):
        refine(replace(rows, is_starved=np.zeros(len(rows), np.bool_)))


def test_the_papers_search_has_every_option_of_the_models() -> None:
    """Guards against a misspelt option, which would only be found hours into a search."""
    from sklearn import ensemble, neighbors, svm

    models = {
        ModelKind.FOREST: (ensemble.RandomForestRegressor(), ensemble.RandomForestClassifier()),
        ModelKind.SVM: (svm.SVR(), svm.SVC()),
        ModelKind.KNN: (neighbors.KNeighborsRegressor(), neighbors.KNeighborsClassifier()),
    }
    for kind, (regressor, classifier) in models.items():
        for search in Search:
            assert regressor.get_params().keys() >= regression_options(kind, search).keys()
            assert classifier.get_params().keys() >= class_options(kind, search).keys()


def test_r_squared_is_the_share_of_the_variance_that_is_explained() -> None:
    measured = np.array([1.0, 2.0, 3.0])
    assert r_squared(measured, measured) == 1.0
    assert r_squared(np.full(3, 2.0), measured) == 0.0
    assert r_squared(np.array([1.0, 2.0, 4.0]), measured) == 0.5
