"""The use of tenants, against their limits, on a clock that the tests move."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.clock import ManualClock
from loraplex.core.errors import InvalidRequestError
from loraplex.server.errors import QuotaError, describe
from loraplex.server.rate_limits import duration
from loraplex.server.tenants.account import Account, Limits, OverQuota
from loraplex.server.tenants.minute_window import MinuteWindow

MINUTES = 20


def account(clock: ManualClock, requests: int | None = None, tokens: int | None = None) -> Account:
    return Account(Limits(requests_per_minute=requests, tokens_per_minute=tokens), clock)


@pytest.mark.parametrize(
    "kind", ["short answers", "long answers", "long prompts", "max_tokens never reached"]
)
def test_a_tenant_that_always_asks_for_more_gets_its_tokens_and_no_more(kind: str) -> None:
    rng, clock, limit = random.Random(kind), ManualClock(), 60_000
    tenant = account(clock, tokens=limit)
    sizes: dict[str, Callable[[], tuple[int, int, int]]] = {
        "short answers": lambda: (rng.randint(10, 200), rng.randint(1, 30), 100),
        "long answers": lambda: (20, rng.randint(100, 4_000), 4_000),
        "long prompts": lambda: (rng.randint(10, 20_000), 10, 16),
        "max_tokens never reached": lambda: (100, rng.randint(50, 150), 100_000),
    }
    total = [0] * MINUTES

    def use(prompt: int = 0, generated: int = 0) -> None:
        if (minute := int(clock.now_s() // 60)) < MINUTES:
            total[minute] += prompt + generated

    ends: list[tuple[float, int, int]] = []
    running = {}
    number = 0
    while clock.now_s() < 60 * MINUTES:
        while ends and ends[0][0] <= clock.now_s():
            _, which, left = heapq.heappop(ends)
            spending = running[which]
            now = min(left, 50)  # tokens of half a second
            spending.generated(now)
            use(generated=now)
            if left > now:
                heapq.heappush(ends, (clock.now_s() + 0.5, which, left - now))
            else:
                running.pop(which).close(is_complete=True)
        try:
            while True:
                prompt, generated, max_tokens = sizes[kind]()
                spending = tenant.admit(1)
                try:
                    spending.encoded(prompt, max_tokens)
                except QuotaError:
                    spending.close(is_refused=True)
                    raise
                use(prompt=prompt)
                number += 1
                running[number] = spending
                heapq.heappush(ends, (clock.now_s() + 0.5, number, generated))
        except QuotaError:
            pass
        clock.advance(0.25)
    assert sum(total) == pytest.approx(limit * MINUTES, rel=0.02)


@given(
    limit=st.integers(1, 50),
    gaps=st.lists(st.floats(0.0, 5.0), min_size=200, max_size=400),
)
@settings(max_examples=examples(15, 30), deadline=None)
def test_no_minute_has_more_requests_than_the_limit(limit: int, gaps: list[float]) -> None:
    clock = ManualClock()
    tenant = account(clock, requests=limit)
    accepted: list[float] = []
    refused: list[int] = []
    for gap in gaps:
        clock.advance(gap)
        try:
            tenant.admit(1).close()
        except QuotaError as error:
            refused.append(error.retry_after_s)
            last = accepted[-limit:]
            assert len(last) == limit
            assert clock.now_s() - last[0] < 60.2
        else:
            accepted.append(clock.now_s())
    assert all(1 <= seconds <= 61 for seconds in refused)
    for first, later in zip(accepted, accepted[limit:], strict=False):
        assert later - first > 60.0


@given(
    st.integers(1, 1000),
    st.lists(
        st.tuples(
            st.sampled_from(["use", "give_back", "wait", "limit"]), st.integers(0, 3000), st.floats(0, 100)
        ),
        max_size=60,
    ),
)
@settings(max_examples=examples(60, 150), deadline=None)
def test_what_is_booked_in_a_window_adds_up(limit: int, moves: list[tuple[str, int, float]]) -> None:
    window, now_s, used = MinuteWindow(limit), 0.0, 0
    for move, amount, seconds in moves:
        match move:
            case "use":
                window.use(amount, now_s)
                used += amount
            case "give_back":
                window.give_back(min(amount, used), now_s)
            case "limit":
                window.limit = amount + 1
            case "wait":
                now_s += seconds
        window.room(now_s)
        assert window._booked == sum(amount for _, amount in window._slots) >= 0
        assert window._debt >= 0
        slots = [slot for slot, _ in window._slots]
        assert slots == sorted(set(slots))
        wanted = min(amount + 1, window.limit)
        assert (window.wait_s(wanted, now_s) == 0.0) == (window.room(now_s) >= wanted)
        assert window.reset_s(now_s) >= 0.0
    assert window.room(now_s + 61 * (2 + used / window.limit)) == window.limit, "all of it expires"


def test_who_waits_as_long_as_it_is_told_is_accepted_then_and_not_before() -> None:
    clock = ManualClock()
    tenant = account(clock, requests=3, tokens=100)
    for _ in range(3):
        tenant.admit(1).close()
        clock.advance(7.0)
    with pytest.raises(QuotaError, match="3 requests per minute") as refused:
        tenant.admit(1)
    assert refused.value.retry_after_s == 40
    clock.advance(38.5)
    with pytest.raises(QuotaError):
        tenant.admit(1)
    clock.advance(1.5)
    tenant.admit(1).encoded(100, 16)
    clock.advance(20)
    with pytest.raises(QuotaError, match="100 tokens per minute") as short:
        tenant.admit(1)
    assert describe(short.value).detail.type == "tokens"
    clock.advance(short.value.retry_after_s)
    tenant.admit(1)


def test_an_answer_in_progress_is_never_cut_and_paid_for_later() -> None:
    clock = ManualClock()
    tenant = account(clock, tokens=100)
    spending = tenant.admit(1)
    spending.encoded(50, 1000)
    spending.generated(450)
    spending.close(is_complete=True)
    clock.advance(4 * 60)
    with pytest.raises(QuotaError):
        tenant.admit(1)
    clock.advance(62)
    tenant.admit(1)


def test_tokens_expected_of_answers_in_flight_are_held_back_and_given_up() -> None:
    clock = ManualClock()
    tenant = account(clock, tokens=1000)
    first = tenant.admit(4)
    first.encoded(100, 200)
    assert tenant.tokens_left == 1000 - 100 - 4 * 200
    first.generated(300)
    assert tenant.tokens_left == 100, "tokens that come are those that were expected"
    first.close()
    assert tenant.tokens_left == 600, "its client has gone"
    first.close()
    first.close(is_refused=True)
    assert (tenant.tokens_left, tenant.num_in_flight, tenant.num_requests) == (600, 0, 1)


def test_what_the_server_refuses_or_fails_does_not_count() -> None:
    tenant = account(ManualClock(), requests=5, tokens=1000)
    refused = tenant.admit(1)
    refused.encoded(400, 10)
    refused.close(is_refused=True)
    assert (tenant.requests_left, tenant.tokens_left, tenant.num_prompt_tokens) == (5, 1000, 0)
    begun = tenant.admit(1)
    begun.encoded(400, 10)
    begun.generated(5)
    begun.close(is_refused=True)
    assert (tenant.requests_left, tenant.tokens_left) == (4, 595)


def test_what_never_fits_is_refused_for_good() -> None:
    tenant = Account(Limits(tokens_per_minute=100, max_in_flight=4), ManualClock())
    with pytest.raises(InvalidRequestError, match="5 choices"):
        tenant.admit(5)
    with pytest.raises(InvalidRequestError, match="101 prompt tokens, more than the 100"):
        tenant.admit(1).encoded(101, 1)
    tenant.admit(3)
    with pytest.raises(QuotaError, match="4 choices in flight"):
        tenant.admit(1)
    assert tenant.num_refused == {OverQuota.IN_FLIGHT: 1}


def test_limits_change_and_what_was_used_stays_used() -> None:
    clock = ManualClock()
    tenant = account(clock, requests=10)
    for _ in range(5):
        tenant.admit(1)
    tenant.change(Limits(requests_per_minute=6))
    assert tenant.requests_left == 1
    tenant.change(Limits(requests_per_minute=3))
    with pytest.raises(QuotaError):
        tenant.admit(1)
    tenant.change(Limits())
    assert tenant.headers() == []
    tenant.admit(1).generated(500)
    tenant.change(Limits(requests_per_minute=7, tokens_per_minute=100))
    assert (tenant.requests_left, tenant.tokens_left) == (1, 0)
    with pytest.raises(QuotaError) as refused:
        tenant.admit(1)
    assert refused.value.retry_after_s == 61, "no debt: it was allowed when it was used"
    clock.advance(61)
    assert (tenant.requests_left, tenant.tokens_left) == (7, 100)


def test_debt_is_forgiven_while_there_is_no_limit() -> None:
    clock = ManualClock()
    tenant = account(clock, tokens=100)
    tenant.admit(1).generated(5_000)
    tenant.change(Limits())
    tenant.admit(1).generated(10)
    for _ in range(2):
        clock.advance(61)
        tenant.admit(1).close()
    tenant.change(Limits(tokens_per_minute=100))
    assert tenant.tokens_left == 100


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.0171, "18ms"), (0.9991, "1s"), (8.64, "8.7s"), (59.95, "1m0s"), (360.2, "6m1s")],
)
def test_durations_are_written_as_clients_know_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
