"""Merged and unmerged steps alternate as in Algorithms 1 and 3 of dLoRA."""

from __future__ import annotations

import pytest
from views import ADAPTER_S, MERGED_S, requests, step, view

from loraplex.scheduling.batching.credits import CreditLimits, Credits
from loraplex.scheduling.batching.dynamic import DynamicBatching
from loraplex.scheduling.batching.policy import ALL, StepBatch, merged_batch
from loraplex.scheduling.batching.thresholds import AdaptiveThresholds

LIMITS = CreditLimits(initial=1.0, starving=2.0, normal=1.5)


def policy(alpha: float = 0.7, beta: float = 0.4) -> DynamicBatching:
    return DynamicBatching(AdaptiveThresholds(alpha=alpha, beta=beta), Credits(LIMITS))


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        ("aaab", merged_batch("a")),  # 3 / 4 > alpha
        ("aabb", ALL),  # 2 / 4
        ("baabaaaa", merged_batch("a")),  # more than a step can run: 6 / 4
        ("----", ALL),  # there is nothing to merge
        ("", ALL),
    ],
)
def test_the_most_requested_adapter_is_merged_above_alpha(adapters: str, expected: StepBatch) -> None:
    assert step(policy(), view(requests(adapters))) == expected


def test_it_stays_merged_down_to_beta() -> None:
    dynamic = policy()
    assert step(dynamic, view(requests("aaab"))) == merged_batch("a")
    assert step(dynamic, view(requests("aabb"), merged="a")) == merged_batch("a"), "2 / 4 is not below beta"
    assert step(dynamic, view(requests("abbb"), merged="a")) == ALL, "1 / 4 is"


def test_an_adapter_that_cannot_be_merged_is_not_chosen() -> None:
    assert step(policy(), view(requests("aaab"), mergeable="bc")) == ALL
    dynamic = policy()
    assert step(dynamic, view(requests("aaab"))) == merged_batch("a")
    assert step(dynamic, view(requests("aaab"), mergeable="b")) == ALL, "its memory was given back"


def test_an_adapter_that_has_spent_its_credit_runs_unmerged_with_the_others() -> None:
    dynamic = policy()
    made = requests("aaab")
    num_merged = 0
    while step(dynamic, view(made, merged="a")) == merged_batch("a"):
        num_merged += 1
    assert 0 <= dynamic.credits.credit_of("a") < MERGED_S + 2 * ADAPTER_S
    assert num_merged == pytest.approx(1.0 / MERGED_S, abs=2), "b waited for its credit of a second"


def test_a_starving_adapter_runs_first_and_pays_for_it() -> None:
    dynamic = policy()
    dynamic.credits.balances.update({"c": 1.5, "a": -1.5})
    made = requests("aaaac")
    batch = step(dynamic, view(made))
    assert batch == StepBatch(first=frozenset("c"))
    assert [each.adapter for each in batch.select(made, 4)] == ["c", "a", "a", "a"]
    assert dynamic.credits.credit_of("c") < 2.5
    dynamic.credits.check_integrity()


def test_a_removed_adapter_is_forgotten() -> None:
    dynamic = policy()
    assert step(dynamic, view(requests("aaab"))) == merged_batch("a")
    dynamic.forget("a")
    assert "a" not in dynamic.credits.balances
    assert step(dynamic, view(requests("bbbc"))) == merged_batch("b")


def test_nobody_pays_for_a_merged_step_that_did_not_run() -> None:
    dynamic, made = policy(), requests("aaab")
    assert dynamic.choose(view(made)) == merged_batch("a")
    dynamic.ran(ALL)  # there was no memory
    assert dynamic.credits.balances == {}
    assert step(dynamic, view(requests("aabb"))) == ALL, "it waits for alpha, not for beta"
    assert step(dynamic, view(made)) == merged_batch("a")
    assert dynamic.credits.credit_of("b") > LIMITS.initial
