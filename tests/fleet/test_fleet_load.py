"""The load of replicas, kept up to date in constant time, equals a plain count at every moment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from examples import examples
from fleet_views import MEAN_TOKENS, REQUESTS, Sent, fleet_of, request_of, set_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.fleet.answer_length import FIRST_GUESS, AnswerLength
from loraplex.fleet.load import FleetLoad, ReplicaLimits, ReplicaLoad
from loraplex.fleet.request import RoutedRequest

LIMITS = ReplicaLimits(max_running=4, kv_tokens=1000)


class AnyLoad(RuleBasedStateMachine):
    """Requests come, get their first token or not, and end; answers have all lengths."""

    @initialize(num_replicas=st.integers(1, 4))
    def begin(self, num_replicas: int) -> None:
        self.load = FleetLoad([LIMITS] * num_replicas)
        self.open: dict[int, Sent] = {}
        self.first: dict[int, RoutedRequest] = {}
        self.kv_tokens: dict[int, float] = {}
        self.num_sent = 0

    @rule(request=REQUESTS, place=st.integers(0, 3))
    def send(self, request: RoutedRequest, place: int) -> None:
        replica = place % self.load.num_replicas
        self.kv_tokens[self.num_sent] = request.prompt_tokens + self.load.answers.mean_tokens
        self.load.sent(self.num_sent, request, replica)
        self.open[self.num_sent] = Sent(request, replica, False)
        self.first[self.num_sent] = request
        self.num_sent += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_more=st.integers(0, 300), place=st.integers(0, 3))
    def move(self, data: st.DataObject, num_more: int, place: int) -> None:
        """Move a request, any number of times; the answer only grows."""
        request_id, replica = data.draw(st.sampled_from(sorted(self.open))), place % self.load.num_replicas
        prompt_tokens = self.first[request_id].prompt_tokens
        num_output = self.open[request_id].request.prompt_tokens - prompt_tokens + num_more
        longer = self.load.moved(request_id, replica, num_output)
        assert longer == self.first[request_id]._replace(prompt_tokens=prompt_tokens + num_output)
        expected = prompt_tokens + max(self.load.answers.mean_tokens, num_output + 1)
        self.kv_tokens[request_id] = expected
        self.open[request_id] = Sent(longer, replica, False)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        """Report a first token; a second report changes nothing."""
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.load.first_token(request_id)
        self.open[request_id] = self.open[request_id]._replace(is_running=True)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), output_tokens=st.none() | st.integers(0, 500))
    def end(self, data: st.DataObject, output_tokens: int | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[request_id]
        assert self.load.ended(request_id, output_tokens) == self.first[request_id]

    @precondition(lambda self: self.load.num_replicas < 6)
    @rule()
    def join(self) -> None:
        """Add a replica; requests stay where they are, and `accepts` stays as it was."""
        self.load.accepts[0] = False
        self.load = self.load.with_replica(self.load.num_replicas, LIMITS)
        assert self.load.accepts.tolist() == [False] + [True] * (self.load.num_replicas - 1)

    @invariant()
    def columns_are_what_a_walk_over_the_requests_counts(self) -> None:
        self.load.check_integrity()
        for replica in range(self.load.num_replicas):
            here = {key: each for key, each in self.open.items() if each.replica == replica}
            waiting = {key: each for key, each in here.items() if not each.is_running}
            for kept, counted in ((self.load.everything, here), (self.load.waiting, waiting)):
                expected = set_of([each.request for each in counted.values()])
                for name, column, value in zip(kept._fields, kept, expected, strict=True):
                    if name != "kv_tokens":
                        assert column[replica] == value[0], name
                kv_tokens = sum(self.kv_tokens[key] for key in counted)
                assert kept.kv_tokens[replica] == pytest.approx(kv_tokens)
                if not counted:
                    assert kept.kv_tokens[replica] == 0.0

    @invariant()
    def requests_are_listed_as_they_were_sent(self) -> None:
        for replica in range(self.load.num_replicas):
            here = {key: self.first[key] for key, each in self.open.items() if each.replica == replica}
            assert dict(self.load.requests_on(replica)) == here

    @invariant()
    def adapters_are_found_where_their_requests_are(self) -> None:
        for adapter in range(8):
            at = [each.replica for each in self.open.values() if each.request.adapter == adapter]
            queued = [
                each.replica
                for each in self.open.values()
                if each.request.adapter == adapter and not each.is_running
            ]
            assert dict(self.load.in_flight(adapter)) == {each: at.count(each) for each in set(at)}
            assert dict(self.load.waiting_on(adapter)) == {each: queued.count(each) for each in set(queued)}

    @invariant()
    def requests_of_a_tenant_are_counted_by_replica(self) -> None:
        for tenant in ("", "a", "b"):
            at = [each.replica for each in self.open.values() if each.request.tenant == tenant]
            assert dict(self.load.of_tenant(tenant)) == {each: at.count(each) for each in set(at)}

    def teardown(self) -> None:
        """Check that nothing is left when all requests have ended."""
        if not hasattr(self, "load"):
            return
        for request_id in self.open:
            self.load.ended(request_id)
        for sets in (self.load.everything, self.load.waiting):
            assert all(not column.any() for column in sets)
        self.load.check_integrity()


TestAnyLoad = AnyLoad.TestCase
TestAnyLoad.settings = settings(max_examples=20, stateful_step_count=30)


@settings(max_examples=examples(20, 40))
@given(st.lists(st.tuples(REQUESTS, st.integers(0, 2), st.booleans()), max_size=20))
def test_looking_changes_nothing(sent: list[Sent]) -> None:
    fleet = fleet_of(3)
    for request, replica, is_running in sent:
        fleet.send(request, replica, is_running=is_running)
    before = fleet.snapshot()
    for replica in range(3):
        fleet.view.load.replica(replica)
        fleet.view.load.in_flight(replica)
    fleet.view.load.with_one_more(request_of(0), np.arange(3))
    fleet.view.load.check_integrity()
    assert fleet.snapshot() == before


@settings(max_examples=examples(30, 60))
@given(st.lists(st.tuples(REQUESTS, st.integers(0, 3), st.booleans()), max_size=20), REQUESTS, st.data())
def test_one_more_counts_as_if_it_had_been_sent(
    sent: list[Sent], request: RoutedRequest, data: st.DataObject
) -> None:
    fleet = fleet_of(4)
    for each, replica, is_running in sent:
        fleet.send(each, replica, is_running=is_running)
    asked = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
    everything, waiting = fleet.view.load.with_one_more(request, np.array(asked, np.int64))
    for place, replica in enumerate(asked):
        for found, requests in ((everything, fleet.requests(replica)), (waiting, fleet.queue(replica))):
            for row, counted in enumerate((set_of(requests), set_of([*requests, request]))):
                assert [column[row, place] for column in found] == [float(column[0]) for column in counted]


def test_a_row_for_people() -> None:
    fleet = fleet_of(2)
    fleet.send(request_of(0, 100), 1, is_running=True)
    fleet.send(request_of(3, 50), 1)
    fleet.send(request_of(3, 50), 1)
    fleet.send(request_of(None, 10), 1)
    assert fleet.view.load.replica(1) == ReplicaLoad(
        num_running=1,
        num_waiting=3,
        sum_ranks=8 + 64 + 64,
        max_rank=64,
        waiting_tokens=110,
        kv_tokens_left=4096 - 210 - 4 * MEAN_TOKENS,
        adapters=frozenset({0, 3}),
    )
    assert fleet.view.load.replica(0) == ReplicaLoad(
        num_running=0,
        num_waiting=0,
        sum_ranks=0,
        max_rank=0,
        waiting_tokens=0,
        kv_tokens_left=4096,
        adapters=frozenset(),
    )


def test_a_request_counts_with_what_it_was_counted_with_when_it_ends() -> None:
    """The mean length of answers has changed in between."""
    load = FleetLoad([LIMITS])
    load.sent("a", request_of(0, 10), 0)
    load.sent("b", request_of(0, 10), 0)
    load.ended("a", 1000)
    assert load.everything.kv_tokens[0] == 10 + FIRST_GUESS
    load.ended("b")
    assert load.everything.kv_tokens[0] == 0.0


def test_a_request_that_moves_counts_with_what_is_left_of_its_answer() -> None:
    load = FleetLoad([LIMITS] * 3, AnswerLength(100.0))
    load.sent("a", request_of(0, 10), 0)
    for replica, num_output, kv_tokens in ((1, 30, 110), (2, 70, 110), (0, 250, 261)):
        assert load.moved("a", replica, num_output).prompt_tokens == 10 + num_output
        assert load.waiting.prompt_tokens[replica] == 10 + num_output
        assert load.everything.kv_tokens.sum() == load.everything.kv_tokens[replica] == kv_tokens


@pytest.mark.parametrize(
    "mistake",
    [
        lambda load: load.sent("a", request_of(0), 0),
        lambda load: ReplicaLimits(max_running=0, kv_tokens=1),
        lambda load: ReplicaLimits(max_running=1, kv_tokens=0),
    ],
)
def test_our_own_mistakes_are_caught(mistake: Callable[[FleetLoad], object]) -> None:
    load = FleetLoad([LIMITS])
    load.sent("a", request_of(0), 0)
    with pytest.raises(AssertionError):
        mistake(load)


# ---- the length of answers


def test_the_guess_counts_as_ten_answers() -> None:
    """The first answers to end are the shortest, and say little about the others."""
    answers = AnswerLength()
    assert answers.mean_tokens == FIRST_GUESS
    for length in (10, 20, 60):
        answers.observe(length)
    assert answers.mean_tokens == pytest.approx((10 * FIRST_GUESS + 10 + 20 + 60) / 13)


def test_the_mean_follows_when_answers_become_longer() -> None:
    answers = AnswerLength()
    for length in [100] * 1000 + [300] * 300:
        answers.observe(length)
    assert 280 < answers.mean_tokens < 300


@given(st.lists(st.integers(0, 1000), max_size=300))
def test_the_mean_is_never_below_one_token(lengths: list[int]) -> None:
    """Routers divide by it, even when the first answers end without a token."""
    answers = AnswerLength()
    for length in lengths:
        answers.observe(length)
    assert 1 <= answers.mean_tokens <= max([FIRST_GUESS, *lengths])
