"""`loraplex plan watch`: when it proposes another plan, and what that costs and gains."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from canned_server import Canned, answering, demand_of
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from small import PROFILE_NAME, slot_profile
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.planner.demand import AdapterDemand
from loraplex.planner.fingerprint import fingerprint
from loraplex.planner.move_cost import AdapterSize
from loraplex.planner.placement_steps import holders_of, placement_of
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.plan_file import plan_to_json, read_plan
from loraplex.planner.watch import Finding, Hysteresis, with_least_moves

PLACEMENT, DEMAND = "/v1/fleet/placement", "/v1/demand"
RATE_RPS = 1.0


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a minute with one seed."""
    monkeypatch.setattr("loraplex.planner.watch.LOOKED_S", 60.0)
    monkeypatch.setattr("loraplex.planner.watch.SEEDS", (1,))


def plan_of(*gpus: tuple[str, ...], rate_rps: float = RATE_RPS, num_slots: int = 8) -> Plan:
    return Plan(
        gpus=tuple(
            GpuPlan(
                adapters=tuple(AdapterDemand(name=name, rank=8, rate_rps=rate_rps) for name in names),
                num_slots=num_slots,
            )
            for names in gpus
        ),
        profile=PROFILE_NAME,
        packer="max-pack",
        prompt_tokens=200.0,
        output_tokens=30.0,
    )


def placement_of_fleet(*gpus: tuple[str, ...]) -> dict[str, Any]:
    """Return what a fleet answers that serves so, by replicas with the numbers 1, 2, and so on."""
    rows = [
        {
            "name": name,
            "version": f"version-of-{name}",
            "rank": 8,
            "bytes": 2**20,
            "replicas": [number],
            "given": [number],
            "waiting": [],
        }
        for number, names in enumerate(gpus, start=1)
        for name in names
    ]
    numbers = list(range(1, len(gpus) + 1))
    return {"object": "placement", "is_given": True, "stands": True, "replicas": numbers, "data": rows}


def fleet_of(rates_rps: dict[str, float], *gpus: tuple[str, ...]) -> Canned:
    return {DEMAND: (200, demand_of(rates_rps)), PLACEMENT: (200, placement_of_fleet(*gpus))}


def look(folder: Path, plan: Plan, canned: Canned, *args: str) -> Result:
    """Watch a fleet for one look."""
    (folder / "plan.json").write_text(plan_to_json(plan))
    with answering(canned) as url:
        options = ["plan", "watch", str(folder / "plan.json"), "--url", url, "--once", *args]
        return CliRunner().invoke(app, options, env={"COLUMNS": "200"})


GPUS = (("a", "b", "c", "d"), ("e", "f"))


def test_a_plan_holds_while_no_more_is_asked_for(tmp_path: Path) -> None:
    rates = dict.fromkeys("abcdef", 0.9 * RATE_RPS)
    held = look(tmp_path, plan_of(*GPUS), fleet_of(rates, *GPUS), "--json", str(tmp_path / "look.json"))
    assert held.exit_code == 0, held
    assert "the plan holds: asked for 1,242 tokens/s, planned for 1,380 on 2 GPUs" in held.output
    assert json.loads((tmp_path / "look.json").read_text())["proposal"] is None


def test_a_gpu_that_starves_is_relieved_and_as_little_moves_as_can(tmp_path: Path) -> None:
    out = tmp_path / "proposed.json"
    rates = dict.fromkeys("abcd", 16.0) | dict.fromkeys("ef", 1.0)
    found = look(
        *(tmp_path, plan_of(*GPUS), fleet_of(rates, *GPUS)),
        *("--out", str(out), "--json", str(tmp_path / "look.json")),
    )
    assert found.exit_code == 4, found
    assert "1 of 2 GPUs starve in the twin" in found.output
    figures = json.loads((tmp_path / "look.json").read_text())
    proposal = figures["proposal"]
    assert (figures["verdict"], figures["failing_gpus"]) == ("too small", 1)
    assert proposal["gained_tok_s"] > 0
    assert proposal["least_served"] > 0.9
    assert proposal["num_bytes"] == proposal["num_loads"] * 2**20 > 0
    assert "it gains:" in found.output
    assert f"`loraplex plan apply {out}" in found.output
    homes = holders_of(placement_of(read_plan(out)))
    assert all(homes[name] == {1} for name in "ef"), "what is on a GPU that holds stays there"
    assert proposal["num_loads"] == sum(homes[name] != {0} for name in "abcd") < 4


