"""The waiting queue of several tenants, priorities or objectives: who comes first when not all can.

While one tenant waits, with one priority and without objectives, it is the queue that it extends. Otherwise,
before each step, the first of all waiting requests are put in front of it, in this order:

    tenants of a lower `priority`, before all others
     live requests, before lines of batches
      tenants that may run more (`borrowing`), before those that may not
       the tenant with the lowest counter (`fair_share`); each request put here raises it by its prompt
        its requests of a lower `priority`
          those whose SLO can still be met
            the order of the queue that this one extends: of arrival, with preempted ones in front; grouped
            admission goes on among the requests that it has selected

A request whose SLO is lost comes first again when it has waited for ten times the SLO: no request starves.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Final

from loraplex.core.clock import Clock
from loraplex.scheduling.batching.grouped import GroupedQueue
from loraplex.scheduling.fair_share import FairShare
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.waiting_queue import WaitingQueue

_FIRST_LEADING: Final = -(1 << 60)
"""Position of the first request that is put in front: below all positions of the queue that is extended."""
_position = attrgetter("queue_position")
_PATIENCE: Final = 10.0
"""Waiting times, in SLOs, after which a request is served in its turn although its SLO is lost."""


class _Line:
    """A tenant's waiting requests of one priority. `late`: those whose SLO is lost."""

    def __init__(self) -> None:
        self.due: OrderedDict[RequestState, None] = OrderedDict()
        self.late: OrderedDict[RequestState, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.due or self.late)

    def remove(self, request: RequestState) -> None:
        (self.due if request in self.due else self.late).pop(request)

    def in_order(self, selected: Collection[RequestState], now_s: float) -> Iterator[RequestState]:
        """Yield the requests. `selected`: those that grouped admission has put in front."""
        oldest = next(iter(self.late), None)
        if oldest is not None and not _has_waited_long(oldest, now_s):
            oldest = None
        if oldest is not None:
            yield oldest
        for request in selected:
            if request in self.due:
                yield request
        for request in self.due:
            if request not in selected:
                yield request
        for request in self.late:
            if request is not oldest:
                yield request


def _has_waited_long(request: RequestState, now_s: float) -> bool:
    """Return whether a request whose SLO is lost has waited for so long that it comes first again."""
    return now_s - request.queued_s > _PATIENCE * (request.slo_ttft_s or 0.0)


