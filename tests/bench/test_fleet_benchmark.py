"""The fleet's benchmark at sizes that a test can take, and the tables that are made from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import draw_fleet, fleet, fleet_sections, fleet_tables, sources
from benchmarks.fleet_bounds import measure_bounds
from benchmarks.fleet_decisions import measure_decisions
from loraplex.fleet.policy import Policy
from loraplex.twin.fleet_run import FleetRuns
from loraplex.twin.slo import Slo

FLEET = fleet_sections.Fleet(
    paper="toppings-8-servers",
    profile=fleet_sections.PADDED,
    num_replicas=2,
    duration_s=2.0,
    rate=10.0,
    data=None,
    goal=fleet_sections.PACE,
)
SIZE = fleet_sections.Size(
    data=None, num_replicas=2, sixty="", duration_s=None, rate=None, num_seeds=1, found={}
)


def test_a_run_tells_the_figures_that_policies_are_compared_by() -> None:
    found = fleet.perform(fleet_sections.Run(name="any", fleet=FLEET, policy="auto"))
    assert found["policy"] == "auto"
    assert 0 <= found["attainment"] <= 1
    assert found["worst_adapter_over_fleet"] > 0
    assert 0 < found["held_over_everywhere"] <= 1


@pytest.mark.parametrize(
    "goal",
    [
        fleet_sections.SIXTY_GOALS[""],
        fleet_sections.LORASERVE_GOAL,
        fleet_sections.DLORA_GOAL,
        fleet_sections.PACE,
    ],
    ids=str,
)
def test_a_capacity_is_the_highest_rate_that_reaches_the_goal(
    goal: fleet_sections.Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def highest(is_reached: Any, first: float, tolerance: float, factor: float) -> float:
        asked.append(first)
        assert tolerance == fleet_sections.TOLERANCE
        assert is_reached(first) in (True, False)
        return factor * first

    monkeypatch.setattr(fleet, "highest_rate", highest)
    found = fleet.perform(
        fleet_sections.Run(name="any", fleet=replace(FLEET, goal=goal), policy="most-idle", step=3.0)
    )
    assert asked == [10.0]
    assert found["capacity_rps"] == 30.0


def test_a_goal_is_for_a_share_of_requests_or_for_their_mean() -> None:
    _, requests, options = fleet.inputs_of(FLEET)
    runs = FleetRuns(fleet.inputs_of(FLEET)[0], requests, options)
    outcome = runs.run(Policy.of_name("most-idle"))
    times_s = [each.tpt_s for each in outcome.all.requests if each.tpt_s is not None]
    mean_s, most_s = sum(times_s) / len(times_s), max(times_s)
    for goal, limit_s in (
        (fleet_sections.Goal(share=1.0), most_s),
        (fleet_sections.Goal(share=None), mean_s),
    ):
        assert goal.is_reached(outcome, Slo(tpt_s=limit_s * (1 + 1e-9)))
        assert not goal.is_reached(outcome, Slo(tpt_s=limit_s * (1 - 1e-9)))


def test_a_section_makes_only_the_runs_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [fleet_sections.Run(name=name, fleet=FLEET, policy="random") for name in ("lacking", "made")]
    lacking, made = (run.key for run in runs)
    monkeypatch.setitem(fleet.RUNS, "sixty", lambda size: iter([runs]))
    section: dict[str, Any] = {"runs": {made: {"policy": "kept"}}}
    saved: list[list[str]] = []
    fleet.make_section("sixty", section, SIZE, lambda: saved.append(sorted(section["runs"])))
    assert saved == [[lacking, made]]
    assert section["runs"][made] == {"policy": "kept"}
    assert section["runs"][lacking]["policy"] == "random"
    assert list(section["runs"]) == [lacking, made], "in the order in which the section names them"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("nothing", {"auto", "oracle", "random"}),
        ("loraplex/fleet/routers/auto.py", {"random"}),
        ("loraplex/scheduling", set()),
    ],
)
def test_runs_stay_whose_code_has_not_changed(changed: str, expected: set[str]) -> None:
    here = {"sources": sources.fingerprints(fleet.FILE, "auto"), "parameters": {"rate": 1}}
    runs = {policy: {"policy": policy} for policy in ("auto", "oracle", "random")}
    held = {**here, "sources": here["sources"] | {changed: "another"}, "runs": runs}
    assert fleet.kept(held, here).get("runs", {}).keys() == expected
    assert fleet.kept({**held, "parameters": {"rate": 2}}, here) == {}


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
    for runs in fleet_sections.capacities(
        replace(SIZE, num_seeds=2, found=found), {"here": FLEET}, ("a", "b")
    ):
        for number, run in enumerate(runs, start=1):
            looked.append((run.key, run.fleet.rate, run.step))
            found[run.key] = {"capacity_rps": run.fleet.rate + number}
    assert looked == [
        ("here, capacity of a, seed 0", 10.0, fleet_sections.FAR),
        ("here, capacity of b, seed 0", 11.0, fleet_sections.NEAR),
        ("here, capacity of a, seed 1", 11.0, fleet_sections.NEXT_SEED),
        ("here, capacity of b, seed 1", 12.0, fleet_sections.NEXT_SEED),
    ]


def test_a_search_that_found_nothing_says_what_to_do() -> None:
    run = fleet_sections.Run(name="here", fleet=FLEET, policy="random", step=2.0)
    words = "here, capacity of random, seed 0: no rate was found; begin at another with --rate"
    with pytest.raises(SystemExit, match=words):
        replace(SIZE, found={run.key: {"capacity_rps": None}}).rate_found(run)


@pytest.mark.slow
def test_decisions_are_timed_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "fleet.json"
    fleet.main(["decisions", "--tiny", "--out", str(out)])
    written = json.loads(out.read_text())
    found = written["decisions"]["results"]
    assert set(found) == set(measure_decisions(tiny=True))
    assert "| routing, `auto`, us |" in fleet_tables.decisions_table(written)
    assert "| placing 40,000 adapters on 60 replicas, `auto` |" in fleet_tables.plans_table(written)
    assert "on one core of " in fleet_tables.decisions_note(written)


def capacity(fleet_name: str, policy: str, *rps: float) -> dict[str, Any]:
    return {
        f"{fleet_name}, capacity of {policy}, seed {seed}": {
            "fleet": fleet_name, "policy": policy, "seed": seed, "capacity_rps": each,
        }
        for seed, each in enumerate(rps)
    }  # fmt: skip


def section(*runs: dict[str, Any]) -> dict[str, Any]:
    found = {key: each for some in runs for key, each in some.items()}
    return {
        "date": "2026-01-02T03:04:05",
        "git_commit": "abc",
        "parameters": {"published_data": True, "tolerance": 0.05},
        "runs": found,
    }


def test_auto_is_shown_beside_the_best_of_the_others_and_the_oracle() -> None:
    name = "maf, padded"
    written = {
        "auto": section(
            capacity(name, "rank-aware", 10.0),
            capacity(name, "affinity", 11.0, 13.0),
            capacity(name, "oracle", 16.0),
            capacity(name, "auto", 15.0),
            capacity("maf, rank-proportional", "affinity", 3.0),
        )
    }
    table = fleet_tables.auto_table(written)
    assert "| maf, padded | 15.0 | 12.0 ± 12.7, `affinity` | 1.250 | 0.938 | 1.500 |" in table
    assert "| geometric mean, padded |  |  |  |  | 1.500 |" in table
    assert "rank-proportional" not in table, "auto has no figure there yet"
    assert fleet_tables.simulated_note(written, "auto") == (
        "Computed 2026-01-02, commit abc, published traces, 2 seeds at the most, rates found to within 5%.\n"
    )
    written["auto"]["parameters"] = SIZE.parameters
    assert fleet_tables.simulated_note(written, "auto") == (
        "Computed 2026-01-02, commit abc, synthetic traces, 2 seeds at the most, rates found to within 2%.\n"
    )
    written["auto"]["runs"] = {}
    assert fleet_tables.simulated_note(written, "auto").endswith("synthetic traces.\n"), (
        "nothing was searched"
    )


def test_loraserve_is_shown_over_the_first_policy_and_all_traces() -> None:
    written = {
        "loraserve": section(
            capacity("4 servers, a", "most-idle+random", 10.0),
            capacity("4 servers, a", "auto", 20.0),
            capacity("4 servers, b", "most-idle+random", 10.0),
            capacity("4 servers, b", "auto", 5.0),
            capacity("12 servers, a", "most-idle+random", 30.0),
        )
    }
    table = fleet_tables.loraserve_table(written)
    assert table.startswith("| capacity, P95 TTFT within 10 s | 4 servers | 12 servers |\n")
    assert "| `auto` | 1.00x (2 traces) | - |" in table


def test_storage_is_looked_at_where_the_first_policy_holds_its_goal() -> None:
    class Found(dict[str, Any]):
        def __missing__(self, key: str) -> dict[str, float]:
            return {"capacity_rps": 7.0 if fleet_sections.LORASERVE[0] in key else 9.0}

    made = [
        run
        for runs in fleet_sections.loraserve(replace(SIZE, num_seeds=2, found=Found()))
        for run in runs
        if run.step is None
    ]
    assert {run.fleet.rate for run in made} == {7.0}
    assert {(run.policy, run.fleet.seed) for run in made} == {
        (policy, seed) for policy in fleet_sections.LORASERVE_STORAGE for seed in (0, 1)
    }
    assert {run.fleet.paper for run in made} == set(fleet_sections.TRACES)


def test_storage_is_shown_over_a_copy_of_everything() -> None:
    def held(name: str, policy: str, *shares: float) -> dict[str, Any]:
        return {
            f"{name}, {policy}, seed {seed}": {
                "fleet": name, "policy": policy, "seed": seed, "held_over_everywhere": share,
            }
            for seed, share in enumerate(shares)
        }  # fmt: skip

    written = {
        "loraserve": section(
            capacity("4 servers, a", "auto", 20.0),
            held("4 servers, a", "rank-aware+everywhere", 1.0),
            held("4 servers, a", "auto", 0.2, 0.4),
            held("4 servers, b", "auto", 0.2),
            held("12 servers, a", "rank-aware+everywhere", 0.5),
        )
    }
    table = fleet_tables.loraserve_storage_table(written)
    assert table.startswith("| fullest host, over a copy of everything | 4 servers | 12 servers |\n")
    assert "| `rank-aware+everywhere` | 1.00, 1.0x less | 0.50, 2.0x less |" in table
    assert "| `auto` | 0.25, 4.0x less | - |" in table


def test_everything_everywhere_is_what_storage_is_shown_over() -> None:
    """A router without a plan ends with a copy of every adapter that it was asked for on every host."""
    fleet_of_two = replace(FLEET, num_adapters=5, rate=40.0, duration_s=4.0)
    found = fleet.perform(fleet_sections.Run(name="any", fleet=fleet_of_two, policy="round-robin"))
    assert found["held_over_everywhere"] == 1.0


def test_dlora_is_shown_over_round_robin() -> None:
    runs = (capacity("known", "round-robin+random", 2.0), capacity("known", "auto", 5.0))
    assert "| known | `auto` | 5.0 | 2.50x |" in fleet_tables.dlora_table({"dlora": section(*runs)})


def test_every_policy_is_shown_on_every_workload() -> None:
    runs = (capacity("maf, padded", "affinity", 2.0, 4.0), capacity("maf", "auto", 5.0))
    table = fleet_tables.policies_table({"auto": section(*runs)})
    assert table.startswith("| workload, kernels | `affinity` | `auto` |\n")
    assert "| maf, padded | 3.0" in table
    assert "| maf | - | 5.0 |" in table


def test_sixty_servers_and_the_figures_of_auto_are_shown(tmp_path: Path) -> None:
    def runs(name: str, policy: str, tpt_s: float) -> dict[str, Any]:
        figures = {
            "attainment": 0.9, "attainment_after_first_token": 0.99, "tpt_mean_s": tpt_s, "rate_rps": 600.0,
            "adapter_loads": 1e3 * tpt_s, "busiest_over_mean": 1.1, "worst_adapter_over_fleet": 2.0,
            "held_over_everywhere": 0.2,
        }  # fmt: skip
        return {f"{name}, {policy}": {"fleet": name, "policy": policy, "seed": 0, **figures}}

    written = {
        "sixty": section(runs("padded", "random", 0.010), runs("padded", "rank-aware", 0.008)),
        "auto": section(
            runs("maf, padded", "affinity", 0.01),
            runs("maf, padded", "auto", 0.004),
            capacity("maf, padded", "auto", 10.0),
        ),
    }
    table = fleet_tables.sixty_table(written)
    assert "| padded, 600 requests/s | `random` | 90.0 | 99.0 | 10.00 | -20.0% | 10 |" in table
    assert "| maf, padded | 0.40 | 1.10 | 2.00 | 0.20 |" in fleet_tables.auto_figures_table(written)
    draw_fleet.draw(written, tmp_path / "policies.svg")
    assert "rank-aware" in (tmp_path / "policies.svg").read_text()


@pytest.mark.parametrize(
    "table",
    [
        fleet_tables.bounds_table,
        fleet_tables.sixty_table,
        fleet_tables.loraserve_table,
        fleet_tables.loraserve_storage_table,
        fleet_tables.dlora_table,
        fleet_tables.policies_table,
        fleet_tables.auto_table,
        fleet_tables.auto_figures_table,
    ],
)
def test_what_was_not_simulated_yet_is_said(table: Any) -> None:
    assert table({}) == "Not measured yet.\n"


def test_the_gain_of_keeping_ranks_apart_is_bounded() -> None:
    found = measure_bounds(None)
    assert {each["gain_at_most"] for each in found["dlora-bursty"].values()} == {1.0}, "they have one rank"
    small, *_, large = (each["gain_at_most"] for each in found["loraserve-rank-skew"].values())
    assert 1.0 < small < large < 2.0
    table = fleet_tables.bounds_table({"bounds": {"results": found}})
    assert "| 1.00x |" in table
    assert "tokens/s of a batch of 32, by rank" in table
