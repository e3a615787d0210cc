"""Tables of cold starts: overheads are counted from the right place, and a miss is called one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import cold_tables, cost_tables, make_tables
from benchmarks.markdown import TableError
from loraplex.perf.held_out import HeldOut
from loraplex.perf.least_squares import quality_of
from loraplex.perf.profile_json import profile_to_json


@pytest.fixture
def cold() -> dict[str, Any]:
    """Return the committed sections; tests change the figures that they are about."""
    found: dict[str, Any] = json.loads((make_tables.RESULTS / make_tables.COLD).read_text())
    return found


@pytest.fixture
def workers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((make_tables.RESULTS / make_tables.ASSIST).read_text())
    return found


def times(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": mean, "p95": mean, "p99": mean}


def aim(table: str, what: str) -> str:
    [line] = [line for line in table.splitlines() if line.startswith(f"| {what}")]
    return line


def test_first_tokens_are_told_by_the_same_policys_warm_ones(cold: dict[str, Any]) -> None:
    cold["idle"]["results"] = {
        "cached": {"ready": times(5.0)},
        "auto": {"ready": times(6.0), "host": times(7.25), "disk": times(16.0)},
    }
    table = cold_tables.idle_table(cold)
    assert "| `cached` | 5.00 ms | - | - |" in table
    assert "| `auto` | 6.00 ms | 7.25 ms, +1.25 | 16.00 ms, +10.00 |" in table


def test_the_policy_with_cpu_workers_is_shown_once_it_is_measured(cold: dict[str, Any]) -> None:
    cold.pop("idle_assist", None)
    assert "cpu-assist" not in cold_tables.idle_table(cold)
    cold["idle_assist"] = {"results": {"cpu-assist": {"ready": times(6.0), "host": times(7.0)}}}
    assert "| `cpu-assist` | 6.00 ms | 7.00 ms, +1.00 | - |" in cold_tables.idle_table(cold)


def test_a_burst_is_told_by_the_p95_of_cached(cold: dict[str, Any]) -> None:
    cold["burst"]["results"] = {"cached": times(50.0), "auto": times(60.0) | {"p95": 80.0}}
    assert "| `auto` | 60.0 ms | 60.0 ms | 80.0 ms | 1.60x |" in cold_tables.burst_table(cold)


@pytest.mark.parametrize(("host_ms", "reached"), [(6.5, "yes"), (6.501, "**no**")])
def test_what_was_asked_for_is_reached_or_not_by_the_figures(
    host_ms: float, reached: str, cold: dict[str, Any], workers: dict[str, Any]
) -> None:
    cold["idle"]["results"]["auto"] |= {"ready": times(6.0), "host": times(host_ms)}
    line = aim(cost_tables.aims_table(cold, workers), "first token, idle, rank 64, host memory")
    assert line.endswith(f"| +0.5 ms | +0.50 ms | {reached} |")


def test_one_overhead_of_three_beyond_the_bound_is_a_miss(
    cold: dict[str, Any], workers: dict[str, Any]
) -> None:
    over = cold["setups"]["results"]["S2"]["policies"]["auto"]["over_cached"]
    for metric in over:
        over[metric]["mean"] = -0.01
    assert aim(cost_tables.aims_table(cold, workers), "S2: mean").endswith("| yes |")
    over["tpt_ms"]["mean"] = 0.021
    assert aim(cost_tables.aims_table(cold, workers), "S2: mean").endswith("| **no** |")


def test_a_host_that_waits_is_a_miss(cold: dict[str, Any], workers: dict[str, Any]) -> None:
    cold["syncs"]["results"]["pipelined"]["host_synchronisations"] = 1
    assert aim(cost_tables.aims_table(cold, workers), "times that the host").endswith("| **no** |")


def test_a_large_adapter_is_told_by_the_bus_of_the_profile(cold: dict[str, Any]) -> None:
    cold["profile"]["results"]["bus"]["copy"] |= {"latency_s": 0.0, "unit_s": 1e-10}
    cold["large"]["results"] = {"auto": {"ready": times(10.0), "host": times(256.0)}}
    num_bytes = 32 * 256 * 2 * (4 * (4096 + 4096) + 3 * (4096 + 11008))  # A and B of seven linears a layer
    table = cost_tables.large_table(cold)
    assert f"over {num_bytes * 1e-7:.1f} ms, the bus alone for 1.28 GB" in table
    assert f"| {256.0 / (num_bytes * 1e-7):.3f}x |" in table


def test_predictions_stand_beside_what_they_are_about(cold: dict[str, Any], workers: dict[str, Any]) -> None:
    cold["profile"]["results"]["bus"]["copy"] |= {"latency_s": 0.0, "unit_s": 1e-10}
    cold["idle"]["results"]["overlap"] = {
        "ready": times(5.0),
        "host": times(5.0 + 5.0331648),
        "disk": times(20),
    }
    table = cost_tables.predictions_table(cold, workers)
    assert "| copy of 101 MB | 10.07 ms | 5.03 ms | +100% |" in table


def test_every_fit_is_shown_with_its_quality(cold: dict[str, Any]) -> None:
    cold["profile"]["results"]["disk"]["quality"] = {
        "num_samples": 9,
        "r_squared": 0.5,
        "mean_error": 0.125,
        "worst_error": 0.25,
    }
    table = cost_tables.fits_table(cold)
    assert "| 9 | 0.5000 | 12.5% | 25% |" in table
    assert table.count("read from the page cache") == 1


def test_a_profile_is_shown_with_what_was_held_out(cold: dict[str, Any]) -> None:
    model = cost_tables.cost_model(cold)
    held_out = HeldOut(
        decode=quality_of([1.0, 2.0], [1.0, 2.5]),
        prefill=quality_of([1.0, 2.0], [1.0, 4.0]),
        serving=quality_of([1.0, 2.0], [1.0, 2.5]),
        load=quality_of([1.0, 2.0], [1.0, 2.0]),
    )
    cold["profile"]["results"] = json.loads(profile_to_json(replace(model, held_out=held_out)))
    table = cost_tables.fits_table(cold)
    assert "| held out: decode | random steps that decode | 2 | 0.7778 | 10.0% | 20% |" in table
    assert "| held out: prefill | random prompts | 2 | 0.1111 | 25.0% | 50% |" in table


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("idle", cold_tables.idle_table),
        ("setups", cold_tables.setups_table),
        ("burst", cold_tables.burst_table),
        ("signal", cold_tables.waits_table),
        ("syncs", cold_tables.waits_table),
        ("large", cost_tables.large_table),
        ("profile", cost_tables.large_table),
        ("profile", cost_tables.fits_table),
    ],
)
def test_a_section_not_measured_says_what_to_run(
    name: str, make: Callable[[dict[str, Any]], str], cold: dict[str, Any]
) -> None:
    del cold[name]
    with pytest.raises(TableError, match=f"no section '{name}': run benchmarks.gpu_cold {name}"):
        make(cold)


def test_a_profile_that_is_none_says_what_to_run(cold: dict[str, Any]) -> None:
    del cold["profile"]["results"]["disk"]
    with pytest.raises(TableError, match=r"no 'disk'; run benchmarks\.gpu_cold profile"):
        cost_tables.fits_table(cold)


def test_a_profile_of_a_cpu_is_refused(cold: dict[str, Any]) -> None:
    cold["profile"]["results"]["bus"] = None
    with pytest.raises(TableError, match="on a GPU"):
        cost_tables.fits_table(cold)


@pytest.mark.parametrize(("left_out", "reason"), [("float32", "float32"), (None, "without --tiny")])
def test_products_not_measured_say_what_to_run(
    left_out: str | None, reason: str, workers: dict[str, Any]
) -> None:
    if left_out is not None:
        del workers[left_out]
    else:
        workers["bfloat16"]["products"] = [{"rank": 8, "tokens": 16}]
    with pytest.raises(TableError, match=reason):
        cold_tables.workers_table(workers)
