"""The fleet's benchmark at sizes that a test can take, and the tables that are made from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import fleet, fleet_tables
from benchmarks.fleet_decisions import measure_decisions

FLEET = fleet.Fleet(
    paper="toppings-8-servers",
    profile=fleet.PADDED,
    num_replicas=2,
    duration_s=2.0,
    rate=10.0,
    data=None,
    goal=fleet.PACE,
)
SIZE = fleet.Size(data=None, num_replicas=2, sixty="", duration_s=None, rate=None, num_seeds=1, found={})


def test_a_run_tells_the_figures_that_policies_are_compared_by() -> None:
    found = fleet.perform(fleet.Run(name="any", fleet=FLEET, policy="auto"))
    assert found["policy"] == "auto"
    assert 0 <= found["attainment"] <= 1
    assert found["worst_adapter_over_fleet"] > 0
    assert 0 < found["held_over_everywhere"] <= 1


@pytest.mark.parametrize(
    "goal", [fleet.TOPPINGS_GOAL, fleet.LORASERVE_GOAL, fleet.DLORA_GOAL, fleet.PACE], ids=str
)
def test_a_capacity_is_the_highest_rate_that_reaches_the_goal(
    goal: fleet.Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def highest(is_reached: Any, first: float, *, factor: float) -> float:
        asked.append(first)
        assert is_reached(first) in (True, False)
        return factor * first

    monkeypatch.setattr(fleet, "highest_rate", highest)
    found = fleet.perform(
        fleet.Run(name="any", fleet=replace(FLEET, goal=goal), policy="most-idle", step=3.0)
    )
    assert asked == [10.0]
    assert found["capacity_rps"] == 30.0


def test_a_goal_is_for_a_share_of_requests_or_for_their_mean() -> None:
    _, requests, options = fleet.inputs_of(FLEET)
    runs = fleet.FleetRuns(fleet.inputs_of(FLEET)[0], requests, options)
    outcome = runs.run(fleet.Policy.of_name("most-idle"))
    times_s = [each.tpt_s for each in outcome.all.requests if each.tpt_s is not None]
    mean_s, most_s = sum(times_s) / len(times_s), max(times_s)
    for goal, limit_s in ((fleet.Goal(share=1.0), most_s), (fleet.Goal(share=None), mean_s)):
        assert goal.is_reached(outcome, fleet.Slo(tpt_s=limit_s * (1 + 1e-9)))
        assert not goal.is_reached(outcome, fleet.Slo(tpt_s=limit_s * (1 - 1e-9)))


def test_a_section_makes_only_the_runs_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [fleet.Run(name=name, fleet=FLEET, policy="random") for name in ("made", "lacking")]
    made, lacking = (run.key for run in runs)
    monkeypatch.setitem(fleet.RUNS, "sixty", lambda size: iter([runs]))
    section: dict[str, Any] = {"runs": {made: {"policy": "kept"}}}
    saved: list[list[str]] = []
    fleet.make_section("sixty", section, SIZE, lambda: saved.append(sorted(section["runs"])))
    assert saved == [[lacking, made]]
    assert section["runs"][made] == {"policy": "kept"}
    assert section["runs"][lacking]["policy"] == "random"


def test_every_section_names_runs_that_differ() -> None:
    class Found(dict[str, Any]):
        def __missing__(self, key: str) -> dict[str, float]:
            return {"capacity_rps": 5.0}

    size = replace(SIZE, num_replicas=None, sixty="maf", num_seeds=2, found=Found())
    for name, section in fleet.RUNS.items():
        keys = [run.key for runs in section(size) for run in runs]
        assert len(keys) == len(set(keys)), name
        assert len(keys) > 7, name


def test_others_are_looked_for_near_what_the_first_one_sustains() -> None:
    found: dict[str, Any] = {}
    looked: list[tuple[str, float, float | None]] = []
    for runs in fleet.capacities(replace(SIZE, num_seeds=2, found=found), {"here": FLEET}, ("a", "b")):
        for number, run in enumerate(runs, start=1):
            looked.append((run.key, run.fleet.rate, run.step))
            found[run.key] = {"capacity_rps": run.fleet.rate + number}
    assert looked == [
        ("here, capacity of a, seed 0", 10.0, fleet.FAR),
        ("here, capacity of b, seed 0", 11.0, fleet.NEAR),
        ("here, capacity of a, seed 1", 11.0, fleet.NEAR),
        ("here, capacity of b, seed 1", 12.0, fleet.NEAR),
    ]


def test_a_search_that_found_nothing_says_what_to_do() -> None:
    run = fleet.Run(name="here", fleet=FLEET, policy="random", step=2.0)
    words = "here, capacity of random, seed 0: no rate was found; begin at another with --rate"
    with pytest.raises(SystemExit, match=words):
        replace(SIZE, found={run.key: {"capacity_rps": None}}).rate_found(run)


def test_decisions_are_timed_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "fleet.json"
    fleet.main(["decisions", "--tiny", "--out", str(out)])
    written = json.loads(out.read_text())
    found = written["decisions"]["results"]
    assert set(found) == set(measure_decisions(tiny=True))
    assert "| routing, `auto`, us |" in fleet_tables.decisions_table(written)
    assert "| placing 40,000 adapters on 60 replicas, `auto` |" in fleet_tables.plans_table(written)
    assert "on one core of " in fleet_tables.decisions_note(written)
