"""The tables of the comparison with our own engine: means over rounds."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import twin
from benchmarks.twin_tables import engine_table, mean_workloads, pace_note, profiles_table, validation_table


def workload(load: float, live: float, twin: float, slower: float) -> dict[str, Any]:
    names = ("output_tok_s", "itl_ms", "ttft_ms")
    return {
        "load": load,
        "requests_per_s": 10 * live,
        "live": dict.fromkeys(names, live),
        "twin": dict.fromkeys(names, twin),
        "smape": dict.fromkeys(names, 100 * abs(live - twin) / live),
        "pace": {"times_the_profile": [slower, slower]},
    }


def held_out(error: float, r_squared: float, *, serving: bool) -> dict[str, Any]:
    quality = {"mean_error": error, "r_squared": r_squared}
    parts = dict.fromkeys(("decode", "prefill", "load"), quality)
    return {"held_out": {**parts, "serving": quality if serving else None}}


RESULT = {
    "rounds": [
        {"profile": held_out(0.02, 0.97, serving=False), "workloads": [workload(0.5, 1.0, 1.2, 1.5)]},
        {"profile": held_out(0.04, 0.99, serving=False), "workloads": [workload(0.5, 3.0, 2.4, 0.5)]},
    ],
    "mean_smape": {"output_tok_s": 20.0, "itl_ms": 20.0, "ttft_ms": 20.0},
}


def test_a_line_of_a_load_is_the_mean_of_its_rounds() -> None:
    [found] = mean_workloads(RESULT)
    assert found["load"] == 0.5
    assert found["requests_per_s"] == 20
    assert (found["live"]["itl_ms"], found["twin"]["itl_ms"]) == (2.0, pytest.approx(1.8))
    assert found["smape"]["itl_ms"] == pytest.approx(20), "the mean of errors, not the error of means"
    assert "2.00 (1.80), 20.0" in engine_table(RESULT)


def test_profiles_have_the_mean_of_what_they_missed() -> None:
    served = {"rounds": [{"profile": held_out(0.01, 0.5, serving=True)}]}
    lines = profiles_table(served, RESULT).splitlines()
    assert "| H200, 7B | 1.0%, 0.500 | 1.0%, 0.500 | 1.0%, 0.500 | 1.0%, 0.500 |" in lines
    assert "| CPU, tiny model | 3.0%, 0.980 | 3.0%, 0.980 | 3.0%, 0.980 | - |" in lines


def test_the_pace_is_told_from_the_slowest_to_the_fastest_replay() -> None:
    assert "In the 2 replays" in pace_note(RESULT)
    assert "0.50 to 1.50 times" in pace_note(RESULT)


def scores(**smape: float) -> dict[str, Any]:
    return {"smape": smape, "num_compared": 4, "num_starved": 2, "starvation_f1": 1.0}


def test_scores_are_shown_in_both_units() -> None:
    ours = scores(output_throughput=2.0, itl=6.0, ttft=20.0, ttft_all=12.0)
    result = {
        "held_out": {**ours, "by_model": {}, "by_load": {}},
        "authors": scores(output_throughput=10.0, itl=19.0, ttft_all=36.0) | {"num_starved": 0},
    }
    table = validation_table(result)
    assert "| all | 4 | 2.0 (1.0) | 6.0 (3.0) | 20.0 (10.0) | 12.0 (6.0) | 1.000 |" in table
    assert "published predictions | 4 | 10.0 (5.0) | 19.0 (9.5) | - | 36.0 (18.0) | - |" in table


def test_the_authors_twin_is_scored_by_the_figure_that_it_predicts(tmp_path: Path) -> None:
    row = {
        "key": "model/run", "model": "model", "num_adapters": 2, "adapter_ranks": "8",
        "max_loras_gpu_slots": 2, "max_lora_rank": 8, "rate_values": "0.5", "rate_counts": "2",
        "status": "ok", "input_tok_s": 100, "output_tok_s": 50, "itl_mean_ms": 20, "ttft_mean_ms": 1000,
        # Half of the requests completed; the others count with the hour: (1 s + 3,600 s) / 2.
        "completed_requests": 1800, "dt_arrivals": 3600, "dt_ttft": 1_800_500,
        "dt_output_throughput": 50, "dt_total_throughput": 150, "dt_itl": 60,
    }  # fmt: skip
    runs, out = tmp_path / "runs.csv", tmp_path / "out.json"
    with runs.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    out.write_text(json.dumps({"speed": "as before"}))
    twin.main(["authors", "--runs", str(runs), "--fit", str(runs), "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["speed"] == "as before"
    expected = {"output_throughput": 0, "total_throughput": 0, "itl": 100, "ttft_all": 0}
    assert found["authors"]["smape"] == pytest.approx(expected)
    assert found["authors"]["by_model"]["model"]["num_compared"] == 1
    assert found["authors"]["sources"].keys() == {
        "loraplex/twin/scores.py",
        "loraplex/twin/recorded_runs.py",
    }
