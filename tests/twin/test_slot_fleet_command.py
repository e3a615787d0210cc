"""`loraplex fleet` with a profile of an engine with slots for adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_commands import FIGURES, fleet, slot_fleet, slot_profile_in, written
from twins import random_workload
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.workload.jsonl import WorkloadRequest, write_workload


def test_a_queue_that_shrinks_before_the_last_requests_come_is_no_overload(
    slots: Path, tmp_path: Path
) -> None:
    """A slow first load and a burst make a queue, and the last requests, one at a time, find none."""
    path = tmp_path / "early.jsonl"
    burst = random_workload(3, num_requests=120, num_adapters=9, rps=400.0)
    tail = [
        WorkloadRequest(arrival_s=1.0 + 0.05 * number, prompt_tokens=10, output_tokens=2, adapter=number % 9)
        for number in range(60)
    ]
    write_workload(path, [*(each for each in burst if each.arrival_s < 1.0), *tail])
    out = tmp_path / "out.json"
    result = slot_fleet("simulate", slots, path, "--routing", "random", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert written(out)["summary"]["starved"], "or the test shows nothing"
    assert "overloaded" not in result.output


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    return slot_profile_in(tmp_path)


def test_a_fleet_of_engines_with_slots_is_simulated(slots: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = slot_fleet("simulate", slots, workload, "--routing", "auto", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "120 of 120 requests served" in result.output
    found = written(out)
    assert found["figures"].keys() == FIGURES
    assert found["figures"]["bytes_moved"] is None, "the profile does not say how large adapters are"
    assert found["figures"]["adapter_loads"] > 0
    args = ("--routing", "round-robin", "--link", "25GB/s", "--json", str(out))
    assert "give --adapter-mib, or leave --link out" in str(
        slot_fleet("simulate", slots, workload, *args).exception
    )
    result = slot_fleet("simulate", slots, workload, *args, "--adapter-mib", "80")
    assert "GB fetched" in result.output
    assert written(out)["figures"]["bytes_moved"] % (80 << 20) == 0


@pytest.mark.parametrize("command", ["compare", "capacity"])
def test_a_policy_that_slots_have_no_use_for_is_refused_before_anything_runs(
    command: str, slots: Path, workload: Path
) -> None:
    result = slot_fleet(command, slots, workload, "--policies", "random,affinity+burst-tolerance")
    assert "affinity+burst-tolerance: burst-tolerance is about memory" in str(result.exception)
    assert "random" not in result.output


def test_policies_of_engines_with_slots_are_compared(slots: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("--policies", "rank-aware,routing-table+loraserve", "--seeds", "1", "--json", str(out))
    result = slot_fleet("compare", slots, workload, *args)
    assert result.exit_code == 0, result.output
    assert list(written(out)["policies"]) == ["rank-aware+everywhere", "routing-table+loraserve"]


@pytest.mark.slow
def test_capacity_of_engines_with_slots_is_found(slots: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("--policies", "most-idle", "--attainment", "0.9", "--slo-tpt", "100ms", "--json", str(out))
    result = slot_fleet("capacity", slots, workload, *args)
    assert result.exit_code == 0, result.output
    assert written(out)["capacity_rps"]["most-idle+everywhere"] > 0


def test_slots_are_refused_for_an_engine_without(profile: Path, workload: Path) -> None:
    result = fleet("simulate", profile, workload, "--replicas", "2", "--routing", "random", "--slots", "3")
    assert "the profile is of an engine without slots; leave --slots out" in str(result.exception)


def test_slots_are_hinted_at_where_they_are_left_to_the_default(slots: Path, workload: Path) -> None:
    files = ("--profile", str(slots), "--workload", str(workload), "--replicas", "2", "--routing", "random")
    result = CliRunner().invoke(app, ["fleet", "simulate", *files])
    assert "each replica has 9, one for each adapter, unless --slots says how many" in result.output
    assert "--slots" not in slot_fleet("simulate", slots, workload, "--routing", "random").output
