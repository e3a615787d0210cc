"""Costs of a machine on which merging pays, for engines that would otherwise go by guesses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from loraplex.engine import core as engine_core
from loraplex.engine import cpu_build
from loraplex.engine.profile_subject import known_costs
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.line import Line


def costs_that_merge(*args: Any) -> CostModel:
    """Return costs by which merging takes no time, and adapters cost more than anything else."""
    costs = known_costs(*args)
    terms = replace(costs.step.terms, lora_s=0.1)
    return replace(costs, merge=Line(latency_s=0.0, unit_s=0.0), step=replace(costs.step, terms=terms))


class _TickingClock:
    """A clock that goes on by a millisecond whenever it is read, however busy the machine is."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 1e-3
        return self._now_s


@contextmanager
def cheap_merges() -> Iterator[None]:
    """Let engines that are built meanwhile decide by these costs, neither corrected by what they measure nor
    by how long steps really take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_build, "known_costs", costs_that_merge)
        patch.setattr(DriftWatch, "observe", lambda *_, **__: False)
        patch.setattr(engine_core, "MonotonicClock", _TickingClock)
        yield
