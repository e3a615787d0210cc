"""Merged steps where they pay, and pauses within the bound."""

from __future__ import annotations

from views import ADAPTER_S, MERGE_S, MERGED_S, requests, view

from loraplex.core.batching import DelayBound
from loraplex.scheduling.batching.auto import AutoBatching
from loraplex.scheduling.batching.policy import ALL, merged_batch

BOUND = DelayBound(share=0.25, seconds=0.1)


def test_an_engine_merges_once_it_has_lost_as_much_as_that_costs() -> None:
    auto, made = AutoBatching(BOUND), requests("aaaa")
    num_unmerged = 0
    while auto.choose(view(made)) == ALL:
        num_unmerged += 1
        assert num_unmerged * ADAPTER_S < MERGE_S
    assert num_unmerged == int(MERGE_S / ADAPTER_S)


def test_what_is_merged_already_is_used_at_once() -> None:
    assert AutoBatching(BOUND).choose(view(requests("aaaa"), merged="a")) == merged_batch("a")


def test_nothing_is_merged_for_the_base_model_or_without_memory() -> None:
    auto = AutoBatching(BOUND)
    for _ in range(100):
        assert auto.choose(view(requests("----"))) == ALL
        assert auto.choose(view(requests("aaaa"), mergeable="")) == ALL


def test_others_pause_no_longer_than_the_bound_allows() -> None:
    auto, made = AutoBatching(BOUND), requests("aaaaaaaaab")
    num_merged = 0
    for _ in range(100):
        if auto.choose(view(made, max_running=16, merged="a")) != ALL:
            num_merged += 1
    assert made[-1].delayed_s <= BOUND.seconds
    assert num_merged == int(BOUND.seconds / MERGED_S + 1e-9)


def test_the_longer_a_request_runs_the_longer_it_may_pause() -> None:
    auto, made = AutoBatching(BOUND), requests("aaaaaaaaab")
    made[-1].delayed_s = BOUND.seconds
    assert auto.choose(view(made, max_running=16, merged="a", now_s=0.3)) == ALL
    assert auto.choose(view(made, max_running=16, merged="a", now_s=1.0)) == merged_batch("a")


def test_prompts_of_others_are_not_delayed() -> None:
    made = requests("aaaaaaaaab")
    made[-1].num_computed = 0
    assert AutoBatching(BOUND).choose(view(made, max_running=16, merged="a")) == ALL


def test_too_few_requests_gain_nothing_while_many_pause() -> None:
    assert AutoBatching(BOUND).choose(view(requests("aabbb"), max_running=16, merged="a")) == ALL


def test_a_removed_adapter_is_forgotten() -> None:
    auto, made = AutoBatching(BOUND), requests("aaaa")
    assert auto.choose(view(made)) == ALL
    auto.forget("a")
    assert auto.choose(view(made)) == ALL, "it counts from the beginning"
