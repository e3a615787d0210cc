"""The routing of a fleet as events: the same events lead to the same decisions."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
from examples import examples
from fake_core import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.clock import ManualClock
from loraplex.core.errors import CapacityError, UserError
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.fleet.policy import PLACEMENTS, ROUTINGS
from loraplex.fleet.policy_words import PLACEMENTS_EXPLAINED, ROUTINGS_EXPLAINED
from loraplex.fleet.routers.named import ROUTERS
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.fleet import decision_log
from loraplex.server.fleet.decision_log import DecisionLog, logged_decisions
from loraplex.server.fleet.explain import explain, replayed
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.routing_events import (
    Began,
    Limits,
    RoutingEvent,
    Sent,
    decode_event,
    encode_event,
)

VERSIONS = ("v0", "v1", "v2", "v3")
NUM_REPLICAS = 3


def began(routing: str = "auto") -> Began:
    costs = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(costs, CostModel)
    limits = [Limits(max_running=4, kv_tokens=2048, max_adapters=2)] * NUM_REPLICAS
    return Began(policy=routing, limits=limits, costs=profile_to_json(costs), mean_tokens=50.0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.none() | st.sampled_from(VERSIONS), st.integers(1, 900)),
        st.tuples(st.just("first"), st.integers(0, 30), st.none()),
        st.tuples(st.just("end"), st.integers(0, 30), st.none() | st.integers(0, 300)),
        st.tuples(st.just("accept"), st.integers(1, NUM_REPLICAS - 1), st.booleans()),
        st.tuples(
            st.just("saw"), st.integers(0, NUM_REPLICAS - 1), st.sampled_from(("disk", "host", "device"))
        ),
        st.tuples(st.just("begin anew"), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=examples(30, 60), deadline=None)
@given(st.sampled_from(sorted(ROUTERS)), STEPS)
def test_a_log_replayed_decides_the_same(routing_name: str, steps: list[tuple[str, object, object]]) -> None:
    logs: list[list[RoutingEvent]] = [[began(routing_name)]]
    routing = LiveRouting(logs[0], lambda event: logs[-1].append(event))
    for version in VERSIONS[:2]:
        routing.add(spec_of(version))
    waiting: list[str] = []
    num_sent = 0
    for kind, one, two in steps:
        match kind, one, two:
            case "send", None | str(), int(prompt_tokens):
                version = one if one is None else str(one)
                if version is not None:
                    routing.add(spec_of(version))
                num_sent += 1
                routing.route(f"r{num_sent}", version, prompt_tokens, tenant="ab"[num_sent % 2])
                waiting.append(f"r{num_sent}")
            case "first", int(place), _ if waiting:
                routing.first_token(waiting[place % len(waiting)])
            case "end", int(place), tokens if waiting:
                assert tokens is None or isinstance(tokens, int)
                routing.ended(waiting.pop(place % len(waiting)), tokens)
            case "accept", int(replica), bool(accepts):
                routing.accept(replica, accepts=accepts)
            case "saw", int(replica), str(tier):
                row = AdapterStats(version="v1", tier=tier, num_bytes=64, in_flight=0, loads=1)
                routing.saw(replica, EngineStats(adapters=(row,), device_arena_bytes=1))
            case "begin anew", _, _:
                logs.append(list(routing.state()))
                routing.begin(logs[-1])
    routing.view.load.check_integrity()
    decided = 0
    again_from_log = LiveRouting(logs[-1])
    for tenant in "ab":
        assert again_from_log.view.load.of_tenant(tenant) == routing.view.load.of_tenant(tenant)
    for log in logs:
        read = [decode_event(encode_event(event)) for event in log]
        assert read == log
        for sent, again in replayed(read):
            assert again == sent
            decided += 1
    assert decided == num_sent


def test_no_replica_that_accepts_is_said() -> None:
    routing = LiveRouting([began()])
    for replica in range(NUM_REPLICAS):
        routing.accept(replica, accepts=False)
    with pytest.raises(CapacityError):
        routing.route("a", None, 10)


def logged(state_dir: Path, num_requests: int, *, max_events: int = 1000) -> list[Sent]:
    """Use a log as a server would, and return its decisions."""
    log = DecisionLog(state_dir, max_events)
    log.begin([began()])
    sent: list[Sent] = []

    def record(event: RoutingEvent) -> None:
        log.record(event)
        if isinstance(event, Sent):
            sent.append(event)

    routing = LiveRouting([began()], record)
    routing.add(spec_of("v0"))
    for number in range(num_requests):
        routing.route(f"cmpl-{number}-0", "v0" if number % 2 else None, 10)
        if number >= 3:
            routing.ended(f"cmpl-{number - 3}-0", 20)
        log.write(log.take())
        if log.is_full:
            events = list(routing.state())
            routing.begin(events)
            log.begin(events)
    log.write(log.take())
    return sent


def test_the_latest_decisions_are_on_disk_and_the_same_again(tmp_path: Path) -> None:
    sent = logged(tmp_path, 200, max_events=50)
    files = list(logged_decisions(tmp_path))
    assert len(files) == decision_log._MAX_FILES
    found = [pair for events in reversed(files) for pair in replayed(events)]
    assert [decision for decision, _ in found] == sent[-len(found) :]
    assert all(decision == again for decision, again in found)


def test_a_decision_is_explained_with_the_replicas_as_they_were(tmp_path: Path) -> None:
    sent = logged(tmp_path, 6)
    (explanation,) = explain("cmpl-4", logged_decisions(tmp_path))
    assert explanation.decision == sent[4]
    assert explanation.again == sent[4].replica
    assert [row.replica for row in explanation.replicas] == [0, 1, 2]
    assert sum(row.running + row.waiting for row in explanation.replicas) == 3
    assert [row.verdict for row in explanation.replicas].count("chosen") == 1
    assert explain("cmpl-4-0", logged_decisions(tmp_path))[0].decision == sent[4]
    assert explain("cmpl-99", logged_decisions(tmp_path)) == []
    assert "costs the fleet" in explanation.why
    assert explanation.is_measured
    for row in explanation.replicas:
        assert row.ms_per_token == pytest.approx(row.step_ms + (row.queue_ms + row.load_ms) / 50, abs=0.01)


def test_a_replica_that_is_the_cheapest_is_said_to_be(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    log.begin([began()])
    routing = LiveRouting([began()], log.record)
    routing.add(spec_of("v0"))
    row = AdapterStats(version="v0", tier="device", num_bytes=64, in_flight=0, loads=1)
    routing.saw(1, EngineStats(adapters=(row,), device_arena_bytes=1))
    routing.route("asked-0", "v0", 90)
    log.write(log.take())
    (explanation,) = explain("asked", logged_decisions(tmp_path))
    assert explanation.decision.replica == 1
    assert explanation.why == "it had the adapter ready, and is the cheapest"


def test_the_beginning_of_an_id_will_do_if_it_is_of_one_call_only(tmp_path: Path) -> None:
    sent = logged(tmp_path, 12)
    with pytest.raises(UserError, match="begins the ids of 12 calls, such as cmpl-0, "):
        explain("cmpl", logged_decisions(tmp_path))
    assert explain("cmpl-11", logged_decisions(tmp_path))[0].decision == sent[11]
    assert explain("cmpl-1", logged_decisions(tmp_path))[0].decision == sent[1], "a whole id is no beginning"
    assert explain("", logged_decisions(tmp_path)) == []


def test_every_routing_and_placement_has_its_words() -> None:
    assert set(ROUTINGS_EXPLAINED) == set(ROUTINGS)
    assert set(PLACEMENTS_EXPLAINED) == set(PLACEMENTS)


@pytest.mark.parametrize("routing", ["most-idle", "random"])
def test_an_explanation_says_what_the_router_goes_by(tmp_path: Path, routing: str) -> None:
    log = DecisionLog(tmp_path)
    log.begin([began(routing)])
    LiveRouting([began(routing)], log.record).route("asked-0", None, 90)
    log.write(log.take())
    (explanation,) = explain("asked", logged_decisions(tmp_path))
    assert explanation.why == ROUTINGS_EXPLAINED[routing]


def test_a_replica_that_could_not_serve_is_said_to(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    log.begin([began()])
    routing = LiveRouting([began()], log.record)
    routing.accept(0, accepts=False)
    routing.route("long", None, 1900)
    routing.route("asked", None, 900)
    log.write(log.take())
    (explanation,) = explain("asked", logged_decisions(tmp_path))
    verdicts = {row.replica: row.verdict for row in explanation.replicas}
    assert verdicts[0] == "takes no requests"
    assert sorted(verdicts.values()) == ["chosen", "its KV memory is taken", "takes no requests"]


def test_a_line_that_is_just_being_written_is_left_out(tmp_path: Path) -> None:
    logged(tmp_path, 4)
    (path,) = (tmp_path / decision_log.FOLDER).iterdir()
    with path.open("ab") as file:
        file.write(b'{"event": "sen')
    (events,) = logged_decisions(tmp_path)
    assert sum(isinstance(event, Sent) for event in events) == 4


@pytest.mark.parametrize("damage", [b'{"event": "send"}\n', b"\xff\xfe\n"])
def test_decisions_before_a_damaged_line_can_be_explained(
    damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged(tmp_path, 4)
    (path,) = (tmp_path / decision_log.FOLDER).iterdir()
    with path.open("ab") as file:
        file.write(damage + damage)
    (events,) = logged_decisions(tmp_path)
    assert sum(isinstance(event, Sent) for event in events) == 4
    assert caplog.text.count("is no decision of this version") == 1


def test_a_folder_without_decisions_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--state-dir"):
        list(logged_decisions(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log.secrets, "token_hex", lambda num_bytes: "token")
    (tmp_path / decision_log.FOLDER).mkdir()
    (tmp_path / decision_log.FOLDER / f"{os.getpid()}-token-000001.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        assert len(logged(tmp_path, 4)) == 4
    assert caplog.text.count("decisions are not logged for now") == 1
    assert "No space left on device" in caplog.text


def test_two_servers_of_one_process_id_write_no_file_together(tmp_path: Path) -> None:
    for _ in range(2):  # like the first processes of two containers
        logged(tmp_path, 4)
    assert len(list((tmp_path / decision_log.FOLDER).iterdir())) == 2
    assert [sum(isinstance(event, Sent) for event in events) for events in logged_decisions(tmp_path)] == [
        4,
        4,
    ]


def test_a_log_that_is_deleted_begins_anew(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    log.begin([began()])
    routing = LiveRouting([began()], log.record)
    routing.route("before", None, 10)
    log.write(log.take())
    shutil.rmtree(tmp_path / decision_log.FOLDER)
    routing.route("meanwhile", None, 10)
    log.write(log.take())
    assert log.is_full, "it is to begin anew"
    events = list(routing.state())
    routing.begin(events)
    log.begin(events)
    routing.route("after", None, 10)
    log.write(log.take())
    (found,) = logged_decisions(tmp_path)
    assert [sent.request_id for sent, _ in replayed(found) if isinstance(sent, Sent)] == ["after"]


def test_a_log_that_could_not_be_written_goes_on_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, folder = ManualClock(), tmp_path / decision_log.FOLDER
    log = DecisionLog(tmp_path, clock=clock)
    log.begin([began()])
    routing = LiveRouting([began()], log.record)

    def decide(name: str) -> None:
        routing.route(name, None, 10)
        log.write(log.take())

    def begin_anew() -> None:
        assert log.is_full
        events = list(routing.state())
        routing.begin(events)
        log.begin(events)

    decide("before")
    saved = folder.rename(tmp_path / "saved")
    folder.write_text("in the way")
    decide("lost 1")
    decide("lost 2")
    assert not log.is_full, "not at once"
    clock.advance(30.0)
    begin_anew()
    decide("lost 3")
    assert not log.is_full
    folder.unlink()
    saved.rename(folder)
    clock.advance(30.0)
    begin_anew()
    decide("after")
    decide("later")
    assert caplog.text.count("decisions are not logged for now") == 1
    assert caplog.text.count("decisions are logged again; 3 of them were lost") == 1
    names = [
        [each.request_id for each in events if isinstance(each, Sent)]
        for events in logged_decisions(tmp_path)
    ]
    assert names == [["after", "later"], ["before"]]
