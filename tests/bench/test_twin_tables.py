"""The tables of the comparison with our own engine: means over rounds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks.twin_tables import engine_table, mean_workloads, pace_note, profiles_table


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
