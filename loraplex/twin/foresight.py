"""The future demand of a known workload, for the oracle's planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.workload.jsonl import WorkloadRequest

AHEAD_S: Final = 60.0
"""Seconds that an oracle sees ahead."""


class Foresight:
    """The tokens of every adapter over time. `workload`: in the order of arrival."""

    def __init__(self, workload: Sequence[WorkloadRequest], num_adapters: int) -> None:
        self._arrival_s = np.array([each.arrival_s for each in workload])
        self._adapters = np.array([each.adapter for each in workload], np.int64)
        self._tokens = np.array([each.prompt_tokens + each.output_tokens for each in workload], np.float64)
        self._num_adapters = num_adapters

    def demand(self, now_s: float) -> FloatArray:
        """Return the prompt and output tokens/s requested of each adapter in the next minute."""
        first, last = np.searchsorted(self._arrival_s, (now_s, now_s + AHEAD_S)).tolist()
        asked = slice(first, last)
        tokens = np.bincount(self._adapters[asked], self._tokens[asked], minlength=self._num_adapters)
        return tokens.astype(np.float64) / AHEAD_S
