"""Admission by adapter: in a long queue, requests are reordered so that a step reads few adapters.

A step reads the weights of each adapter in it once, however many requests are on it. So of the requests that
wait, those whose adapter is running anyway go first, then those on the adapter that costs the fewest bytes
for each of its waiting requests. A request that has waited as long as the bound allows goes before all of
these. Nothing is reordered while no more requests wait than run, or than could be admitted at once.

        arrival order   [ a1  b1  c1  b2  d1  b3  a2 ... ]
        admitted        [ b1  b2  b3  a1  a2 ...           a1 was due after b3
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from typing import Final, NamedTuple

from loraplex.core.batching import ADMISSION_SHARE, DelayBound
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.waiting_queue import WaitingQueue

_AHEAD_S: Final = 0.1
"""Seconds that requests are selected before they can be admitted: their adapters are loaded meanwhile."""
_MAX_AHEAD: Final = 8
_FIRST_SELECTED: Final = -(1 << 40)
"""The position of the first selected request: below those of all others, above those of preempted ones."""
_RECENT: Final = 32
"""Ends of running requests that the rate of ends is taken from."""
_CAUTION: Final = 1.5
"""Standard deviations by which fewer requests may end than expected."""
_position = attrgetter("queue_position")


class EndPace(NamedTuple):
    """The pace at which running requests end: the next one in `first_s` seconds, then `per_s` a second."""

    first_s: float
    per_s: float

    def num_within(self, seconds: float) -> float:
        """Return how many requests will have ended after so many seconds, nearly for certain: they end at
        random, so it is by `_CAUTION` standard deviations fewer than expected."""
        expected = max(seconds - self.first_s, 0.0) * self.per_s
        return max(expected - _CAUTION * math.sqrt(expected), 0.0)


class _Turn(NamedTuple):
    """The turn of a request by first come, first served: after so many admissions. `num_given_up`: requests
    that had been given up before it arrived."""

    num_before: int
    request: RequestState
    num_given_up: int


class GroupedQueue(WaitingQueue):
    """A waiting queue of which some requests are *selected*: they are in front, in the order in which they
    were selected. The others are in order of arrival. Preempted requests come before all of them.

    First come, first served would admit a request once as many others were admitted as were before it in the
    queue. The time of that is when its delay begins, and when the bound decides until when it may last. A
    free place goes to another request only if those whose turn has come would still be admitted in time, by
    the rate at which running requests end.
    """

    def __init__(self, bound: DelayBound, num_bytes: Callable[[str], int]) -> None:
        """`num_bytes`: returns the bytes of a version's weights."""
        super().__init__()
        self._front = _FIRST_SELECTED
        self._next_position = _FIRST_SELECTED
        self._bound = bound
        self._num_bytes = num_bytes
        self._selected: OrderedDict[RequestState, None] = OrderedDict()
        self._unselected_on: dict[str | None, OrderedDict[RequestState, None]] = {}
        self._turns: deque[_Turn] = deque()  # in order
        self._num_new = 0  # requests that were never admitted
        # Arrivals of requests that left unadmitted, which `_turns` still count.
        self._given_up: list[int] = []
        self._num_given_up = 0
        self._due: list[tuple[float, int, RequestState]] = []  # a heap: when it is due, arrival
        self._num_admitted = 0
        self._is_long = False
        self._ends_s: deque[float] = deque(maxlen=_RECENT)  # of running requests, while the queue was long

    def __len__(self) -> int:
        return len(self._requests) + len(self._selected)

    def __iter__(self) -> Iterator[RequestState]:
        return chain(self._selected, self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests or request in self._selected

    @property
    def selected(self) -> Collection[RequestState]:
        return self._selected.keys()

    def first(self, count: int) -> Iterator[RequestState]:
        return islice(self, count)

    def candidates(self) -> Iterator[RequestState]:
        on_base = [each for each in self._selected if each.adapter is None]
        if not on_base:
            return super().candidates()
        return merge(sorted((*self._pinned, *on_base), key=_position), self._on_base, key=_position)

    def ready(self, most_on_base: int) -> list[RequestState]:
        on_base = [each for each in self._selected if each.adapter is None]
        return sorted((*on_base, *super().ready(most_on_base)), key=_position)

    @property
    def has_candidates(self) -> bool:
        return super().has_candidates or any(each.adapter is None for each in self._selected)

    def append(self, request: RequestState) -> None:
        self._turns.append(_Turn(self._num_admitted + self._num_new, request, self._num_given_up))
        self._num_new += 1
        super().append(request)
        self._unselected_on.setdefault(request.adapter, OrderedDict())[request] = None

    def append_front(self, request: RequestState) -> None:
        super().append_front(request)
        super()._take_out(request)
        self._selected[request] = None
        self._selected.move_to_end(request, last=False)

    def give_up(self, request: RequestState) -> None:
        if request.num_cached is None:
            self._num_new -= 1
            self._given_up.append(request.arrival)
            self._num_given_up += 1
        super().give_up(request)

    def admitted(self, request: RequestState, now_s: float) -> None:
        """Record that a request was admitted for the first time. `now_s`: sum of the predicted seconds of
        all steps so far."""
        self._num_admitted += 1
        self._num_new -= 1
        self._take_turns(now_s)

    def ended(self, now_s: float) -> None:
        """Record that a running request ended. Only ends during a long queue tell how soon places become
        free: before it formed, other requests ran, perhaps far shorter ones."""
        if self._is_long:
            self._ends_s.append(now_s)

    def select(
        self,
        running: Iterable[RequestState],
        num_admissible: int,
        num_tokens: int,
        now_s: float,
        pace: Callable[[], EndPace],
    ) -> None:
        """Select requests, until there are as many as the next step can admit, and a few more. `running`: the
        running requests. `num_admissible`: how many requests may join them. `num_tokens`: most tokens of
        prompts in a step. `pace`: predicts when running requests end, which is asked before enough of them
        have ended."""
        num_running = 0
        self._move_up(now_s)
        active: set[str | None] = {None}  # the base model costs nothing more
        for each in running:
            num_running += 1
            active.add(each.adapter)
        self._is_long = len(self) > max(num_running, num_admissible)
        if not self._is_long:
            self._ends_s.clear()
            if not self._due:
                return
        active.update(each.adapter for each in self._selected)
        num_left = num_tokens - sum(len(each.token_ids) for each in islice(self._selected, num_admissible))
        seen = self._seen_pace(now_s)
        ahead = 1 if seen is None else min(max(int(seen.per_s * _AHEAD_S), 1), _MAX_AHEAD)
        num_free = self._num_free(num_admissible, ahead, now_s, seen or pace())
        while self._requests and (
            len(self._selected) < ahead or (num_left > 0 and len(self._selected) < num_admissible + ahead)
        ):
            if num_free >= 1 and self._is_long:
                request = self._best(active)
                num_free -= 1
            else:
                request = self._earliest()
            self._select(request)
            active.add(request.adapter)
            num_left -= len(request.token_ids)

    def check_integrity(self) -> None:
        """Assert that every request is in one part of the queue, and that the subsets agree with them."""
        super().check_integrity()
        assert not self._selected.keys() & self._requests.keys()
        unselected = [each for group in self._unselected_on.values() for each in group]
        assert len(unselected) == len(self._requests)
        assert set(unselected) == self._requests.keys()
        assert all(self._unselected_on.values())
        with_turn = {turn.request for turn in self._turns} | {each for _, _, each in self._due}
        assert self._requests.keys() <= with_turn
        assert self._num_new == sum(each.num_cached is None for each in self)

    def _take_turns(self, now_s: float) -> None:
        """Let the delay of each request whose turn has come begin."""
        while self._turns and self._turns[0].num_before < self._num_admitted:
            request = self._turns.popleft().request
            if request in self._requests:
                due_s = now_s + self._allowed_s(request, now_s)
                heapq.heappush(self._due, (due_s, request.arrival, request))

    def _move_up(self, now_s: float) -> None:
        """Move up the turns behind requests that were given up."""
        if not self._given_up:
            return
        given_up = sorted(self._given_up)
        num_known = self._num_given_up - len(given_up)
        turns: deque[_Turn] = deque()
        num_earlier = 0
        for turn in self._turns:
            if turn.request not in self._requests:
                continue
            while num_earlier < len(given_up) and given_up[num_earlier] < turn.request.arrival:
                num_earlier += 1
            num_counted = num_earlier - max(turn.num_given_up - num_known, 0)
            turns.append(_Turn(turn.num_before - num_counted, turn.request, self._num_given_up))
        self._turns = turns
        self._given_up = []
        self._take_turns(now_s)

    def _num_free(self, num_admissible: int, ahead: int, now_s: float, pace: EndPace) -> float:
        """Return how many places may go to any request, so that all whose turn has come, or comes before the
        places are taken, are still admitted in time. `ahead`: most requests that are selected beyond those
        that can be admitted now."""
        num_places = num_admissible - len(self._selected)  # below 0 if selected ones wait for places
        last_turn = self._num_admitted + max(num_admissible, len(self._selected)) + ahead
        self._due = [each for each in self._due if each[2] in self._requests]
        self._due.sort()
        dues_s = [due_s for due_s, _, _ in self._due]
        for turn in self._turns:
            if turn.num_before >= last_turn:
                break
            if turn.request in self._requests:
                dues_s.append(now_s + self._allowed_s(turn.request, now_s))
        return min(
            (
                num_places - number + pace.num_within(due_s - now_s)
                for number, due_s in enumerate(sorted(dues_s), start=1)
            ),
            default=math.inf,
        )

    def _allowed_s(self, request: RequestState, now_s: float) -> float:
        """Return by how much a request may be delayed whose turn comes now."""
        return ADMISSION_SHARE * self._bound.allowed_s(now_s - request.arrived_s)

    def _seen_pace(self, now_s: float) -> EndPace | None:
        """Return the pace of recent ends; None if there were too few."""
        times = self._ends_s
        if len(times) < _RECENT or now_s <= times[0]:
            return None
        return EndPace(0.0, (len(times) - 1) / (now_s - times[0]))

    def _earliest(self) -> RequestState:
        """Return the request that is due first, or else the oldest one."""
        while self._due and self._due[0][2] not in self._requests:
            heapq.heappop(self._due)
        return self._due[0][2] if self._due else next(iter(self._requests))

    def _best(self, active: set[str | None]) -> RequestState:
        """Return the request that adds the fewest bytes to a step."""
        groups = self._unselected_on
        joinable = active & groups.keys()
        if joinable:
            return min((next(iter(groups[version])) for version in joinable), key=attrgetter("arrival"))
        version = min(groups, key=self._bytes_a_request)
        return next(iter(groups[version]))

    def _bytes_a_request(self, version: str | None) -> float:
        assert version is not None, "the base model is always active"
        return self._num_bytes(version) / len(self._unselected_on[version])

    def _select(self, request: RequestState) -> None:
        self._take_out(request)
        self._selected[request] = None
        request.queue_position = self._next_position
        self._next_position += 1

    def _take_out(self, request: RequestState) -> None:
        if request in self._selected:
            del self._selected[request]
            return
        super()._take_out(request)
        group = self._unselected_on[request.adapter]
        del group[request]
        if not group:
            del self._unselected_on[request.adapter]