def test_fewer_gpus_are_proposed_where_they_do_with_room_to_spare(tmp_path: Path) -> None:
    rates = dict.fromkeys("abcdef", 0.1)
    found = look(tmp_path, plan_of(*GPUS), fleet_of(rates, *GPUS))
    assert found.exit_code == 4, found
    assert "fewer GPUs may do" in found.output
    assert "proposed: 1 GPU, instead of 2" in found.output
    assert "it gains: 1 GPU" in found.output
    assert "give --out FILE" in found.output


def test_a_handful_of_requests_says_nothing_of_fewer_gpus(tmp_path: Path) -> None:
    """The fleet may just have started."""
    rates = dict.fromkeys("abcdef", 0.001)
    found = look(tmp_path, plan_of(*GPUS), fleet_of(rates, *GPUS))
    assert found.exit_code == 0, found
    assert "the rates are rough" in found.output
    assert "the plan holds" in found.output


def test_it_looks_again_and_again_and_proposes_what_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text(plan_to_json(plan_of(*GPUS)))
    there = fleet_of(dict.fromkeys("abcdef", 0.1), *GPUS)
    canned: dict[str, tuple[int, Any]] = {}
    pauses_s: list[float] = []

    def pause(seconds: float) -> None:
        pauses_s.append(seconds)
        canned.update(there)  # it was not there at the first look
        if len(pauses_s) == 4:
            raise typer.Exit(9)

    monkeypatch.setattr("loraplex.cli.plan_watch.time", SimpleNamespace(sleep=pause))
    with answering(canned) as url:
        args = ["plan", "watch", str(tmp_path / "plan.json"), "--url", url, "--every", "60"]
        watched = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert watched.exit_code == 9, watched
    assert pauses_s == [60.0] * 4
    assert "looking again in 1 min" in watched.stderr
    assert watched.stdout.count("fewer GPUs may do") == 3
    assert watched.stdout.count("proposed: 1 GPU, instead of 2") == 1


@pytest.mark.parametrize(("gone", "num_proposals"), [("--out", 2), ("--json", 1)])
def test_only_a_proposal_that_could_not_be_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, num_proposals: int
) -> None:
    """The folder of one of the files is gone when the proposal is made first."""
    (tmp_path / "plan.json").write_text(plan_to_json(plan_of(*GPUS)))
    folder = tmp_path / "folder"
    folder.mkdir()
    files = {"--out": tmp_path / "proposed.json", "--json": tmp_path / "look.json"}
    files[gone] = folder / files[gone].name
    num_pauses = 0

    def pause(seconds: float) -> None:
        nonlocal num_pauses
        num_pauses += 1
        match num_pauses:
            case 1:
                shutil.rmtree(folder)
            case 2:
                folder.mkdir()
            case _:
                raise typer.Exit(9)

    monkeypatch.setattr("loraplex.cli.plan_watch.time", SimpleNamespace(sleep=pause))
    with answering(fleet_of(dict.fromkeys("abcdef", 0.1), *GPUS)) as url:
        options = [word for option, path in files.items() for word in (option, str(path))]
        args = ["plan", "watch", str(tmp_path / "plan.json"), "--url", url, *options]
        watched = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert watched.exit_code == 9, watched
    words = f"{files[gone]}: cannot be written (No such file or directory); make room, or name another"
    assert watched.stderr.count(words) == 1
    assert watched.stdout.count("proposed: 1 GPU") == num_proposals
    assert watched.stdout.count("carry it out with") == 1, "only what was written can be carried out"
    assert len(read_plan(files["--out"]).gpus) == 1


def test_a_repaired_plan_is_proposed_where_the_packer_has_none(tmp_path: Path) -> None:
    """Each adapter needs a GPU, and the random packing puts two on one, of however many GPUs."""
    out, gpus = tmp_path / "proposed.json", (("a", "b"), ("c",))
    plan = replace(plan_of(*gpus), packer="random")
    rates = dict.fromkeys("abc", 32.0)
    found = look(tmp_path, plan, fleet_of(rates, *gpus), "--out", str(out))
    assert found.exit_code == 4, found
    assert [len(gpu.adapters) for gpu in read_plan(out).gpus] == [1, 1, 1]


def test_a_packer_without_a_plan_leaves_the_gpus_as_they_are(tmp_path: Path) -> None:
    """Each adapter has a GPU and needs one, and far less is asked for than planned."""
    gpus = tuple((name,) for name in "abc")
    plan = replace(plan_of(*gpus, rate_rps=64.0), packer="random")
    found = look(tmp_path, plan, fleet_of(dict.fromkeys("abc", 32.0), *gpus))
    assert found.exit_code == 0, found
    assert "fewer GPUs may do" in found.output
    assert "3 GPUs are needed for 1.25 times that, as now" in found.output


