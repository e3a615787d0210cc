"""Recorded runs: read strictly, fitted to, predicted from others, and never from themselves."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from recorded import MODEL, TRUTH, setups, write_runs
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import LoraplexError, UserError
from loraplex.perf.slot_profile import read_slot_profile
from loraplex.twin import calibrate as calibration
from loraplex.twin import validate as validation
from loraplex.twin.calibrate import Progress
from loraplex.twin.recorded_runs import RunsError, read_runs, without
from loraplex.twin.run_workload import WorkloadBook
from loraplex.twin.scores import in_authors_unit, macro_f1, smape, ttft_of_all

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
    monkeypatch.setattr(calibration, "_MAX_ROUNDS", 1)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def error_of(result: Result) -> str:
    assert isinstance(result.exception, LoraplexError), result.output
    return str(result.exception)


def change_rows(source: Path, path: Path, changes: dict[int, dict[str, str]]) -> None:
    """A copy of a file of runs with other cells in some rows, counted from 0."""
    with source.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for place, cells in changes.items():
        rows[place] |= cells
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def known_engine(runs_file: Path) -> validation.Fitted:
    """Return the result of a perfect fit to these runs."""
    found = read_runs(runs_file)
    runs = [(setup, found.measured[setup.key]) for setup in found.setups]
    return validation.Fitted(profiles={MODEL: TRUTH}, book=WorkloadBook(runs), num_runs=len(runs))


def test_scores() -> None:
    assert smape([(1.0, 1.0), (3.0, 1.0)]) == pytest.approx(50.0)
    assert smape([(0.0, 0.0)]) == 0.0
    assert macro_f1([(True, True), (False, False)]) == 1.0
    assert macro_f1([(True, True), (False, True), (False, False)]) == pytest.approx(2 / 3)


def test_the_authors_unit_is_half_of_ours() -> None:
    pairs = [(1.0, 3.0), (5.0, 4.0)]
    theirs = 100 * (2 / 4 + 1 / 9) / 2
    assert in_authors_unit(smape(pairs)) == pytest.approx(theirs)


def test_requests_that_did_not_complete_count_with_the_whole_run() -> None:
    assert ttft_of_all(2.0, num_completed=6, num_sent=8, duration_s=100.0) == pytest.approx(26.5)
    assert ttft_of_all(2.0, num_completed=8, num_sent=8, duration_s=100.0) == 2.0
    assert ttft_of_all(2.0, num_completed=9, num_sent=8, duration_s=100.0) == 2.0, "sent is from a twin"
    assert ttft_of_all(100.0, num_completed=0, num_sent=5, duration_s=100.0) == 100.0


def test_first_tokens_are_scored_by_both_definitions(runs_file: Path, tmp_path: Path) -> None:
    asked = read_runs(runs_file)
    predictions = validation.predict(known_engine(runs_file), asked.setups)
    overloaded = [each for each in predictions if each.predicted and each.predicted.is_starved]
    assert overloaded
    for each in overloaded:
        assert each.predicted is not None
        measured = asked.measured[each.setup.key].ttft_all_s
        assert measured is not None
        assert measured > 2 * asked.measured[each.setup.key].ttft_s
        assert each.predicted.ttft_all_s > 2 * each.predicted.ttft_s
    assert validation.report(predictions, asked.measured)["smape"].keys() == validation.MEASURES.keys()
    path = tmp_path / "unsaid.csv"
    change_rows(runs_file, path, {place: {"dt_arrivals": ""} for place in range(len(setups()))})
    scores = validation.report(predictions, read_runs(path).measured)["smape"]
    assert scores.keys() == validation.MEASURES.keys() - {"ttft_all"}


def test_requests_may_all_have_the_mean_lengths(runs_file: Path) -> None:
    found = read_runs(runs_file)
    runs = [(setup, found.measured[setup.key]) for setup in found.setups]
    setup = found.setups[0]
    drawn, _ = WorkloadBook(runs).requests(setup)
    alike, _ = WorkloadBook(runs, mean_lengths=True).requests(setup)
    assert len(set(drawn.prompt_tokens)) > 1
    for name, mean in WorkloadBook(runs).lengths(setup)._asdict().items():
        assert set(getattr(alike, f"{name}_tokens")) == {round(mean)}
    assert len(alike.arrival_s) == len(drawn.arrival_s)


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
    assert {sample.key for sample in seen[0].kv_samples} == {setup.key for setup in asked.setups[5:]}


@pytest.mark.slow
def test_other_runs_of_the_same_engine_are_predicted(runs_file: Path, tmp_path: Path) -> None:
    """From nine runs, so that it is not close; but the costs are not those that the fit begins with."""
    asked = tmp_path / "asked.csv"
    write_runs(asked, setups()[1::6])
    out = tmp_path / "out.json"
    result = invoke("twin", "validate", "--runs", str(asked), "--fit", str(runs_file), "--json", str(out))
    assert result.exit_code == 0, result.output
    told = result.stderr.splitlines()
    assert told[0] == "fitting: some minutes for each model; an upper bound follows"
    assert any(line.startswith(f"fitting: {MODEL}: round 1 of at most 3") for line in told)
    assert any(line.startswith("predicting: simulating runs") for line in told)
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


def test_runs_to_fit_to_are_not_written_over(
    runs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "fit", lambda *_, **__: SimpleNamespace(profiles={MODEL: TRUTH}))
    before, files = runs_file.read_bytes(), (tmp_path / "runs.csv", tmp_path / "more.csv")
    for path in files:
        path.write_bytes(before)
    for out in files:
        result = invoke("profile", "fit", *(f"--runs={path}" for path in files), "--out", str(out))
        assert result.exit_code == 2
        assert "is read here, and would be lost" in " ".join(result.output.replace("│", " ").split())
        assert out.read_bytes() == before


def test_a_fit_says_up_front_that_it_takes_long_and_then_how_far_it_is(
    runs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: object, progress: Progress, **__: object) -> SimpleNamespace:
        progress(f"{MODEL}: round 1 of at most 3", 0.25)
        return SimpleNamespace(profiles={MODEL: TRUTH})

    monkeypatch.setattr(validation, "fit", fit)
    command = ("profile", "fit", "--runs", str(runs_file), "--out", str(tmp_path / "profile.json"))
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        "fitting: some minutes; an upper bound follows",
        f"fitting: {MODEL}: round 1 of at most 3, 25%",
    ]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert f"fitting: {MODEL}: round 1" in invoke(*command).stderr


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({0: {"total_time_s": "0"}}, "runs.csv:2: total_time_s is '0', not more than 0"),
        ({0: {"duration_s": "0.0"}}, "runs.csv:2: duration_s is '0.0', not more than 0"),
        ({1: {"itl_mean_ms": "0"}}, "runs.csv:3: itl_mean_ms is '0', not more than 0"),
        ({1: {"ttft_mean_ms": "0"}}, "runs.csv:3: ttft_mean_ms is '0', not more than 0"),
        ({0: {"rate_values": "0 0", "rate_counts": "8 8"}}, "runs.csv:2: rate_values are all 0"),
        ({0: {"experiment": ""}}, r"runs.csv:2: the run has no name: key \(or experiment\) is empty"),
        (
            {0: {"experiment": "one"}, 2: {"experiment": "one"}},
            "runs.csv:4: the run of line 2 is called 'one' too",
        ),
    ],
)
def test_a_run_without_time_requests_or_a_name_of_its_own_is_refused(
    runs_file: Path, tmp_path: Path, changes: dict[int, dict[str, str]], says: str
) -> None:
    path = tmp_path / "runs.csv"
    change_rows(runs_file, path, changes)
    with pytest.raises(RunsError, match=says):
        read_runs(path)


def test_some_rates_may_be_zero_and_lines_without_rates_share_a_name(runs_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    other = {"experiment": "one", "rate_values": "", "itl_mean_ms": "0"}
    change_rows(runs_file, path, {0: {"rate_values": "0 0.1", "rate_counts": "8 8"}, 1: other, 2: other})
    found = read_runs(path)
    assert found.setups[0].rates == ((0.0, 8), (0.1, 8))
    assert found.num_others == 2
    assert len(found.kv_samples) == len(setups())


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_share_of_a_fit_grows_to_the_whole_at_most(runs_file: Path) -> None:
    shares: list[float] = []
    found = read_runs(runs_file)
    fitted = validation.fit([found], [MODEL], progress=lambda _, done: shares.append(done))
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.1
    assert shares[-1] == 1.0
    shares.clear()
    validation.predict(fitted, found.setups[:4], progress=lambda _, done: shares.append(done))
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_runs_that_are_not_predicted_are_counted_with_the_reason(runs_file: Path) -> None:
    fitted = replace(known_engine(runs_file), left_out={"left-out": "too few runs of left-out"})
    usual = setups()[0]
    asked = [
        usual,
        replace(usual, key="full", num_slots=1000),
        replace(usual, key="left out", model="left-out"),
        replace(usual, key="unheard of", model="unheard-of"),
    ]
    predictions, measured = validation.predict(fitted, asked), read_runs(runs_file).measured
    found = validation.report(predictions, measured)
    reasons = [
        "the slots leave too little memory for the longest request",
        "too few runs of left-out",
        "there is no profile of unheard-of",
    ]
    assert [row["reason"] for row in found["rows"]] == [None, *reasons]
    assert [row["predicted"] is None for row in found["rows"]] == [False, True, True, True]
    assert found["num_compared"] == 1
    assert found["num_not_predicted"] == 3
    assert found["not_predicted"] == dict.fromkeys(reasons, 1)
    with pytest.raises(UserError, match="to compare with; 1 not predicted: the slots leave too little"):
        validation.report(predictions[1:2], measured)


def test_the_command_tells_how_many_runs_are_not_predicted(
    runs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, out = tmp_path / "asked.csv", tmp_path / "out.json"
    change_rows(runs_file, asked, {0: {"max_loras_gpu_slots": "1000"}})
    monkeypatch.setattr(validation, "fit_for", lambda *_, **__: known_engine(runs_file))
    args = ("twin", "validate", "--fit", str(runs_file), "--json", str(out), "--runs")
    result = invoke(*args, str(asked))
    assert result.exit_code == 0, result.output
    assert "1 of 18 runs are not predicted (1: the slots leave too little memory" in result.output
    assert json.loads(out.read_text())["num_not_predicted"] == 1
    assert "not predicted" not in invoke(*args, str(runs_file)).output


def test_a_run_of_a_length_that_none_to_learn_from_has_is_predicted(runs_file: Path) -> None:
    fitted, usual = known_engine(runs_file), setups()[0]
    longer = replace(usual, key="longer", duration_s=usual.duration_s * 2)
    assert fitted.book.lengths(longer) == pytest.approx((100, 50), rel=0.1)
    assert [each.reason for each in validation.predict(fitted, [longer, usual])] == [None, None]
    with pytest.raises(UserError, match=r"no run of another says how many requests it served"):
        fitted.book.lengths(replace(usual, model="another"))


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
    with pytest.raises(UserError, match="no run of another to learn from"):
        validation.fit([found], ["another"])


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded runs are not here")
def test_the_published_files_are_read() -> None:
    twin = read_runs(RECORDED / "agullo_digital_twin_vs_real.csv.gz")
    runs = read_runs(RECORDED / "agullo_vllm_adapter_runs.csv.gz")
    assert len(twin.setups) == 200
    assert len(twin.measured) == 199
    assert {setup.key for setup in twin.setups} <= {setup.key for setup in runs.setups}
    assert len(runs.measured) > 700
