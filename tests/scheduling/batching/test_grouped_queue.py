"""Grouped admission reads few adapters, and delays nobody beyond the bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from views import ids, requests

from loraplex.core.batching import DelayBound
from loraplex.scheduling.batching.grouped import EndPace, GroupedQueue
from loraplex.scheduling.request_state import RequestState

NO_PACE = EndPace(0.0, 0.0)
ONE_A_SECOND = EndPace(0.0, 1.0)
LOOSE = DelayBound(share=0.0, seconds=1000.0)
MANY = 1 << 20


class Bench:
    """A queue that one request a step is admitted from, each of which takes a second."""

    def __init__(self, bound: DelayBound, max_running: int = 2, pace: EndPace = ONE_A_SECOND) -> None:
        self.queue = GroupedQueue(bound, lambda version: 10 if version == "x" else 1)
        self.max_running = max_running
        self.running: list[RequestState] = []
        self.pace = pace
        self.now_s = 0.0

    def add(self, made: Sequence[RequestState]) -> None:
        for each in made:
            each.arrived_s = self.now_s
            self.queue.append(each)

    def select(self) -> None:
        num_admissible = self.max_running - len(self.running)
        self.queue.select(self.running, num_admissible, MANY, self.now_s, lambda: self.pace)
        self.queue.check_integrity()

    def admit(self) -> RequestState:
        request = next(self.queue.first(1))
        self.queue.remove(request)
        request.num_cached = 0
        self.queue.admitted(request, self.now_s)
        self.running.append(request)
        self.queue.check_integrity()
        return request

    def end_oldest(self) -> None:
        self.running.pop(0)
        self.queue.ended(self.now_s)

    def drain(self, next_s: Callable[[], float] = lambda: 1.0) -> dict[RequestState, float]:
        """Admit everything, and return when each request was admitted, in order. `next_s`: returns how long
        it takes until the next running request ends."""
        admitted = {}
        while len(self.queue) > 0:
            if len(self.running) == self.max_running:
                self.end_oldest()
            self.select()
            admitted[self.admit()] = self.now_s
            self.now_s += next_s()
        return admitted

    def give_up(self, request: RequestState) -> None:
        self.queue.give_up(request)
        self.queue.check_integrity()


def test_requests_on_one_adapter_are_admitted_together() -> None:
    bench = Bench(LOOSE)
    bench.add(requests("abcabcabc"))
    assert "".join(str(each.adapter) for each in bench.drain()) == "aaabbbccc"


def test_the_base_model_and_adapters_that_run_come_first() -> None:
    bench = Bench(LOOSE, max_running=4)
    bench.running = requests("c")
    bench.add(requests("abbb-cc"))
    bench.select()
    assert ids(list(bench.queue)) == ["4", "5", "6", "1", "0", "2", "3"], "four are selected"


def test_the_adapter_with_the_fewest_bytes_a_request_goes_first() -> None:
    bench = Bench(LOOSE)
    bench.add(requests("xxxxayzz"))  # x has ten times the bytes
    assert [each.adapter for each in bench.drain()] == ["z", "z", "a", "y", "x", "x", "x", "x"]


def test_a_short_queue_keeps_the_order_of_arrival() -> None:
    bench = Bench(LOOSE, max_running=8)
    bench.running = requests("cdefgh")
    bench.add(requests("abcab"))
    bench.select()
    assert ids(list(bench.queue)) == ["0", "1", "2", "3", "4"]


def test_a_preempted_request_comes_before_all_others() -> None:
    bench = Bench(LOOSE)
    bench.add(requests("abab"))
    bench.select()
    preempted = bench.admit()
    bench.running.clear()
    bench.queue.append_front(preempted)
    bench.queue.check_integrity()
    assert next(bench.queue.first(1)) is preempted
    assert next(bench.queue.candidates(), None) is None, "none is pinned"


def test_candidates_are_pinned_requests_and_those_on_the_base_model_in_order() -> None:
    bench = Bench(LOOSE)
    made = requests("a-b-a-")
    bench.add(made)
    for each in (made[0], made[4]):
        bench.queue.set_pinned(each, pinned=True)
    bench.select()
    order = list(bench.queue)
    assert list(bench.queue.candidates()) == [each for each in order if each.pinned or each.adapter is None]
    assert bench.queue.has_candidates


def test_without_ends_places_go_by_turn() -> None:
    """Nothing has ended, and nothing will for long: who is left out waits for all of that."""
    bench = Bench(DelayBound(share=0.25, seconds=0.25), max_running=4, pace=NO_PACE)
    bench.add(requests("abcdabcdabcd"))
    bench.select()
    assert ids(list(bench.queue.first(4))) == ["0", "1", "2", "3"]


def test_how_fast_short_requests_ended_says_nothing_of_those_after_them() -> None:
    bench = Bench(DelayBound(share=0.25, seconds=0.25), max_running=4, pace=NO_PACE)
    bench.add(requests("ab"))
    for _ in range(100):  # one joins and one ends, a hundred times a second
        bench.select()
        bench.admit()
        bench.end_oldest()
        bench.add(requests("a"))
        bench.now_s += 0.01
    bench.select()
    while len(bench.queue):
        bench.admit()
        bench.end_oldest()
    bench.add(requests("abcdabcdabcd"))
    bench.select()
    assert ids(list(bench.queue.first(4))) == ["0", "1", "2", "3"]


@settings(max_examples=examples(15, 30), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.0, 0.25, 1.0]),
    seconds=st.sampled_from([0.0, 3.0, 20.0]),
    max_running=st.integers(1, 12),
)
def test_nobody_waits_longer_than_the_bound_allows(
    seed: int, share: float, seconds: float, max_running: int
) -> None:
    check_bound(random.Random(seed), DelayBound(share=share, seconds=seconds), max_running, lambda: 1.0)


@pytest.mark.parametrize("max_running", [1, 2, 4, 12])
@pytest.mark.parametrize("seconds", [0.0, 3.0, 20.0])
def test_nobody_waits_longer_where_requests_end_at_random(max_running: int, seconds: float) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        bound = DelayBound(share=0.25, seconds=seconds)
        check_bound(rng, bound, max_running, lambda rng=rng: rng.expovariate(1.0))  # type: ignore[misc]


def check_bound(rng: random.Random, bound: DelayBound, max_running: int, next_s: Callable[[], float]) -> None:
    """Assert it for a queue. First come, first served would admit the nth when the nth is admitted."""
    bench = Bench(bound, max_running)
    bench.add(requests("".join(rng.choice("abcdefgh-") for _ in range(80))))
    admitted = bench.drain(next_s)
    turns_s = list(admitted.values())
    assert sorted(each.arrival for each in admitted) == list(range(80))
    for each, now_s in admitted.items():
        fcfs_s = turns_s[each.arrival]
        assert now_s - fcfs_s <= bound.allowed_s(fcfs_s)


@settings(max_examples=examples(15, 30), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    seconds=st.sampled_from([0.0, 3.0, 20.0]),
    max_running=st.integers(1, 12),
    shares=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.3])),
)
def test_nobody_waits_longer_because_others_give_up(
    seed: int, seconds: float, max_running: int, shares: tuple[float, float]
) -> None:
    """Requests arrive and give up while others wait. First come, first served would admit the first one left
    in each second."""
    rng = random.Random(seed)
    share_before, share_later = shares
    bound = DelayBound(share=0.25, seconds=seconds)
    bench = Bench(bound, max_running)
    made = requests("".join(rng.choice("abcdefgh-") for _ in range(120)))
    left = dict.fromkeys(made[:80])  # as first come, first served has them
    turns: dict[RequestState, float] = {}
    bench.add(made[:80])
    later = made[80:]
    for each in rng.sample(made[:80], int(share_before * 80)):
        bench.give_up(each)
        del left[each]
    while len(bench.queue) > 0:
        if len(bench.running) == max_running:
            bench.end_oldest()
        bench.select()
        request = bench.admit()
        first = next(iter(left), None)
        if first is not None:
            turns[first] = bench.now_s
            del left[first]
        fcfs_s = turns.get(request, bench.now_s)
        waited_s = fcfs_s - request.arrived_s
        assert bench.now_s - fcfs_s <= bound.allowed_s(waited_s)
        bench.now_s += 1.0
        if later and rng.random() < 0.5:
            arrived = later.pop(0)
            bench.add([arrived])
            left[arrived] = None
        waiting = [each for each in bench.queue if each in left]
        if waiting and rng.random() < share_later:
            gone = rng.choice(waiting)
            bench.give_up(gone)
            del left[gone]


def test_a_request_behind_many_that_gave_up_goes_in_its_turn() -> None:
    bench = Bench(DelayBound(share=0.0, seconds=3.0))
    many, (lone,) = requests("ab" * 100), requests("x")
    lone.arrival = 200
    bench.add([*many, lone])
    for each in many:
        bench.give_up(each)
    later = requests("ab" * 50)
    for number, each in enumerate(later):
        each.arrival = 201 + number
    bench.add(later)
    assert bench.drain()[lone] <= 3.0


@pytest.mark.parametrize("cancelled", [0, 3, 7])
def test_a_cancelled_request_leaves_nothing_behind(cancelled: int) -> None:
    bench = Bench(LOOSE)
    made = requests("abcdabcd")
    bench.add(made)
    bench.select()
    bench.give_up(made[cancelled])
    assert sorted(ids(list(bench.drain()))) == [i for i in map(str, range(8)) if i != str(cancelled)]
