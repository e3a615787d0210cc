"""The fleet's benchmark at sizes that a test can take, and the tables that are made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import fleet, fleet_tables
from benchmarks.fleet_decisions import measure_decisions

FLEET = fleet.Fleet(
    paper="toppings-8-servers", profile=fleet.PADDED, num_replicas=2, duration_s=2.0, rate=10.0, data=None
)


def test_a_run_tells_the_figures_that_policies_are_compared_by() -> None:
    found = fleet.perform(fleet.Run(key="any", fleet=FLEET, policy="auto"))
    assert found["policy"] == "auto"
    assert 0 <= found["attainment"] <= 1
    assert found["worst_adapter_over_fleet"] > 0
    assert 0 < found["held_over_everywhere"] <= 1


@pytest.mark.parametrize("holds", fleet.HOLDS)
def test_a_capacity_is_the_highest_rate_that_holds(holds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def highest(held: Any, first: float) -> float:
        asked.append(first)
        assert held(first) in (True, False)
        return 3 * first

    monkeypatch.setattr(fleet, "highest_rate", highest)
    found = fleet.perform(fleet.Run(key="any", fleet=FLEET, policy="most-idle", holds=holds))
    assert asked == [10.0]
    assert found["capacity_rps"] == 30.0


def test_a_section_makes_only_the_runs_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [fleet.Run(key=key, fleet=FLEET, policy="random") for key in ("made", "lacking")]
    monkeypatch.setitem(fleet.RUNS, "sixty", lambda size: iter([runs]))
    section: dict[str, Any] = {"runs": {"made": {"policy": "kept"}}}
    saved: list[list[str]] = []
    size = fleet.Size(data=None, num_replicas=2, sixty="", duration_s=None, rate=None, num_seeds=1, found={})
    fleet.make_section("sixty", section, size, lambda: saved.append(sorted(section["runs"])))
    assert saved == [["lacking", "made"]]
    assert section["runs"]["made"] == {"policy": "kept"}
    assert section["runs"]["lacking"]["policy"] == "random+everywhere"


def test_every_section_names_runs_that_differ() -> None:
    rate = {"capacity_rps": 5.0}
    found = {f"{kernels}, rate of random": rate for kernels in ("padded", "rank-proportional")}
    found |= {
        f"{paper}, {kernels}, affinity": rate
        for paper, _, _ in fleet.AUTO
        for kernels in ("padded", "rank-proportional")
    }
    size = fleet.Size(
        data=None, num_replicas=None, sixty="maf", duration_s=None, rate=None, num_seeds=2, found=found
    )
    for name, section in fleet.RUNS.items():
        keys = [run.key for runs in section(size) for run in runs]
        assert len(keys) == len(set(keys)), name
        assert len(keys) > 7, name


def test_decisions_are_timed_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "fleet.json"
    fleet.main(["decisions", "--tiny", "--out", str(out)])
    written = json.loads(out.read_text())
    found = written["decisions"]["results"]
    assert set(found) == set(measure_decisions(tiny=True))
    assert "| routing, `auto`, us |" in fleet_tables.decisions_table(written)
    assert "| placing 40,000 adapters on 60 replicas, `auto` |" in fleet_tables.plans_table(written)
    assert "on one core of " in fleet_tables.decisions_note(written)
