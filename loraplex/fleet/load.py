"""The load of every replica, as seen by the front of the fleet.

`FleetLoad` is updated in constant time when a request is sent, has its first token and ends; a request counts
from the moment it is sent. Routers read columns with one value per replica: none of them iterates over
requests, and reading changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.arrays import BoolArray, FloatArray, IntArray
from loraplex.fleet.answer_length import AnswerLength
from loraplex.fleet.request import RoutedRequest
from loraplex.perf.set_costs import RequestSets

_NO_REPLICAS: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLimits:
    """The limits of one replica: requests in a step, KV tokens, adapters at a time (None: no limit)."""

    max_running: int
    kv_tokens: int
    max_adapters: int | None = None

    def __post_init__(self) -> None:
        assert self.max_running > 0, "a replica must be able to run a request"
        assert self.kv_tokens > 0, "a replica must be able to hold a token"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoad:
    """One replica's load at one moment, for tests and for people; routers read the columns of `FleetLoad`."""

    num_running: int
    num_waiting: int
    sum_ranks: int
    max_rank: int
    waiting_tokens: int
    kv_tokens_left: float
    adapters: frozenset[int]


class _Open(NamedTuple):
    """A request that was sent and has not ended. `counted`: the request as its replica sees it, with output
    from other replicas as part of the prompt. `kv_tokens`: the KV tokens it was counted with."""

    request: RoutedRequest
    counted: RoutedRequest
    replica: int
    kv_tokens: float
    is_running: bool


def _with_output(request: RoutedRequest, num_output: int) -> RoutedRequest:
    if not num_output:
        return request
    return request._replace(prompt_tokens=request.prompt_tokens + num_output)


class _RequestColumns:
    """Counts, sums and maxima over a set of requests per replica.

    Integers are kept as floats too: costs are computed from all columns for every request, and converting
    them would take a tenth of a router's time. Single values are changed through memoryviews of the columns,
    which takes half as long as through arrays.
    """

    def __init__(self, table: FloatArray) -> None:
        """`table`: the memory for the columns, all zero; in the order of `RequestSets`."""
        columns: list[memoryview[float]] = [memoryview(column).cast("B").cast("d") for column in table]
        self.num_requests, self.sum_ranks, self.max_rank = columns[:3]
        self.prompt_tokens, self.kv_tokens, self.num_adapters = columns[3:]
        # By adapter and replica: an adapter in flight is on few replicas.
        self.by_adapter: dict[int, dict[int, int]] = {}
        self._by_rank: list[dict[int, int]] = [{} for _ in range(table.shape[1])]

    def add(self, replica: int, request: RoutedRequest, kv_tokens: float) -> None:
        adapter, rank, prompt_tokens, *_ = request
        self.num_requests[replica] += 1
        self.prompt_tokens[replica] += prompt_tokens
        self.kv_tokens[replica] += kv_tokens
        if adapter is None:
            return
        self.sum_ranks[replica] += rank
        ranks = self._by_rank[replica]
        ranks[rank] = ranks.get(rank, 0) + 1
        if rank > self.max_rank[replica]:
            self.max_rank[replica] = rank
        replicas = self.by_adapter.setdefault(adapter, {})
        replicas[replica] = replicas.get(replica, 0) + 1
        if replicas[replica] == 1:
            self.num_adapters[replica] += 1

    def remove(self, replica: int, request: RoutedRequest, kv_tokens: float) -> None:
        adapter, rank, prompt_tokens, *_ = request
        self.num_requests[replica] -= 1
        self.prompt_tokens[replica] -= prompt_tokens
        # An empty replica must have exactly zero, in spite of rounding.
        self.kv_tokens[replica] = self.kv_tokens[replica] - kv_tokens if self.num_requests[replica] else 0.0
        if adapter is None:
            return
        self.sum_ranks[replica] -= rank
        ranks, replicas = self._by_rank[replica], self.by_adapter[adapter]
        _count_down(ranks, rank)
        if rank not in ranks and rank == self.max_rank[replica]:
            self.max_rank[replica] = max(ranks, default=0)
        _count_down(replicas, replica)
        if replica not in replicas:
            self.num_adapters[replica] -= 1
        if not replicas:
            del self.by_adapter[adapter]


class _WithOneMore:
    """The result of `FleetLoad.with_one_more`. `rows`: by column, then for all and for waiting requests, then
    without and with one more. `max_rank`, `num_adapters`: the parts of it that are not plain sums."""

    def __init__(self, rows: FloatArray) -> None:
        self.rows = rows
        self.everything = RequestSets(*rows[:, 0])
        self.waiting = RequestSets(*rows[:, 1])
        self.max_rank: FloatArray = rows[2, :, 1]
        self.num_adapters: list[FloatArray] = list(rows[5, :, 1])


def _count_down(counts: dict[int, int], key: int) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]


