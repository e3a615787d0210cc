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
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from typing import Final, NamedTuple

from loraplex.core.batching import DelayBound
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.waiting_queue import WaitingQueue

_AHEAD_S: Final = 0.1
"""Seconds that requests are selected before they can be admitted: their adapters are loaded meanwhile."""
_MAX_AHEAD: Final = 8
_FIRST_SELECTED: Final = -(1 << 40)
"""The position of the first selected request: below those of all others, above those of preempted ones."""
_USED_SHARE: Final = 0.6
"""Share of the bound until a request is selected; the rest is for its prompt and for what is not foreseen."""
_RECENT: Final = 32
"""Ends of running requests that the rate of ends is taken from."""
_MAX_STALE: Final = 1024
_position = attrgetter("queue_position")


class EndPace(NamedTuple):
    """The pace at which running requests end: the next one in `first_s` seconds, then `per_s` a second."""

    first_s: float
    per_s: float


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
        self._turns: deque[tuple[int, RequestState]] = deque()  # admissions before its turn, in order
        self._due: list[tuple[float, int, RequestState]] = []  # a heap: when it is due, arrival
        self._num_admitted = 0
        self._ends_s: deque[float] = deque(maxlen=_RECENT)  # of running requests

    def __len__(self) -> int:
        return len(self._requests) + len(self._selected)

    def __iter__(self) -> Iterator[RequestState]:
        return chain(self._selected, self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests or request in self._selected

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
        if len(self._turns) > 2 * len(self) + _MAX_STALE:  # requests that were cancelled
            self._turns = deque(turn for turn in self._turns if turn[1] in self._requests)
        self._turns.append((self._num_admitted + len(self), request))
        super().append(request)
        self._unselected_on.setdefault(request.adapter, OrderedDict())[request] = None

    def append_front(self, request: RequestState) -> None:
        super().append_front(request)
        super()._take_out(request)
        self._selected[request] = None
        self._selected.move_to_end(request, last=False)

    def admitted(self, request: RequestState, now_s: float) -> None:
        """Record that a request was admitted for the first time. `now_s`: sum of the predicted seconds of
        all steps so far."""
        self._num_admitted += 1
        while self._turns and self._turns[0][0] < self._num_admitted:
            _, next_one = self._turns.popleft()
            if next_one in self._requests:
                due_s = now_s + self._allowed_s(next_one, now_s)
                heapq.heappush(self._due, (due_s, next_one.arrival, next_one))

    def ended(self, now_s: float) -> None:
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
        active: set[str | None] = {None}  # the base model costs nothing more
        for each in running:
            num_running += 1
            active.add(each.adapter)
        is_long = len(self) > max(num_running, num_admissible)
        if not is_long and not self._due:
            return
        active.update(each.adapter for each in self._selected)
        num_left = num_tokens - sum(len(each.token_ids) for each in islice(self._selected, num_admissible))
        num_free = self._num_free(num_admissible - len(self._selected), now_s, pace)
        ahead = self._num_ahead(now_s)
        while self._requests and (
            len(self._selected) < ahead or (num_left > 0 and len(self._selected) < num_admissible + ahead)
        ):
            if num_free >= 1 and is_long:
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
        with_turn = {each for _, each in self._turns} | {each for _, _, each in self._due}
        assert self._requests.keys() <= with_turn

    def _num_free(self, num_places: int, now_s: float, pace: Callable[[], EndPace]) -> float:
        """Return how many places may go to any request, so that all whose turn has come, or comes before the
        places are taken, are still admitted in time. `num_places`: places that are free, without those of
        selected requests; below 0 if these wait for places themselves."""
        first_s, per_s = self._seen_pace(now_s) or pace()
        self._due = [each for each in self._due if each[2] in self._requests]
        self._due.sort()
        dues_s = [due_s for due_s, _, _ in self._due]
        for num_before, request in self._turns:
            if num_before >= self._num_admitted + num_places:
                break
            if request in self._requests:
                dues_s.append(now_s + self._allowed_s(request, now_s))
        return min(
            (
                num_places - number + max(due_s - now_s - first_s, 0.0) * per_s
                for number, due_s in enumerate(sorted(dues_s), start=1)
            ),
            default=math.inf,
        )

    def _allowed_s(self, request: RequestState, now_s: float) -> float:
        """Return by how much a request may be delayed whose turn comes now."""
        return _USED_SHARE * self._bound.allowed_s(now_s - request.arrived_s)

    def _num_ahead(self, now_s: float) -> int:
        """Return how many requests to select beyond those that can be admitted now."""
        pace = self._seen_pace(now_s)
        return _MAX_AHEAD if pace is None else min(max(int(pace.per_s * _AHEAD_S), 1), _MAX_AHEAD)

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
