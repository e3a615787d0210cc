"""Other queues and other rules of admission, for trials in the twin (`benchmarks.policies`).

An order gives each request a place when it arrives, counted in arrivals: one that is sent back by 50 places
is overtaken by 50 later requests at the most, so that nobody starves and no clock is needed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from loraplex.scheduling import admission
from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.waiting_queue import WaitingQueue
from loraplex.twin.decode_group import blocks_ahead
from loraplex.twin.quick_scheduler import QuickScheduler
from loraplex.twin.twin_scheduler import TwinScheduler

MOST_OVERTAKING: Final = 64
"""Later requests that may overtake one, for most orders."""
_NUM_CLASSES: Final = 3
_MAX_PROMPT, _MAX_OUTPUT = 2048, 1024
_LARGEST_BYTES: Final = 700e6
"""The sizes that requests are compared with: tokens of prompts and answers, bytes of an adapter."""
_PROMPT_WEIGHT: Final = 0.4
"""Chameleon's weights: 0.4 for the prompt, 0.6 for the answer."""


class Order:
    """First come, first served."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table

    def place(self, request: RequestState, arrival: int) -> float:
        """Return where a request belongs that has just arrived, as number `arrival`."""
        return arrival

    def delay(self, request: RequestState) -> float:
        """Return by how much it has to stand back at the moment."""
        return 0.0


class ShortestRequest(Order):
    """Small requests first, by the size that Chameleon gives them."""

    def place(self, request: RequestState, arrival: int) -> float:
        return arrival + MOST_OVERTAKING * min(_size(request, self._table), 1.0)


class SizeClasses(Order):
    """Chameleon's queues: one for each class of sizes, which take turns by what they let in. The borders are
    those between thirds of the requests so far, and each class may let in as much as any other."""

    def __init__(self, table: AdapterTable) -> None:
        super().__init__(table)
        self._sizes: list[float] = []
        self._borders = [math.inf] * (_NUM_CLASSES - 1)
        self._ends = [0.0] * _NUM_CLASSES
        self._mean = 0.0

    def place(self, request: RequestState, arrival: int) -> float:
        size = _size(request, self._table)
        self._learn(size)
        number = sum(size > border for border in self._borders)
        # Fair queueing by start times: a class that let in more than its share stands back.
        start = max(float(arrival), self._ends[number])
        self._ends[number] = start + _NUM_CLASSES * size / max(self._mean, 1e-9)
        return min(start, arrival + MOST_OVERTAKING)

    def _learn(self, size: float) -> None:
        self._sizes.append(size)
        num_sizes = len(self._sizes)
        self._mean += (size - self._mean) / num_sizes
        if num_sizes % 50 == 0:
            ordered = sorted(self._sizes[-500:])
            self._borders = [ordered[len(ordered) * n // _NUM_CLASSES] for n in range(1, _NUM_CLASSES)]


class ResidentFirst(Order):
    """Requests whose adapter is in memory, or on its way there, before others."""

    def delay(self, request: RequestState) -> float:
        serving, version = self._table.serving, request.adapter
        is_there = version is None or version in serving.resident or version in serving.loading
        return 0.0 if is_there else MOST_OVERTAKING


def _size(request: RequestState, table: AdapterTable) -> float:
    """Return Chameleon's weighted request size, with the answer's length known ahead."""
    max_tokens = request.request.params.max_tokens or _MAX_OUTPUT
    tokens = _PROMPT_WEIGHT * request.num_prompt / _MAX_PROMPT
    tokens += (1 - _PROMPT_WEIGHT) * max_tokens / _MAX_OUTPUT
    num_bytes = 0 if request.adapter is None else table.num_bytes(request.adapter)
    return tokens * (1.0 + num_bytes / _LARGEST_BYTES)


class OrderedQueue(WaitingQueue):
    """A waiting queue in the order of `Order`. It is put in order whenever adapters are about to be brought
    in, which every decision begins with."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._arrivals = count()
        self._places: dict[RequestState, float] = {}

    def append(self, request: RequestState) -> None:
        self._places[request] = self._order.place(request, next(self._arrivals))
        super().append(request)

    def append_front(self, request: RequestState) -> None:
        self._places[request] = -math.inf
        super().append_front(request)

    def remove(self, request: RequestState) -> None:
        super().remove(request)
        del self._places[request]

    def first(self, count: int) -> Iterator[RequestState]:
        self._sort()
        return super().first(count)

    def _sort(self) -> None:
        before = list(self._requests)
        places, delay = self._places, self._order.delay
        after = sorted(before, key=lambda request: places[request] + delay(request))
        if after == before:
            return
        for position, request in enumerate(after):
            request.queue_position = position
        self._front, self._back = 0, len(after)
        self._requests = OrderedDict.fromkeys(after)
        self._on_base = OrderedDict.fromkeys(each for each in after if each.adapter is None)


class Admission:
    """The shipped rule: a request is let in when there is memory for all that it has to compute, beside what
    was promised to those that run."""

    def promised(
        self, request: RequestState, running: list[RequestState], num_promised: int, scheduler: TrialScheduler
    ) -> int:
        """Return the blocks that must be left for others; `num_promised`: by the shipped rule."""
        return num_promised


class FirstChunk(Admission):
    """There must be memory for the first chunk."""

    def promised(
        self, request: RequestState, running: list[RequestState], num_promised: int, scheduler: TrialScheduler
    ) -> int:
        return -scheduler.blocks_for(len(request.token_ids))


class RoomToGrow(Admission):
    """A block more for everyone."""

    def promised(
        self, request: RequestState, running: list[RequestState], num_promised: int, scheduler: TrialScheduler
    ) -> int:
        return num_promised + 1 + len(running)


class WholeAnswer(Admission):
    """There must be memory for a share of all tokens to come, whose number is known ahead."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share

    def promised(
        self, request: RequestState, running: list[RequestState], num_promised: int, scheduler: TrialScheduler
    ) -> int:
        ahead = sum(scheduler.blocks_ahead(each) for each in (*running, request))
        own = scheduler.blocks_for(len(request.token_ids))
        return num_promised + int(self._share * max(ahead - num_promised - own, 0))


class TrialScheduler(TwinScheduler):
    """The twin's scheduler with another order of requests, or another rule of admission."""

    def admit_by(self, order: Callable[[AdapterTable], Order] | None, rule: Admission | None) -> None:
        """Before any request came. None: as shipped."""
        if order is not None:
            self._waiting = self._queues.waiting = OrderedQueue(order(self._table))
        trial = _TrialAdmission(
            *(self._config, self._memory, self.batcher, self.adapters),
            *(self._queues, self._pressure, self._swapping, self._borrowing),
        )
        trial.rule, trial.scheduler = rule or Admission(), self
        self._admission = trial

    def blocks_for(self, num_tokens: int) -> int:
        return self._pool.blocks_for(num_tokens)

    def blocks_ahead(self, request: RequestState) -> int:
        return blocks_ahead(request, self._pool, self._config.max_model_len)


class _TrialAdmission(admission.Admission):
    rule: Admission
    scheduler: TrialScheduler

    def _start(self, sequence: RequestState, budget: float, num_promised: int) -> int:
        num_promised = self.rule.promised(sequence, self._running, num_promised, self.scheduler)
        return super()._start(sequence, budget, num_promised)


class QuickTrialScheduler(TrialScheduler, QuickScheduler):
    """The same where no contents are kept."""