class FairQueue(WaitingQueue):
    """See above. `arrange` decides the order, which holds until it is called again."""

    def __init__(self, fair: FairShare, clock: Clock, *args: Any) -> None:
        """`args`: of the queue that this one extends."""
        super().__init__(*args)
        self._fair = fair
        self._clock = clock
        self._lines: dict[str, dict[int, _Line]] = {}
        self._priorities: dict[str, list[int]] = {}  # by tenant, sorted
        self._num_lines = 0
        self._num_by_tenant: Counter[str] = Counter()
        self._num_with_slo = 0
        self._own: dict[RequestState, int] = {}  # positions of those that were put in front, before that

    # ---- the order

    @property
    def is_shared(self) -> bool:
        """Return whether there is more to decide than whose turn it is by arrival."""
        return self._num_lines > 1 or self._num_with_slo > 0

    @property
    def num_by_tenant(self) -> Mapping[str, int]:
        return self._num_by_tenant

    def arrange(self, count: int) -> None:
        """Put the first `count` requests in front."""
        self._restore()
        if not self.is_shared:
            return
        for rank, request in enumerate(islice(self._in_order(), count)):
            self._own[request] = request.queue_position
            request.queue_position = _FIRST_LEADING + rank

    def _restore(self) -> None:
        for request, position in self._own.items():
            request.queue_position = position
        self._own.clear()

    def _in_order(self) -> Iterator[RequestState]:
        """Yield all waiting requests in the order above."""
        now_s, fair, costs = self._clock.now_s(), self._fair, self._fair.costs
        if self._num_with_slo:
            self._find_late(now_s)
        tenants: list[tuple[int, bool, bool, float, int, str, RequestState, Iterator[RequestState]]] = []
        for tenant in self._lines:
            requests = self._of_tenant(tenant, now_s)
            first = next(requests)
            held, counter = self.holds_back(first), fair.counter(tenant)
            tenants.append(
                (fair.rank(tenant), first.is_line, held, counter, first.arrival, tenant, first, requests)
            )
        heapq.heapify(tenants)
        while tenants:
            rank, _, held, counter, _, tenant, request, others = tenants[0]
            yield request
            following = next(others, None)
            if following is None:
                heapq.heappop(tenants)
                continue
            if request.num_charged == 0:
                counter += costs.prompt(request.adapter, len(request.token_ids)) / fair.share(tenant)
            heapq.heapreplace(
                tenants,
                (rank, following.is_line, held, counter, following.arrival, tenant, following, others),
            )

    def _of_tenant(self, tenant: str, now_s: float) -> Iterator[RequestState]:
        selected = self.selected
        for priority in self._priorities[tenant]:
            yield from self._lines[tenant][priority].in_order(selected, now_s)

    def _find_late(self, now_s: float) -> None:
        """Move requests at the head of their line whose SLO is lost behind the others of the line."""
        for lines in self._lines.values():
            for line in lines.values():
                while line.due and self._is_lost(next(iter(line.due)), now_s):
                    request, _ = line.due.popitem(last=False)
                    line.late[request] = None

    def _is_lost(self, request: RequestState, now_s: float) -> bool:
        if request.slo_ttft_s is None or request.num_output > 0:
            return False
        costs = self._fair.costs
        least_s = costs.prompt(request.adapter, len(request.token_ids)) if costs.is_seconds else 0.0
        return now_s - request.queued_s + least_s > request.slo_ttft_s

    # ---- changes

    def append(self, request: RequestState) -> None:
        super().append(request)
        self._line_of(request).due[request] = None
        self._num_with_slo += request.slo_ttft_s is not None

    def append_front(self, request: RequestState) -> None:
        super().append_front(request)
        line = self._line_of(request)
        line.due[request] = None
        line.due.move_to_end(request, last=False)
        self._num_with_slo += request.slo_ttft_s is not None

    def remove(self, request: RequestState) -> None:
        super().remove(request)
        self._own.pop(request, None)
        tenant, priority = request.request.tenant, request.request.priority
        self._num_by_tenant[tenant] -= 1
        lines = self._lines[tenant]
        lines[priority].remove(request)
        self._num_with_slo -= request.slo_ttft_s is not None
        if lines[priority]:
            return
        del lines[priority]
        self._priorities[tenant].remove(priority)
        self._num_lines -= 1
        if not lines:
            del self._lines[tenant], self._priorities[tenant], self._num_by_tenant[tenant]
            self._fair.stopped_waiting(tenant)

    def _line_of(self, request: RequestState) -> _Line:
        tenant, priority = request.request.tenant, request.request.priority
        self._num_by_tenant[tenant] += 1
        lines = self._lines.setdefault(tenant, {})
        line = lines.get(priority)
        if line is None:
            line = lines[priority] = _Line()
            insort(self._priorities.setdefault(tenant, []), priority)
            self._num_lines += 1
        return line

    # ---- views

    def __iter__(self) -> Iterator[RequestState]:
        return self._leading_first(super().__iter__())

    def first(self, count: int) -> Iterator[RequestState]:
        return islice(self, count) if self._own else super().first(count)

    def candidates(self) -> Iterator[RequestState]:
        own = self._own
        if not own:
            return super().candidates()
        leading = (each for each in list(own) if each.adapter is None or each.pinned)
        selected = (each for each in self.selected if each.adapter is None and not each.pinned)
        others = sorted((each for each in (*self._pinned, *selected) if each not in own), key=_position)
        on_base = (each for each in self._on_base if each not in own)
        return chain(leading, merge(others, on_base, key=_position))

    def ready(self, most_on_base: int) -> list[RequestState]:
        if not self._own:
            return super().ready(most_on_base)
        leading = [each for each in self._own if each.adapter is None][:most_on_base]
        return sorted({*leading, *super().ready(most_on_base)}, key=_position)

    def _leading_first(self, requests: Iterable[RequestState]) -> Iterator[RequestState]:
        if not self._own:
            return iter(requests)
        return chain(list(self._own), (each for each in requests if each not in self._own))

    def check_integrity(self) -> None:
        lines = [line for each in self._lines.values() for line in each.values()]
        in_lines = {each for line in lines for each in chain(line.due, line.late)}
        assert in_lines == set(self)
        assert self._num_by_tenant == Counter(each.request.tenant for each in in_lines)
        assert self._num_lines == len(lines)
        assert all(lines)
        assert self._own.keys() <= in_lines
        assert self._num_with_slo == sum(each.slo_ttft_s is not None for each in self)
        self._restore()
        super().check_integrity()


class FairGroupedQueue(FairQueue, GroupedQueue):
    """The same on top of grouped admission."""

    def select(self, *args: Any, **options: Any) -> None:
        self._restore()
        super().select(*args, **options)
