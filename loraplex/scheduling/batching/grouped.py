"""Admission by adapter: in a long queue, requests are reordered so that a step reads few adapters.

A step reads the weights of each adapter in it once, however many requests are on it. So of the requests that
wait, those whose adapter is running anyway go first, then those on the adapter that costs the fewest bytes
for each of its waiting requests. A request that has waited as long as the bound allows goes before all of
these. Nothing is reordered while no more requests wait than run.

        arrival order   [ a1  b1  c1  b2  d1  b3  a2 ... ]
        selected        [ b1  b2  b3 | a1  a2 | ...          admitted in this order
        due             a1: first come, first served would admit it first, and the bound allows two before it
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from typing import Final

from loraplex.core.batching import DelayBound
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.waiting_queue import WaitingQueue

_AHEAD: Final = 8
"""Requests to select beyond those that could be admitted now, so that their adapters are loaded in time."""
_RECENT: Final = 64
"""Admissions that the rate of admissions is taken from."""
_FIRST_SELECTED: Final = -(1 << 40)
"""The position of the first selected request: below those of all others, above those of preempted ones."""
_MAX_STALE: Final = 256
_position = attrgetter("queue_position")


class GroupedQueue(WaitingQueue):
    """A waiting queue of which some requests are *selected*: they are in front, in the order in which they
    were selected. The others are in order of arrival. Preempted requests come before all of them.

    What the bound allows is counted in admissions: a request is due once as many others were admitted since
    its arrival as were before it in the queue, and a share of them more, or as many more as are admitted in
    the bound's seconds.
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
        self._due: list[tuple[float, int, RequestState]] = []  # a heap: number of admissions, arrival
        self._num_admitted = 0
        self._admitted_s: deque[float] = deque(maxlen=_RECENT)

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

    @property
    def has_candidates(self) -> bool:
        return super().has_candidates or any(each.adapter is None for each in self._selected)

    def append(self, request: RequestState) -> None:
        num_before = len(self)
        super().append(request)
        self._unselected_on.setdefault(request.adapter, OrderedDict())[request] = None
        slack = max(self._bound.share * num_before, self._bound.seconds * self._admissions_per_s())
        self._drop_stale()
        heapq.heappush(self._due, (self._num_admitted + num_before + slack, request.arrival, request))

    def append_front(self, request: RequestState) -> None:
        super().append_front(request)
        super()._take_out(request)
        self._selected[request] = None
        self._selected.move_to_end(request, last=False)

    def admitted(self, request: RequestState, now_s: float) -> None:
        """Record that a request was admitted for the first time. `now_s`: sum of the predicted seconds of
        all steps so far."""
        self._num_admitted += 1
        self._admitted_s.append(now_s)

    def select(self, running: Iterable[RequestState], num_admissible: int) -> None:
        """Select requests, until there are as many as can be admitted, and a few more. `running`: the running
        requests. `num_admissible`: how many requests may join them."""
        num_running = 0
        active: set[str | None] = {None}  # the base model costs nothing more
        for each in running:
            num_running += 1
            active.add(each.adapter)
        if len(self) <= num_running:
            return
        active.update(each.adapter for each in self._selected)
        while len(self._selected) < num_admissible + _AHEAD and self._unselected_on:
            request = self._next(active)
            self._select(request)
            active.add(request.adapter)

    def check_integrity(self) -> None:
        """Assert that every request is in one part of the queue, and that the subsets agree with them."""
        super().check_integrity()
        assert not self._selected.keys() & self._requests.keys()
        unselected = [each for group in self._unselected_on.values() for each in group]
        assert len(unselected) == len(self._requests)
        assert set(unselected) == self._requests.keys() <= {each for _, _, each in self._due}
        assert all(self._unselected_on.values())

    def _next(self, active: set[str | None]) -> RequestState:
        """Return the request to select next."""
        while self._due and self._due[0][2] not in self._requests:
            heapq.heappop(self._due)
        due, _, oldest = self._due[0]
        if due <= self._num_admitted + len(self._selected):
            return oldest
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

    def _drop_stale(self) -> None:
        """Drop what is recorded of requests that are not waiting any more, once it is much."""
        if len(self._due) > 2 * len(self._requests) + _MAX_STALE:
            self._due = [each for each in self._due if each[2] in self._requests]
            heapq.heapify(self._due)

    def _admissions_per_s(self) -> float:
        times = self._admitted_s
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
