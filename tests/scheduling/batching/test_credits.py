"""Credits move from adapters that run out of turn to those that wait."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from views import requests

from loraplex.scheduling.batching.credits import CreditLimits, Credits

LIMITS = CreditLimits(initial=1.0, starving=2.0, normal=1.5)


def test_whoever_runs_out_of_turn_pays_those_who_wait() -> None:
    credits, made = Credits(LIMITS), requests("aabbcc")
    credits.transfer(served=made[4:], fcfs=made[:2], seconds=0.1)
    assert credits.credit_of("a") == pytest.approx(1.0 + 0.2)
    assert credits.credit_of("b") == 1.0
    assert credits.credit_of("c") == pytest.approx(1.0 - 0.2)


def test_a_merged_adapter_pays_for_all_that_pause() -> None:
    credits, made = Credits(LIMITS), requests("abca")
    credits.transfer(served=[made[0], made[3]], fcfs=made, seconds=0.1)
    assert credits.credit_of("a") == pytest.approx(1.0 - 0.2)
    assert credits.credit_of("b") == credits.credit_of("c") == pytest.approx(1.1)


def test_an_adapter_starves_until_it_has_been_paid_back() -> None:
    credits, made = Credits(LIMITS), requests("ab")
    credits.transfer(served=made[1:], fcfs=made[:1], seconds=1.1)
    assert credits.starving_among({"a", "b"}) == {"a"}
    credits.transfer(served=made[:1], fcfs=made[1:], seconds=0.4)
    assert credits.credit_of("a") == pytest.approx(1.7)
    assert credits.starving_among({"a", "b"}) == {"a"}, "below the upper limit, above the lower"
    credits.transfer(served=made[:1], fcfs=made[1:], seconds=0.3)
    assert credits.starving_among({"a", "b"}) == set()


def test_an_adapter_without_credit_may_displace_nobody() -> None:
    credits, made = Credits(LIMITS), requests("ab")
    assert credits.can_pay("b", num_displaced=10, seconds=0.1)
    assert not credits.can_pay("b", num_displaced=11, seconds=0.1)
    credits.transfer(served=made[1:], fcfs=made[:1], seconds=1.0)
    assert not credits.can_pay("b", num_displaced=1, seconds=0.1)
    assert credits.can_pay("b", num_displaced=0, seconds=0.1)


@settings(max_examples=examples(30, 60), deadline=None)
@given(data=st.data())
def test_credits_add_up_to_what_they_began_with(data: st.DataObject) -> None:
    credits = Credits()
    for _ in range(data.draw(st.integers(1, 12))):
        made = requests(data.draw(st.text("abcd-", min_size=1, max_size=8)))
        fcfs = made[: data.draw(st.integers(0, len(made)))]
        served = [each for each in made if data.draw(st.booleans())]
        credits.transfer(served, fcfs, data.draw(st.floats(0, 1)))
        if data.draw(st.booleans()):
            credits.forget(data.draw(st.sampled_from("abcd")))
        credits.check_integrity()
