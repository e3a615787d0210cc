"""`loraplex plan apply` and `release` against a fleet of three replicas that serves meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from server_process import Ended, complete, replicas, run_command, serving, wait_until

from loraplex.cli.measured_demand import measured_demand
from loraplex.planner.demand import AdapterDemand
from loraplex.planner.placement_steps import placement_of
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.plan_file import plan_to_json, read_plan

RANKS = {"one": 4, "two": 8, "three": 4, "cold": 4}
OURS = "h200-llama-2-7b"
REPLICAS = (0, 1, 2)


class Front(NamedTuple):
    """A live front of three replicas. `options`: start another one on its state folder. `fresh`: folders of
    adapters that no replica has seen."""

    process: subprocess.Popen[str]
    url: str
    options: tuple[str, ...]
    fresh: tuple[Path, ...]


@pytest.fixture(scope="module")
def front(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    allowed = tmp_path_factory.mktemp("fresh")
    fresh = (allowed / "first", allowed / "second")
    for alpha, each in enumerate(fresh, start=3):
        shutil.copytree(folder / "more" / "cold", each)
        config = json.loads((each / "adapter_config.json").read_text())
        (each / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": alpha}))
    options = ("--adapters", str(folder / "adapters"), "--adapters", str(folder / "more"))
    options = (*options, "--allow-adapter-dir", str(allowed))
    options = (*options, "--state-dir", str(tmp_path_factory.mktemp("state")), "--replicas", "3")
    options = (*options, "--routing", "most-idle", "--placement", "auto")
    with serving(folder, *options, command="fleet serve") as (process, url, _):
        yield Front(process, url, options, fresh)


@pytest.fixture(scope="module")
def fleet(front: Front) -> str:
    return front.url


def plan_in(
    folder: Path,
    *gpus: tuple[str, ...],
    ranks: dict[str, int] = RANKS,
    rate_rps: float = 0.1,
) -> str:
    """Write a plan of GPUs with these adapters; returns the path of its file."""
    plan = Plan(
        gpus=tuple(
            GpuPlan(
                adapters=tuple(
                    AdapterDemand(name=name, rank=ranks.get(name, 8), rate_rps=rate_rps) for name in names
                ),
                num_slots=None,
            )
            for names in gpus
        ),
        profile=OURS,
        packer="hand",
        prompt_tokens=50.0,
        output_tokens=20.0,
    )
    (folder / "plan.json").write_text(plan_to_json(plan))
    return str(folder / "plan.json")


def command(url: str, *args: str) -> Ended:
    return run_command("plan", *args, "--url", url)


def placement(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/fleet/placement").json()
    return found


def where(url: str) -> dict[str, list[int]]:
    return {row["name"]: row["replicas"] for row in placement(url)["data"]}


def sent_by(url: str, name: str) -> list[int]:
    """Ask an adapter a few times; returns the requests that each replica was sent."""
    before = [row["sent"] for row in replicas(url)]
    for _ in range(3):
        complete(url, name, max_tokens=2)
    return [row["sent"] - earlier for row, earlier in zip(replicas(url), before, strict=True)]


@contextmanager
def asked_all_the_time(url: str) -> Iterator[list[int]]:
    """Ask all adapters in turn while the block runs; yields the statuses of the answers so far."""
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        body = {"prompt": "w5 w6", "max_tokens": 2}
        with httpx.Client(timeout=60.0) as client:
            while not is_over.is_set():
                for name in RANKS:
                    answered = client.post(f"{url}/v1/completions", json={**body, "model": name})
                    statuses.append(answered.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield statuses
    finally:
        is_over.set()
        asking.join()


def test_a_plan_is_carried_out_while_requests_are_served(fleet: str, tmp_path: Path) -> None:
    first = plan_in(tmp_path, ("one", "two"), ("three",), ("cold",))
    with asked_all_the_time(fleet) as statuses:
        wait_until(lambda: len(statuses) > 8, "nothing is answered")
        applied = command(fleet, "apply", first)
        assert applied.returncode == 0, applied
        assert "the plan is carried out on 3 replicas" in applied.stdout
        assert where(fleet) == {"one": [0], "two": [0], "three": [1], "cold": [2]}
        second = plan_in(tmp_path, ("cold",), ("one", "two"), ("three",))
        assert command(fleet, "apply", second, "--force").returncode == 0
        num_then = len(statuses)
        wait_until(lambda: len(statuses) > num_then + 8, "nothing is answered any more")
    assert set(statuses) == {200}
    assert where(fleet) == {"one": [1], "two": [1], "three": [2], "cold": [0]}
    assert [sent_by(fleet, name) for name in ("cold", "two", "three")] == [[3, 0, 0], [0, 3, 0], [0, 0, 3]]
    again = command(fleet, "apply", second, "--force")
    assert "every adapter is on the replicas of the plan already" in again.stdout
    assert again.returncode == 0


def test_the_status_of_a_fleet_says_which_plan_it_serves_by(fleet: str, tmp_path: Path) -> None:
    path = plan_in(tmp_path, ("one", "two"), ("three",), ())
    assert command(fleet, "apply", path, "--force").returncode == 0
    said = run_command("fleet", "status", "--url", fleet).stdout
    assert "plan: plan.json, packed by hand, 3 adapters, in force since" in said
    assert "not in it, and placed by the policy: 1 adapter ('cold')" in said


def test_a_dry_run_shows_the_steps_and_changes_nothing(fleet: str, tmp_path: Path) -> None:
    assert command(fleet, "apply", plan_in(tmp_path, ("cold", "one"), (), ()), "--force").returncode == 0
    before = placement(fleet)
    shown = command(fleet, "apply", plan_in(tmp_path, ("cold",), ("one",), ()), "--force", "--dry-run")
    assert shown.returncode == 0, shown
    assert "1 adapter to move: 1 load of" in shown.stdout
    assert f"the profile is not of the engines of {fleet}: machine" in shown.stderr
    assert "nothing was changed" in shown.stdout
    assert placement(fleet) == before


def test_an_adapter_may_have_several_replicas_and_keeps_them_as_a_new_version(
    fleet: str, folder: Path
) -> None:
    given = {"lora_name": "cold", "rank": 4, "replicas": [0, 2], "shares": [0.25, 0.75]}
    body = {"replicas": [*REPLICAS], "adapters": [given]}
    answered = httpx.put(f"{fleet}/v1/fleet/placement", json=body)
    assert answered.status_code == 200, answered.text
    wait_until(lambda: placement(fleet)["stands"], "it is not carried out")
    assert where(fleet)["cold"] == [0, 2]
    version = {"lora_name": "cold", "lora_path": str(folder / "more" / "three"), "load_inplace": True}
    assert httpx.post(f"{fleet}/v1/load_lora_adapter", json=version).status_code == 200
    wait_until(lambda: placement(fleet)["stands"], "the new version is not where the old one was")
    assert where(fleet)["cold"] == [0, 2]
    assert httpx.post(f"{fleet}/v1/unload_lora_adapter", json={"lora_name": "cold"}).status_code == 200
    assert placement(fleet)["stands"]
    version = {"lora_name": "cold", "lora_path": str(folder / "more" / "cold")}
    assert httpx.post(f"{fleet}/v1/load_lora_adapter", json=version).status_code == 200
    wait_until(lambda: placement(fleet)["stands"], "it is not where it was before it was unloaded")
    assert where(fleet)["cold"] == [0, 2]


def test_a_released_fleet_places_by_its_policy(fleet: str, tmp_path: Path) -> None:
    assert command(fleet, "apply", plan_in(tmp_path, tuple(RANKS), (), ()), "--force").returncode == 0
    assert set(map(tuple, where(fleet).values())) == {(0,)}
    released = command(fleet, "release")
    assert "by its own policy again" in released.stdout
    wait_until(lambda: len({*map(tuple, where(fleet).values())}) > 1, "all stay on one replica")
    assert not placement(fleet)["is_given"]
    assert "was given no plan" in command(fleet, "release").stdout


def test_an_adapter_that_the_plan_does_not_name_is_served_too(fleet: str, tmp_path: Path) -> None:
    assert command(fleet, "apply", plan_in(tmp_path, (), ("one", "two"), ()), "--force").returncode == 0
    placed = placement(fleet)
    assert [row["given"] for row in placed["data"]] == [None, [1], None, [1]]
    assert all(row["replicas"] for row in placed["data"])
    complete(fleet, "cold")


def test_a_replica_that_dies_leaves_and_gets_back_what_it_was_given(fleet: str, tmp_path: Path) -> None:
    assert command(fleet, "apply", plan_in(tmp_path, ("one",), ("two",), ()), "--force").returncode == 0
    assert httpx.post(f"{fleet}/v1/fleet/drain", json={"replica": 1}).status_code == 200
    complete(fleet, "two")
    stuck = command(fleet, "apply", plan_in(tmp_path, ("one",), ("two",), ()), "--force", "--timeout", "0")
    assert stuck.returncode == 1
    assert "the fleet has not carried out the plan: 'two' is on replica" in stuck.stderr
    assert httpx.post(f"{fleet}/v1/fleet/undrain", json={"replica": 1}).status_code == 200
    wait_until(lambda: placement(fleet)["stands"], "it is not given back")
    assert where(fleet)["two"] == [1]


@pytest.mark.parametrize(
    ("gpus", "ranks", "words"),
    [
        ((("one",), ("two",)), RANKS, "the plan is for 2 GPUs, and the fleet has 3 replicas; make one for"),
        (
            (("one",), ("tow", "nobody"), ()),
            RANKS,
            "does not serve 2 adapters of the placement: 'tow' (did you",
        ),
        ((("one",), (), ("two",)), RANKS | {"two": 16}, "'two' has rank 8, not 16; make the plan again"),
        (((), (), ()), RANKS, "the placement names no adapter"),
    ],
)
def test_a_plan_of_another_fleet_is_refused(
    fleet: str, tmp_path: Path, gpus: tuple[tuple[str, ...], ...], ranks: dict[str, int], words: str
) -> None:
    before = placement(fleet)
    refused = command(fleet, "apply", plan_in(tmp_path, *gpus, ranks=ranks), "--force")
    assert refused.returncode == 1
    assert words in refused.stderr
    assert placement(fleet) == before


def test_a_plan_that_starves_is_refused_unless_forced(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.planner.check.SEEDS", (1,))
    monkeypatch.setattr("loraplex.planner.check.CHECKED_S", 10.0)
    before = placement(fleet)
    path = plan_in(tmp_path, ("one",), ("two",), (), rate_rps=1000.0)
    refused = command(fleet, "apply", path)
    assert refused.returncode == 1
    assert "the plan does not hold in the twin: GPU 0 starves and serves" in refused.stderr
    assert "--force" in refused.stderr
    assert placement(fleet) == before
    assert command(fleet, "apply", path, "--force").returncode == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"replicas": [0, 1]}, "the placement is for replicas 0, 1, and the fleet has replicas 0, 1, 2"),
        ({"adapters": [{"lora_name": "one", "replicas": [7]}]}, "needs replicas out of those"),
        ({"adapters": [{"lora_name": "one", "replicas": []}]}, "needs replicas out of those"),
        ({"adapters": [{"lora_name": "one", "replicas": [0, 0]}]}, "each of them once"),
        ({"adapters": [{"lora_name": "one", "replicas": [0], "shares": [0.5, 0.5]}]}, "and 2 shares"),
        ({"adapters": [{"lora_name": "one", "replicas": [0], "shares": [0.0]}]}, "shares"),
        ({"adapters": [{"lora_name": "one", "replicas": [0]}] * 2}, "names an adapter twice"),
        ({"adapter": []}, "adapter"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(fleet: str, change: dict[str, Any], words: str) -> None:
    before = placement(fleet)
    body = {"replicas": [*REPLICAS], "adapters": [{"lora_name": "one", "replicas": [0]}]}
    refused = httpx.put(f"{fleet}/v1/fleet/placement", json=body | change)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert placement(fleet) == before


def test_a_command_that_is_given_up_leaves_the_rest_to_the_fleet(fleet: str, tmp_path: Path) -> None:
    path = plan_in(tmp_path, ("three",), ("one", "cold"), ("two",))
    command(fleet, "apply", path, "--force", "--timeout", "0")
    wait_until(lambda: placement(fleet)["stands"], "the fleet does not go on by itself")
    assert where(fleet) == {"one": [1], "two": [2], "three": [0], "cold": [1]}
    assert command(fleet, "apply", path, "--force").returncode == 0


def test_a_fleet_is_watched(fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.planner.watch.LOOKED_S", 10.0)
    path = plan_in(tmp_path, ("one", "two"), ("three",), ("cold",))
    assert command(fleet, "apply", path, "--force").returncode == 0
    for name in RANKS:
        complete(fleet, name)
    watched = command(fleet, "watch", path, "--once")
    assert watched.returncode == 0, watched
    assert "the plan holds: asked for" in watched.stdout


def test_a_plan_is_made_from_what_a_fleet_was_asked_for_and_applied_to_it(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.cli.plan._MADE_SEEDS", (1,))
    monkeypatch.setattr("loraplex.planner.most_served._OUR_FLOOD_S", 2.0)
    monkeypatch.setattr("loraplex.planner.trial._JUDGED_REQUESTS", 50)
    monkeypatch.setattr("loraplex.planner.check.SEEDS", (1,))
    monkeypatch.setattr("loraplex.planner.check.CHECKED_S", 10.0)
    for name in RANKS:
        complete(fleet, name)
    out = tmp_path / "made.json"
    made = run_command(
        *("plan", "make", "--from", fleet, "--profile", OURS, "--gpus", "3", "--packer", "least-rate"),
        *("--no-compare", "--out", str(out)),
    )
    assert made.returncode == 0, made
    planned = placement_of(read_plan(out))
    assert planned.keys() == RANKS.keys()
    applied = command(fleet, "apply", str(out))
    assert applied.returncode == 0, applied
    assert where(fleet) == {name: list(entry.replicas) for name, entry in planned.items()}


def test_what_the_fleet_was_asked_for_is_measured(fleet: str) -> None:
    complete(fleet, "two")
    demand = measured_demand(fleet, None).demand
    assert {each.name: each.rank for each in demand.adapters} == RANKS
    assert all(each.rate_rps > 0 for each in demand.adapters if each.name == "two")
    assert 0 < demand.output_tokens <= 12


def test_a_url_without_a_fleet_is_refused(tmp_path: Path, fleet: str) -> None:
    path = plan_in(tmp_path, ("one",))
    assert "no server answers at" in command("http://127.0.0.1:9", "apply", path).stderr
    assert "does not exist there" in command(f"{fleet}/docs", "release").stderr
    assert "leave them out" in command(fleet, "apply", path, "--model", "x").stderr


def test_a_front_that_is_killed_half_way_carries_the_plan_out_when_it_is_back(
    front: Front, folder: Path
) -> None:
    """The last test here: it ends the fleet of the others."""

    def load(path: Path, **fields: Any) -> None:
        body = {"lora_name": "fresh", "lora_path": str(path), **fields}
        assert httpx.post(f"{front.url}/v1/load_lora_adapter", json=body).status_code == 200
        wait_until(lambda: placement(front.url)["stands"], "it is not where it was given")

    def body_of(**homes: list[int]) -> dict[str, Any]:
        given = [{"lora_name": name, "replicas": replicas} for name, replicas in homes.items()]
        return {"replicas": [*REPLICAS], "adapters": given, "plan": "half.json"}

    load(front.fresh[0])
    httpx.put(f"{front.url}/v1/fleet/placement", json=body_of(fresh=[0]))
    load(front.fresh[1], load_inplace=True)
    assert where(front.url)["fresh"] == [0], "no other replica has seen its second version"
    homes = {"fresh": [1, 2], "one": [2], "two": [0]}
    body = body_of(**homes)
    answered = httpx.put(f"{front.url}/v1/fleet/placement", json=body)
    front.process.kill()
    front.process.wait()
    assert answered.status_code == 200, answered.text
    assert not answered.json()["stands"], "two replicas have yet to load it"
    with serving(folder, *front.options, command="fleet serve") as (_, url, said):
        assert "the plan half.json, which the fleet was given before, is in force again" in said
        wait_until(lambda: placement(url)["stands"], "it is not carried out")
        assert {name: where(url)[name] for name in homes} == homes
        assert sent_by(url, "one") == [0, 0, 3]
