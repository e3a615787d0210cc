"""Many engines under one stream of requests: nothing is lost, and each does what it would do alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import Result
from recorded import TRUTH
from twins import imagined_machine, random_workload
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import UserError
from loraplex.perf.profile_json import write_profile
from loraplex.perf.slot_profile import write_slot_profile
from loraplex.twin.fleet import AdapterRouter, Engine, Fleet, Routing, replay_fleet
from loraplex.twin.replay import OwnEngines, ReplayOptions, longest_of, replay
from loraplex.workload.jsonl import WorkloadRequest, write_workload

OPTIONS = ReplayOptions(num_adapters=9, ranks=(8, 16, 64), rank_bytes=1 << 20, kv_tokens=4000)
WORKLOAD = random_workload(3, num_requests=300, num_adapters=9, rps=30.0)


class Lookout:
    """Sends each request to the engine with the fewest inside."""

    def choose(self, request: WorkloadRequest, engines: Sequence[Engine]) -> int:
        inside = [len(engine.at(request.arrival_s).scheduler.request_ids) for engine in engines]
        return inside.index(min(inside))


@pytest.mark.parametrize("routing", Routing)
@pytest.mark.parametrize("num_engines", [1, 2, 5])
def test_every_request_is_served_by_one_engine(routing: Routing, num_engines: int) -> None:
    outcome = replay_fleet(imagined_machine(), WORKLOAD, OPTIONS, num_engines=num_engines, routing=routing)
    assert [each.request for each in outcome.all.requests] == WORKLOAD
    assert all(each.finish_s is not None and not each.failed for each in outcome.all.requests)
    assert sum(each.num_requests for each in outcome.engines) == len(WORKLOAD)
    assert sum(each.num_served for each in outcome.engines) == outcome.all.summary()["num_served"] == 300
    num_gaps = sum(num_steps * num_tokens for _, _, num_steps, num_tokens in outcome.all.gaps)
    assert num_gaps == sum(each.output_tokens - 1 for each in WORKLOAD)


@pytest.mark.parametrize("until_s", [float("inf"), 4.0])
@pytest.mark.parametrize("routing", Routing)
def test_a_fleet_of_one_does_what_the_engine_does(routing: Routing, until_s: float) -> None:
    options = ReplayOptions(num_adapters=9, adapter_bytes=8 << 20, kv_tokens=4000, until_s=until_s)
    alone = replay(imagined_machine(), WORKLOAD, options)
    outcome = replay_fleet(imagined_machine(), WORKLOAD, options, num_engines=1, routing=routing)
    assert list(outcome.all.requests) == list(alone.requests)
    assert outcome.all.summary() == alone.summary()
    assert list(outcome.all.gaps) == list(alone.gaps)


def test_an_engine_does_what_it_would_with_its_share_alone() -> None:
    outcome = replay_fleet(imagined_machine(), WORKLOAD, OPTIONS, num_engines=4)
    for number in range(4):
        share = [request for request in WORKLOAD if request.adapter % 4 == number]
        alone = replay(imagined_machine(), share, OPTIONS)
        found = [each for each in outcome.all.requests if each.request.adapter % 4 == number]
        assert found == list(alone.requests)


def test_an_adapter_is_where_it_belongs() -> None:
    outcome = replay_fleet(imagined_machine(), WORKLOAD, OPTIONS, num_engines=4)
    asked = Counter(request.adapter % 4 for request in WORKLOAD)
    assert [each.num_requests for each in outcome.engines] == [asked[number] for number in range(4)]
    assert [each.num_adapters for each in outcome.engines] == [3, 2, 2, 2]
    assert [each.num_loads for each in outcome.engines] == [3, 2, 2, 2]
    choose = AdapterRouter().choose
    maker = OwnEngines(imagined_machine(), OPTIONS, longest=200)
    engines = [Engine(maker, 1.0) for _ in range(4)]
    assert {choose(each, engines) for each in WORKLOAD if each.adapter == 6} == {2}


def test_engines_take_turns() -> None:
    outcome = replay_fleet(imagined_machine(), WORKLOAD, OPTIONS, num_engines=4, routing=Routing.ROUND_ROBIN)
    assert [each.num_requests for each in outcome.engines] == [75] * 4


def test_looking_at_engines_changes_nothing_but_where_requests_go() -> None:
    maker = OwnEngines(imagined_machine(), OPTIONS, longest=longest_of(WORKLOAD))
    outcome = Fleet(maker, 3, Lookout()).run(WORKLOAD)
    assert [each.request for each in outcome.all.requests] == WORKLOAD
    assert outcome.all.summary()["num_served"] == 300
    # With one engine to choose from, there is nothing to choose.
    watched, alone = Fleet(maker, 1, Lookout()).run(WORKLOAD), replay(imagined_machine(), WORKLOAD, OPTIONS)
    assert list(watched.all.requests) == list(alone.requests)


def run(tmp_path: Path, *args: str, slots: bool = False) -> Result:
    profile, workload = tmp_path / "profile.json", tmp_path / "workload.jsonl"
    if slots:
        write_slot_profile(profile, TRUTH)
    else:
        write_profile(profile, imagined_machine())
    write_workload(workload, WORKLOAD)
    return CliRunner().invoke(
        app, ["twin", "run", "--profile", str(profile), "--workload", str(workload), *args]
    )


def test_the_command_tells_of_all_engines(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(tmp_path, "--engines", "3", "--routing", "round-robin", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "300 of 300 requests served" in result.output
    assert "3 engines" in result.output
    found = json.loads(out.read_text())
    assert [each["num_requests"] for each in found["engines"]] == [100, 100, 100]
    assert found["summary"]["num_served"] == len(found["requests"]) == 300


def test_a_fleet_without_engines_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "--engines", "0")
    assert result.exit_code == 2
    assert "must be at least 1, not 0" in result.output
    with pytest.raises(UserError, match="at least one engine, not 0"):
        replay_fleet(imagined_machine(), WORKLOAD, OPTIONS, num_engines=0)


@pytest.mark.parametrize(
    ("args", "slots", "says"),
    [
        (("--routing", "best"), False, "there is no routing 'best'; there are adapter, round-robin"),
        ((), True, "a fleet is of our own engines"),
        (("--adapters", "3"), False, "there are 3, counted from 0"),
    ],
)
def test_what_no_fleet_can_do_is_refused(
    tmp_path: Path, args: tuple[str, ...], slots: bool, says: str
) -> None:
    result = run(tmp_path, "--engines", "2", *args, slots=slots)
    assert isinstance(result.exception, UserError), result.output
    assert says in str(result.exception)
