"""Recorded runs: read strictly, fitted to, predicted from others, and never from themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import Result
from recorded import MODEL, TRUTH, setups, write_runs
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import LoraplexError, UserError
from loraplex.perf.slot_profile import read_slot_profile
from loraplex.twin import calibrate as calibration
from loraplex.twin import validate as validation
from loraplex.twin.recorded_runs import RunsError, read_runs, without
from loraplex.twin.scores import macro_f1, smape

DATA = Path(os.environ.get("LORAPLEX_DATA", Path(__file__).parents[3] / "shared" / "data"))
RECORDED = DATA / "measurements"


@pytest.fixture(scope="module")
def runs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "runs.csv"
    write_runs(path, setups())
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_STEPS_PER_ROUND", 4)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def error_of(result: Result) -> str:
    assert isinstance(result.exception, LoraplexError), result.output
    return str(result.exception)


def test_scores() -> None:
    assert smape([(1.0, 1.0), (3.0, 1.0)]) == pytest.approx(50.0)
    assert smape([(0.0, 0.0)]) == 0.0
    assert macro_f1([(True, True), (False, False)]) == 1.0
    assert macro_f1([(True, True), (False, True), (False, False)]) == pytest.approx(2 / 3)


def test_what_was_measured_is_kept_apart_from_what_was_asked(runs_file: Path) -> None:
    found = read_runs(runs_file)
    assert [setup.key for setup in found.setups] == [setup.key for setup in setups()]
    assert found.measured.keys() == {setup.key for setup in setups()}
    assert len(found.kv_samples) == len(setups())


def test_runs_to_predict_are_left_out_of_the_fit(runs_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = read_runs(runs_file), []
    monkeypatch.setattr(validation, "fit", lambda files, models, **_: seen.extend(files))
    validation.fit_for(asked.setups[:5], [asked])
    assert {setup.key for setup in seen[0].setups} == {setup.key for setup in asked.setups[5:]}
    assert seen[0].measured.keys() == {setup.key for setup in asked.setups[5:]}


def test_other_runs_of_the_same_engine_are_predicted(runs_file: Path, tmp_path: Path) -> None:
    """From nine runs, so that it is not close; but the costs are not those that the fit begins with."""
    asked = tmp_path / "asked.csv"
    write_runs(asked, setups()[1::6])
    out = tmp_path / "out.json"
    result = invoke("twin", "validate", "--runs", str(asked), "--fit", str(runs_file), "--json", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert len(found["rows"]) == len(setups()[1::6])
    assert found["smape"]["output_throughput"] < 10
    assert found["smape"]["itl"] < 10
    assert found["smape"]["ttft"] < 50
    assert found["starvation_f1"] == 1.0
    assert found["fit"]["num_runs"] == len(setups()) - len(setups()[1::6])


@pytest.mark.usefixtures("quick")
def test_a_profile_is_fitted_and_read_again(runs_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    result = invoke("profile", "fit", "--runs", str(runs_file), "--out", str(out), "--hardware", "a GPU")
    assert result.exit_code == 0, result.output
    profile = read_slot_profile(out, MODEL)
    assert profile.hardware == "a GPU"
    assert profile.costs.decode.base_s == pytest.approx(TRUTH.costs.decode.base_s, rel=0.25)
    assert profile.memory.predict(num_slots=8, max_rank=16) == pytest.approx(60_000 - 8 * 210, rel=0.01)
    assert profile.quality["num_fitted"] == len(setups())
    with pytest.raises(UserError, match="it is of model 'some-7b', not 'another'"):
        read_slot_profile(out, "another")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("max_lora_rank", "max_rank", "there is no column max_lora_rank"),
        ("experiment", "name", r"there is no column key \(or experiment\)"),
        (",16,2048,", ",x,2048,", "runs.csv:2: max_lora_rank is 'x', not a number"),
        ("0.1,16", "0.1 0.2,16", "runs.csv:2: 2 rate_values, but 1 rate_counts"),
        ("0.1,16", "-0.1,16", "runs.csv:2: rate_values is '-0.1', not a finite number"),
        (",16.0,8 16", ",12.0,8 16", "runs.csv:2: rate_counts add up to 16, num_adapters is 12.0"),
    ],
)
def test_a_file_with_something_wrong_is_refused(
    runs_file: Path, tmp_path: Path, old: str, new: str, says: str
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(runs_file.read_text().replace(old, new, 1))
    with pytest.raises(RunsError, match=says):
        read_runs(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.csv")
    assert "none.csv: cannot be read" in error_of(
        invoke("twin", "validate", "--runs", missing, "--fit", missing)
    )


def test_too_few_runs_to_fit_to_are_refused(runs_file: Path) -> None:
    found = read_runs(runs_file)
    few = without(found, [setup.key for setup in found.setups[3:]])
    with pytest.raises(UserError, match="3 runs of some-7b to fit to"):
        validation.fit([few], [MODEL])
    with pytest.raises(UserError, match="no run of another in the files"):
        validation.fit([found], ["another"])


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded runs are not here")
def test_the_published_files_are_read() -> None:
    twin = read_runs(RECORDED / "agullo_digital_twin_vs_real.csv.gz")
    runs = read_runs(RECORDED / "agullo_vllm_adapter_runs.csv.gz")
    assert len(twin.setups) == 200
    assert len(twin.measured) == 199
    assert {setup.key for setup in twin.setups} <= {setup.key for setup in runs.setups}
    assert len(runs.measured) > 700