def test_an_adapter_that_no_gpu_serves_is_left_out_of_the_proposal(tmp_path: Path) -> None:
    out, gpus = tmp_path / "proposed.json", (("a", "b", "huge"), ("c",))
    measured, placed = demand_of(dict.fromkeys("abc", 0.1)), placement_of_fleet(*gpus)
    measured["data"].append({"name": "huge", "rank": 1024, "requests": 0})
    next(row for row in placed["data"] if row["name"] == "huge")["rank"] = 1024
    canned = {DEMAND: (200, measured), PLACEMENT: (200, placed)}
    found = look(tmp_path, plan_of(("a", "b"), ("c",)), canned, "--out", str(out))
    assert found.exit_code == 4, found
    assert "adapter 'huge' has rank 1,024, and engines serve ranks up to 512 on a GPU" in found.stderr
    assert [len(gpu.adapters) for gpu in read_plan(out).gpus] == [3]


def test_a_plan_is_watched_with_another_profile_and_says_so(tmp_path: Path) -> None:
    plan = replace(plan_of(*GPUS), profile="gone.json", profile_sha256="of another")
    fleet, out = fleet_of(dict.fromkeys("abcdef", 0.1), *GPUS), tmp_path / "proposed.json"
    refused = look(tmp_path, plan, fleet)
    assert "no file or named profile 'gone.json'" in str(refused.exception)
    assert "name it by --profile" in str(refused.exception)
    found = look(tmp_path, plan, fleet, "--profile", PROFILE_NAME, "--out", str(out))
    assert found.exit_code == 4, found
    assert "is not the one that the plan was made with (gone.json)" in found.stderr
    assert (read_plan(out).profile, read_plan(out).profile_sha256) == (
        PROFILE_NAME,
        fingerprint(slot_profile()),
    )


@pytest.mark.parametrize(
    ("canned", "words"),
    [
        (fleet_of({"a": 1.0}, ("a",)), "the plan is for 2 GPUs, and the fleet has 1 replica"),
        ({DEMAND: (200, demand_of({"a": 1.0}))}, "is it a loraplex server with replicas?"),
        ({PLACEMENT: (200, placement_of_fleet(*GPUS))}, "is it a loraplex server with a measured demand?"),
        ({PLACEMENT: (401, {})}, "wants an API key"),
        ({PLACEMENT: (200, {"data": [], "replicas": 3})}, "a server of this version of loraplex"),
    ],
)
def test_what_cannot_be_watched_is_said(tmp_path: Path, canned: Canned, words: str) -> None:
    refused = look(tmp_path, plan_of(*GPUS), canned)
    assert refused.exit_code == 1
    assert words in str(refused.exception)


def acted(hysteresis: Hysteresis, looks: list[tuple[Finding, float]]) -> list[bool]:
    """Act at each look at which it is time to; return when that was."""
    found = []
    for verdict, measured_tok_s in looks:
        found.append(hysteresis.is_due(verdict, measured_tok_s))
        if found[-1]:
            hysteresis.acted(measured_tok_s)
    return found


def test_a_reason_must_last_and_is_acted_on_once() -> None:
    hysteresis = Hysteresis(num_looks=2)
    verdicts = [Finding.TOO_SMALL, Finding.HOLDS, Finding.TOO_SMALL, Finding.TOO_SMALL, Finding.TOO_SMALL]
    assert acted(hysteresis, [(each, 100.0) for each in verdicts]) == [False, False, False, True, False]


def test_fewer_gpus_are_not_looked_for_again_until_traffic_has_fallen_further() -> None:
    hysteresis = Hysteresis(num_looks=2)
    looks = [100.0, 100.0, 95.0, 91.0, 89.0, 85.0]
    found = acted(hysteresis, [(Finding.TOO_LARGE, measured) for measured in looks])
    assert found == [False, True, False, False, True, False]


@pytest.mark.parametrize("verdict", [Finding.TOO_SMALL, Finding.TOO_LARGE])
def test_what_was_not_acted_on_stays_due(verdict: Finding) -> None:
    hysteresis = Hysteresis(num_looks=2)
    assert [hysteresis.is_due(verdict, 100.0) for _ in range(4)] == [False, True, True, True]
    hysteresis.acted(100.0)
    assert not hysteresis.is_due(verdict, 100.0)


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_a_plan_that_only_renames_gpus_moves_nothing(order: list[int], homes: list[int]) -> None:
    gpus = [tuple(f"a{place}" for place, home in enumerate(homes) if home == gpu) for gpu in range(4)]
    renamed = plan_of(*(gpus[gpu] for gpu in order))
    present = holders_of(placement_of(plan_of(*gpus)))
    sizes = {f"a{place}": AdapterSize(rank=8, num_bytes=place + 1) for place in range(8)}
    assert holders_of(placement_of(with_least_moves(renamed, present, sizes))) == present
