"""Other start policies, for trials in the twin (`benchmarks.policies`).

The engine of these trials has no CPU workers, as its bus is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from benchmarks.policy_queues import MOST_OVERTAKING, Order
from loraplex.core.cold_start import ColdStart
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.start_policy import InFlight, StartPolicy

Starts = Callable[[DriftWatch], StartPolicy]
_LARGEST_BYTES: Final = 700e6
"""The size of an adapter that is sent back as far as any."""


def always(costs: DriftWatch) -> StartPolicy:
    """Join at once, whatever it delays."""
    return StartPolicy(ColdStart.PIPELINED, costs)


def never(costs: DriftWatch) -> StartPolicy:
    """Wait for the whole adapter."""
    return StartPolicy(ColdStart.OVERLAP, costs)


class NoDecodeStall(StartPolicy):
    """Join a step with decodes only if that does not delay them at all."""

    max_decode_stall = 0.0


class LongDecodeStall(StartPolicy):
    """Join if the step takes at most a fifth longer."""

    max_decode_stall = 0.2


class GainAgainstDelays(StartPolicy):
    """Join if the delay of the others, decodes by their weight, is at most the wait that this saves."""

    def gained_bytes(self, before: InFlight, after: InFlight) -> int:
        return after.num_bytes - before.num_bytes


class HeavyDecodes(GainAgainstDelays):
    """Count a delay of a decode as much as one of a first token."""

    decode_weight = 1.0


def by(kind: type[StartPolicy]) -> Starts:
    """Return the function that makes `auto` by this class."""
    return lambda costs: kind(ColdStart.AUTO, costs)


class ShortestLoad(Order):
    """Put requests whose adapter is absent back by the bytes to load."""

    def place(self, request: RequestState, arrival: int) -> float:
        version = request.adapter
        if version is None or not self._table.is_absent(version):
            return arrival
        return arrival + math.floor(
            MOST_OVERTAKING * min(self._table.num_bytes(version) / _LARGEST_BYTES, 1.0)
        )
