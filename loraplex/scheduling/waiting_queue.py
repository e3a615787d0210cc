"""The requests that wait to run, first come first served.

Thousands of requests may wait for adapters that are still on disk, and must not slow down a step: it looks
only at the first few, to load their adapters, and at the candidates, the only ones it could admit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, KeysView, Mapping
from heapq import merge
from itertools import islice, pairwise
from operator import attrgetter

from loraplex.scheduling.request_state import RequestState

_position = attrgetter("queue_position")


class WaitingQueue:
    """Requests in order of arrival, with preempted ones in front.

    A request is a *candidate* for admission if it runs on the base model, or if its adapter is pinned for it.
    Only the first requests of the queue get pins, so that pinned requests are few. Adding, removing and
    finding a request take the same time however many others wait. `holds_back`: returns whether the tenant of
    a request may not run more for now.

        requests    [ r1  r2  r3  r4  r5  r6  r7 ... ]   by `queue_position`, which rises
            on_base     [     r2          r5             ]   a subset, in the same order
            pinned      { r1      r3                     }   another subset, in any order
    """

    def __init__(self) -> None:
        # Ordered dictionaries rather than deques: a cancelled request leaves from the middle.
        self._requests: OrderedDict[RequestState, None] = OrderedDict()
        self._on_base: OrderedDict[RequestState, None] = OrderedDict()
        self._pinned: dict[RequestState, None] = {}
        self._num_on: dict[str, int] = {}  # by adapter version
        self._front = 0
        self._back = 0
        self.holds_back: Callable[[RequestState], bool] = lambda request: False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def append(self, request: RequestState) -> None:
        """Add a request that has just arrived."""
        request.queue_position = self._back
        self._back += 1
        self._enter(request)

    def append_front(self, request: RequestState) -> None:
        """Add a request that was preempted: it runs before all others."""
        self._front -= 1
        request.queue_position = self._front
        self._enter(request)
        self._requests.move_to_end(request, last=False)
        if request.adapter is None:
            self._on_base.move_to_end(request, last=False)

    def remove(self, request: RequestState) -> None:
        self._take_out(request)
        version = request.adapter
        if version is None:
            return
        if request.pinned:
            del self._pinned[request]
        if self._num_on[version] == 1:
            del self._num_on[version]
        else:
            self._num_on[version] -= 1

    def give_up(self, request: RequestState) -> None:
        """Remove a request that will not run: it was cancelled, or failed."""
        self.remove(request)

    def arrange(self, count: int) -> None:
        """Decide which `count` requests come first in the next step, where that is not the order of
        arrival."""

    @property
    def is_shared(self) -> bool:
        """Return whether requests compete that do not simply take turns by arrival: of several tenants, of
        several priorities, or with objectives."""
        return False

    @property
    def num_by_tenant(self) -> Mapping[str, int]:
        """Number of waiting requests of each tenant that has any, where that is counted."""
        return {}

    @property
    def tenants(self) -> Collection[str]:
        """The tenants that wait, where that is counted."""
        return self.num_by_tenant.keys()

    @property
    def selected(self) -> Collection[RequestState]:
        """The requests that were put in front, in order, to admit them by adapter."""
        return ()

    def admitted(self, request: RequestState, now_s: float) -> None:
        """Record that a request is admitted for the first time. `now_s`: sum of the predicted seconds of all
        steps so far."""

    def ended(self, now_s: float) -> None:
        """Record that a running request ended."""

    def set_pinned(self, request: RequestState, *, pinned: bool) -> None:
        """Record whether the adapter of a waiting request is pinned for it."""
        assert request.pinned is not pinned
        request.pinned = pinned
        if pinned:
            self._pinned[request] = None
        else:
            del self._pinned[request]

    def first(self, count: int) -> Iterator[RequestState]:
        """Return the first requests. No request may enter or leave during the iteration; pins may change."""
        return islice(self._requests, count)

    def candidates(self) -> Iterator[RequestState]:
        """Return the requests that could be admitted as far as pins are concerned, in order. No request may
        enter or leave during the iteration; pins may change, and the caller checks them."""
        if not self._pinned:
            return iter(self._on_base)
        pinned = self.pinned()
        return merge(pinned, self._on_base, key=_position) if self._on_base else iter(pinned)

    def ready(self, most_on_base: int) -> list[RequestState]:
        """Return the pinned requests and the first ones on the base model, in order."""
        return sorted((*self._pinned, *islice(self._on_base, most_on_base)), key=_position)

    def pinned(self) -> list[RequestState]:
        """Return the requests whose adapter is pinned for them, in order."""
        return sorted(self._pinned, key=_position)

    @property
    def has_candidates(self) -> bool:
        return bool(self._pinned or self._on_base)

    @property
    def versions(self) -> KeysView[str]:
        """Adapter versions of waiting requests."""
        return self._num_on.keys()

    def on_version(self, version: str) -> list[RequestState]:
        """Return the requests waiting for an adapter version, in order. Iterates over all requests."""
        return [request for request in self if request.adapter == version]

    def check_integrity(self) -> None:
        """Assert that the subsets agree with the whole queue."""
        positions = [request.queue_position for request in self]
        assert all(before < after for before, after in pairwise(positions))
        assert list(self._on_base) == [each for each in self._requests if each.adapter is None]
        assert self.pinned() == [each for each in self if each.pinned]
        num_on: dict[str, int] = {}
        for request in self:
            if request.adapter is not None:
                num_on[request.adapter] = num_on.get(request.adapter, 0) + 1
        assert self._num_on == num_on

    def _take_out(self, request: RequestState) -> None:
        """Remove a request from the ordered parts of the queue."""
        del self._requests[request]
        if request.adapter is None:
            del self._on_base[request]

    def _enter(self, request: RequestState) -> None:
        self._requests[request] = None
        version = request.adapter
        if version is None:
            self._on_base[request] = None
            return
        self._num_on[version] = self._num_on.get(version, 0) + 1
        if request.pinned:
            self._pinned[request] = None
