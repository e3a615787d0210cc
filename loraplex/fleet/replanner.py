"""Places adapters again every period, by what was asked for in the last ones."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.fleet.adapter_table import AdapterTable
from loraplex.fleet.placements.demand import extrapolated_demand
from loraplex.fleet.placements.placement import Placement, PlacementProblem
from loraplex.fleet.plan import Plan

PERIOD_S: Final = 60.0
_NUM_PERIODS: Final = 5
"""Whose trend is continued."""


class Replanner:
    """Counts tokens by adapter, and asks a placement for a plan at the end of each period.

    Before anybody has asked for anything, all adapters are expected to be asked for alike.
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
        self._tokens: FloatArray = np.zeros(len(adapters))
        self._rates: deque[FloatArray] = deque(maxlen=_NUM_PERIODS)

    def count(self, adapter: int, num_tokens: int) -> None:
        self._tokens[adapter] += num_tokens

    def place(self, previous: Plan | None) -> Plan:
        """Return the plan of the next period. Tokens counted since the last call are the latest history."""
        if previous is None:
            demand = np.ones(len(self._adapters))
        else:
            assert math.isfinite(self.period_s), "this placement is made once"
            self._rates.append(self._tokens / self.period_s)
            demand = extrapolated_demand(np.stack(self._rates))
            self._tokens = np.zeros(len(self._adapters))
        return self._placement.place(
            PlacementProblem(
                adapters=self._adapters,
                num_replicas=self._num_replicas,
                demand=demand,
                host_bytes=self._host_bytes,
                device_bytes=self._device_bytes,
                previous=previous,
                seed=self._seed,
            )
        )
