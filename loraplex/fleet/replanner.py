"""Places adapters again every period, by what was asked for in the last ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.fleet.adapter_table import AdapterTable
from loraplex.fleet.placements.demand import extrapolated_demand
from loraplex.fleet.placements.placement import Placement, PlacementProblem
from loraplex.fleet.plan import Plan

PERIOD_S: Final = 60.0
_NUM_PERIODS: Final = 5
"""The number of periods whose trend is continued."""


class Replanner:
    """Counts tokens by adapter, and asks a placement for a plan at the end of each period.

    Before anybody has asked for anything, all adapters are expected to be asked for alike.
    `known_demand`: tells the tokens/s of each adapter in the period that begins then, if that is known.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        adapters: AdapterTable,
        num_replicas: int,
        period_s: float = PERIOD_S,
        host_bytes: int | None = None,
        device_bytes: int | None = None,
        seed: int = 0,
        known_demand: Callable[[float], FloatArray] | None = None,
    ) -> None:
        """`period_s`: infinite for a placement that is made once and kept."""
        assert period_s > 0
        self.period_s = period_s
        self._placement = placement
        self._adapters = adapters
        self._num_replicas = num_replicas
        self._host_bytes = host_bytes
        self._device_bytes = device_bytes
        self._seed = seed
        self._known_demand = known_demand
        self._tokens: FloatArray = np.zeros(len(adapters))
        self._rates: deque[FloatArray] = deque(maxlen=_NUM_PERIODS)

    def count(self, adapter: int, num_tokens: int) -> None:
        self._tokens[adapter] += num_tokens

    def place(self, previous: Plan | None, *, since_s: float, now_s: float) -> Plan:
        """Return the plan of the period that begins now. Tokens counted since the last call came from
        `since_s` on, and are the latest history."""
        return self._placement.place(
            PlacementProblem(
                adapters=self._adapters,
                num_replicas=self._num_replicas,
                demand=self._demand(since_s, now_s, is_first=previous is None),
                host_bytes=self._host_bytes,
                device_bytes=self._device_bytes,
                previous=previous,
                seed=self._seed,
            )
        )

    def _demand(self, since_s: float, now_s: float, *, is_first: bool) -> FloatArray:
        """Return the tokens/s of each adapter that are expected in the period that begins now."""
        if self._known_demand is not None:
            return self._known_demand(now_s)
        if is_first:
            return np.ones(len(self._adapters))
        assert math.isfinite(self.period_s), "this placement is made once"
        assert since_s < now_s, "a rate is over some time"
        self._rates.append(self._tokens / (now_s - since_s))
        self._tokens = np.zeros(len(self._adapters))
        return extrapolated_demand(np.stack(self._rates))