class FleetLoad:
    """The requests that were sent to each replica and have not ended.

    `everything` and `waiting` are columns over replicas, kept up to date: all requests, and those without a
    first token. A request's KV tokens are its prompt and an answer of the mean length, wherever the answer
    began. `accepts`: False for a replica that is down or drained, set by the controller.
    """

    def __init__(self, limits: Sequence[ReplicaLimits], answers: AnswerLength | None = None) -> None:
        num_replicas = len(limits)
        self.limits: Final = tuple(limits)
        self.replicas: Final[IntArray] = np.arange(num_replicas)
        self.max_running: Final[FloatArray] = np.array([each.max_running for each in limits], np.float64)
        self.kv_capacity: Final[FloatArray] = np.array([each.kv_tokens for each in limits], np.float64)
        self.max_adapters: Final[FloatArray] = np.array(
            [math.inf if each.max_adapters is None else each.max_adapters for each in limits]
        )
        self.accepts = np.ones(num_replicas, np.bool_)
        slots = [each.max_adapters for each in limits if each.max_adapters is not None]
        # The smallest limit of all replicas; None if any replica has none.
        self.num_slots: Final = min(slots) if len(slots) == num_replicas else None
        self.answers: Final = AnswerLength() if answers is None else answers
        # One table of all columns, so that one operation changes all of them.
        self._table: FloatArray = np.zeros((len(RequestSets._fields), 2, num_replicas))
        self._all = _RequestColumns(self._table[:, 0])
        self._waiting = _RequestColumns(self._table[:, 1])
        self._open: dict[Hashable, _Open] = {}
        self._by_tenant: dict[str, dict[int, int]] = {}
        self.everything: Final = RequestSets(*self._table[:, 0])
        self.waiting: Final = RequestSets(*self._table[:, 1])
        # Buffers of `with_one_more`: arrays of this size take longer to allocate than to fill.
        self._before = self._table[:, :, np.newaxis]
        self._more: FloatArray = np.zeros((len(self._table), 1, 2, 1))
        self._one_more = self._more[:, 0, 1, 0]
        self._answer = _WithOneMore(np.zeros((len(self._table), 2, 2, num_replicas)))

    @property
    def num_replicas(self) -> int:
        return len(self.limits)

    @property
    def is_empty(self) -> bool:
        """Return whether no replica has a request."""
        return not self._open

    def sent(self, request_id: Hashable, request: RoutedRequest, replica: int) -> None:
        """Count a request that was just sent to a replica."""
        self._send(request_id, request, replica, num_output=0)

    def _send(self, request_id: Hashable, request: RoutedRequest, replica: int, num_output: int) -> None:
        assert request_id not in self._open, f"request {request_id} was sent before"
        counted = _with_output(request, num_output)
        kv_tokens = counted.prompt_tokens + self.output_left(request, num_output)
        self._open[request_id] = _Open(request, counted, replica, kv_tokens, False)
        self._all.add(replica, counted, kv_tokens)
        self._waiting.add(replica, counted, kv_tokens)
        self._count_tenant(request.tenant, replica)

    def has_room(self, request: RoutedRequest) -> BoolArray:
        """Return for each replica whether its KV memory holds one more request in addition to all it was
        sent."""
        most = self.kv_capacity - (request.prompt_tokens + self.output_left(request))
        has_room: BoolArray = self.everything.kv_tokens <= most
        return has_room

    def output_left(self, request: RoutedRequest, num_output: int = 0) -> float:
        """Return how many more output tokens are expected of an answer: up to its length, or the mean length
        if its own is unknown, and at least one."""
        expected = self.answers.mean_tokens if request.output_tokens is None else request.output_tokens
        return max(expected - num_output, 1.0)

    def first_token(self, request_id: Hashable) -> None:
        """Count a request as running from now on."""
        request, counted, replica, kv_tokens, is_running = self._open[request_id]
        if not is_running:
            self._open[request_id] = _Open(request, counted, replica, kv_tokens, True)
            self._waiting.remove(replica, counted, kv_tokens)

    def ended(self, request_id: Hashable, output_tokens: int | None = None) -> RoutedRequest:
        """Remove a request, and return it. `output_tokens`: length of a complete answer, which updates the
        estimate for later ones."""
        request, counted, replica, kv_tokens, is_running = self._open.pop(request_id)
        self._all.remove(replica, counted, kv_tokens)
        if not is_running:
            self._waiting.remove(replica, counted, kv_tokens)
        of_tenant = self._by_tenant[request.tenant]
        _count_down(of_tenant, replica)
        if not of_tenant:
            del self._by_tenant[request.tenant]
        if output_tokens is not None:
            self.answers.observe(output_tokens)
        return request

    def moved(self, request_id: Hashable, replica: int, num_output: int) -> RoutedRequest:
        """Count a request on another replica, which prefills its prompt and output so far again; return it
        with the output as part of its prompt. `num_output`: output tokens so far, on all replicas that it was
        on."""
        request = self.ended(request_id)
        self._send(request_id, request, replica, num_output)
        return self._open[request_id].counted

    def request(self, request_id: Hashable) -> RoutedRequest:
        """Return a request that has not ended, as it was first sent."""
        return self._open[request_id].request

    def requests_on(self, replica: int) -> list[tuple[Hashable, RoutedRequest]]:
        """Return all requests of a replica as they were first sent, in the order in which they came to it.
        Iterates over every request of the fleet."""
        return [
            (request_id, each.request) for request_id, each in self._open.items() if each.replica == replica
        ]

    def running(self) -> Iterator[tuple[Hashable, RoutedRequest, int]]:
        """Yield all requests that have a first token, as they were first sent, with their replicas. Iterates
        over every request of the fleet."""
        for request_id, each in self._open.items():
            if each.is_running:
                yield request_id, each.request, each.replica

    def in_flight(self, adapter: int) -> Mapping[int, int]:
        """Return the number of this adapter's requests by replica, for replicas that have any."""
        return self._all.by_adapter.get(adapter, _NO_REPLICAS)

    def waiting_on(self, adapter: int) -> Mapping[int, int]:
        """Return the number of this adapter's requests without a token by replica, for replicas that have
        any."""
        return self._waiting.by_adapter.get(adapter, _NO_REPLICAS)

    def of_tenant(self, tenant: str) -> Mapping[int, int]:
        """Return the number of a tenant's requests by replica, for replicas that have any."""
        return self._by_tenant.get(tenant, _NO_REPLICAS)

    def _count_tenant(self, tenant: str, replica: int) -> None:
        replicas = self._by_tenant.setdefault(tenant, {})
        replicas[replica] = replicas.get(replica, 0) + 1

    def with_one_more(self, request: RoutedRequest, replicas: IntArray) -> tuple[RequestSets, RequestSets]:
        """Return `everything` and `waiting` of these replicas, each in two rows: as it is, and as if the
        request were sent there. `replicas`: distinct and ascending. A result for all replicas is valid only
        until the next call."""
        adapter, rank, prompt_tokens, *_ = request
        is_all = len(replicas) == self.num_replicas
        kv_tokens = prompt_tokens + self.output_left(request)
        self._one_more[:] = (1, rank, 0, prompt_tokens, kv_tokens, adapter is not None)
        if is_all:
            answer = self._answer
            np.add(self._before, self._more, out=answer.rows)
        else:
            answer = _WithOneMore(self._table[:, :, np.newaxis, replicas] + self._more)
        if adapter is not None:
            np.maximum(answer.max_rank, float(rank), out=answer.max_rank)
            for column, columns in zip(answer.num_adapters, (self._all, self._waiting), strict=True):
                has = columns.by_adapter.get(adapter, _NO_REPLICAS)
                places = has if is_all else [n for n, each in enumerate(replicas) if each in has]
                for place in places:  # few replicas, on which it adds no adapter
                    column[place] -= 1.0
        return answer.everything, answer.waiting

    def with_replica(self, replica: int, limits: ReplicaLimits) -> FleetLoad:
        """Return the same load in a fleet with one more replica, or with a new one in place of one that has
        left. The new one accepts requests."""
        assert replica <= self.num_replicas, "numbers have no gaps"
        grown = FleetLoad([*self.limits[:replica], limits, *self.limits[replica + 1 :]], self.answers)
        grown.accepts[: self.num_replicas] = self.accepts
        grown.accepts[replica] = True
        grown._take_over(self)
        return grown

    def _take_over(self, other: FleetLoad) -> None:
        """Count all requests of another load too."""
        for request_id, each in other._open.items():
            self._open[request_id] = each
            self._all.add(each.replica, each.counted, each.kv_tokens)
            self._count_tenant(each.request.tenant, each.replica)
            if not each.is_running:
                self._waiting.add(each.replica, each.counted, each.kv_tokens)

    def replica(self, number: int) -> ReplicaLoad:
        everything, waiting = self._all, self._waiting
        num_waiting = int(waiting.num_requests[number])
        return ReplicaLoad(
            num_running=int(everything.num_requests[number]) - num_waiting,
            num_waiting=num_waiting,
            sum_ranks=int(everything.sum_ranks[number]),
            max_rank=int(everything.max_rank[number]),
            waiting_tokens=int(waiting.prompt_tokens[number]),
            kv_tokens_left=float(self.kv_capacity[number] - everything.kv_tokens[number]),
            adapters=frozenset(each for each, at in everything.by_adapter.items() if number in at),
        )

    def check_integrity(self) -> None:
        """Assert that the columns equal the sums over the open requests."""
        fresh = FleetLoad(self.limits)
        fresh._take_over(self)
        assert self._by_tenant == fresh._by_tenant
        assert self._all.by_adapter == fresh._all.by_adapter
        assert self._waiting.by_adapter == fresh._waiting.by_adapter
        for kept, counted in ((self.everything, fresh.everything), (self.waiting, fresh.waiting)):
            for name, column, expected in zip(RequestSets._fields, kept, counted, strict=True):
                # Sums of floats depend on the order of addition.
                same = np.allclose if name == "kv_tokens" else np.array_equal
                assert same(column, expected), (name, column, expected)
