"""The script that kills replicas judges what came of their streams."""

from __future__ import annotations

from benchmarks.fleet_kills import Answer, Kill, Outcome, requests


def test_a_pause_is_the_longest_gap_around_a_kill() -> None:
    answer = Answer(times_s=[0.0, 0.1, 0.2, 1.9, 2.0, 9.0])
    assert answer.gap_s(0.25) == 1.9 - 0.2
    assert answer.gap_s(0.05) == 1.9 - 0.2, "tokens that were on their way came first"
    assert answer.gap_s(10.0) is None, "it had ended"


def test_pauses_are_counted_for_the_streams_that_lost_their_replica() -> None:
    kills = [Kill(way="SIGKILL", at_s=1.0, num_streams=2, gaps_s=[0.1, 1.5, 0.2, 2.5])]
    found = Outcome(kills=kills, replaced_s={"SIGKILL": [4.0]}).summary()
    assert found["kills"] == {"SIGKILL": 1}
    assert found["pauses"] == {"SIGKILL": 2}
    assert found["pause_s"]["SIGKILL"]["max"] == 2.5
    assert found["pause_s"]["SIGKILL"]["p50"] == 2.0
    assert found["replaced_s"]["SIGKILL"]["max"] == 4.0


def test_every_kind_of_request_is_made_of_the_base_model_and_of_adapters() -> None:
    asked = requests()
    kinds = {each.kind for each in asked}
    assert {(each.kind, each.body["model"] == "base") for each in asked} == {
        (kind, is_base) for kind in kinds for is_base in (True, False)
    }
