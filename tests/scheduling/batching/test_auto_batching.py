"""Merged steps where they pay, and pauses within the bound."""

from __future__ import annotations

from views import ADAPTER_S, MERGE_S, MERGED_S, running, step, view

from loraplex.core.batching import PAUSE_SHARE, DelayBound
from loraplex.scheduling.batching.auto import AutoBatching
from loraplex.scheduling.batching.policy import ALL, merged_batch

BOUND = DelayBound(share=0.25, seconds=0.1)


def test_an_engine_merges_once_it_has_lost_as_much_as_that_costs() -> None:
    auto, made = AutoBatching(BOUND), running("aaaa")
    num_unmerged = 0
    while step(auto, view(made)) == ALL:
        num_unmerged += 1
        assert num_unmerged * ADAPTER_S < MERGE_S
    assert num_unmerged == int(MERGE_S / ADAPTER_S)


def test_what_is_merged_already_is_used_at_once() -> None:
    assert step(AutoBatching(BOUND), view(running("aaaa"), merged="a")) == merged_batch("a")


def test_nothing_is_merged_for_the_base_model_or_without_memory() -> None:
    auto = AutoBatching(BOUND)
    for _ in range(100):
        assert step(auto, view(running("----"))) == ALL
        assert step(auto, view(running("aaaa"), mergeable="")) == ALL


def test_others_pause_no_longer_than_the_bound_allows() -> None:
    auto, made = AutoBatching(BOUND), running("aaaaaaaaab")
    num_merged = 0
    for _ in range(100):
        if step(auto, view(made, max_running=16, merged="a")) != ALL:
            num_merged += 1
    assert num_merged == int(PAUSE_SHARE * BOUND.seconds / MERGED_S + 1e-9)


def test_the_longer_a_request_runs_the_longer_it_may_pause() -> None:
    auto, made = AutoBatching(BOUND), running("aaaaaaaaab")
    made[-1].delayed_s = BOUND.seconds
    assert step(auto, view(made, max_running=16, merged="a", now_s=0.3)) == ALL
    assert step(auto, view(made, max_running=16, merged="a", now_s=1.0)) == merged_batch("a")


def test_prompts_of_others_are_not_delayed() -> None:
    made = running("aaaaaaaaab")
    made[-1].num_computed = 0
    assert step(AutoBatching(BOUND), view(made, max_running=16, merged="a")) == ALL


def test_too_few_requests_gain_nothing_while_many_pause() -> None:
    assert step(AutoBatching(BOUND), view(running("aabbb"), max_running=16, merged="a")) == ALL


def test_a_removed_adapter_is_forgotten() -> None:
    auto, made = AutoBatching(BOUND), running("aaaa")
    assert step(auto, view(made)) == ALL
    auto.forget("a")
    assert step(auto, view(made)) == ALL, "it counts from the beginning"


def test_the_candidate_is_the_adapter_that_most_of_the_requests_that_would_run_are_on() -> None:
    made = running("bbba" + "a" * 8)  # four run, the others wait
    assert step(AutoBatching(BOUND), view(made, merged="b")) == merged_batch("b")


def test_nobody_is_charged_for_a_merged_step_that_did_not_run() -> None:
    auto, made = AutoBatching(BOUND), running("aaaaaaaaab")
    seen = view(made, max_running=16, merged="a")
    assert auto.choose(seen) == merged_batch("a")
    auto.ran(ALL)  # there was no memory
    assert made[-1].delayed_s == 0
    assert step(auto, seen) == merged_batch("a")
    assert made[-1].delayed_s == MERGED_S
    auto.choose(seen)  # all is in flight: there was no step
    assert made[-1].delayed_s == MERGED_S


def test_pauses_end_when_they_would_delay_those_that_wait() -> None:
    bound = DelayBound(share=0.0, seconds=2.5 * MERGED_S / PAUSE_SHARE)
    policy = AutoBatching(bound)
    made = running("aaab")
    merged = [
        step(policy, view(made, merged="a", now_s=10.0 + number * MERGED_S, any_waits=True)).merged
        for number in range(4)
    ]
    assert merged == ["a", "a", None, None]
    assert step(policy, view(made, merged="a", now_s=11.0)).merged is None, "others may come to wait for b"
    assert step(policy, view(running("aaab"), merged="a", now_s=11.0)).merged is None, "on b's place"
    step(policy, view([], merged="a", now_s=12.0))
    assert step(policy, view(running("aaab"), merged="a", now_s=12.0)).merged == "a"


def test_an_answer_of_which_nothing_has_come_is_not_delayed() -> None:
    made = running("aaaaaaaaab")
    made[-1].num_computed, made[-1].num_cached = 3, None  # one token of prompt
    assert step(AutoBatching(BOUND), view(made, max_running=16, merged="a")) == ALL
