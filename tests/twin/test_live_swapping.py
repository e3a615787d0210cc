"""Fed with the times that a live engine with a host tier took, the twin swaps what that engine swapped."""

from __future__ import annotations

import random

import pytest
from live_runs import Traffic, run_both
from swapping_engines import CPU, SwappingExecutor, plain_engine
from twins import imagined_machine

from loraplex.bench.random_engine import random_specs
from loraplex.core.clock import ManualClock
from loraplex.engine.cuda.streams import Moment, SideStream
from loraplex.perf.drift import DriftWatch


class LaterMoment(Moment):
    def __init__(self, clock: ManualClock, passes_s: float) -> None:
        super().__init__(CPU)
        self._clock = clock
        self._passes_s = passes_s

    @property
    def passed(self) -> bool:
        return self._clock.now_s() >= self._passes_s


class SlowStream(SideStream):
    """Everything that is launched together takes some milliseconds of a clock, one after another."""

    def __init__(self, clock: ManualClock, seed: int) -> None:
        super().__init__(CPU)
        self._clock = clock
        self._random = random.Random(seed)
        self._free_s = 0.0

    def moment(self) -> LaterMoment:
        self._free_s = max(self._free_s, self._clock.now_s()) + self._random.uniform(0.0, 10e-3)
        return LaterMoment(self._clock, self._free_s)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_twin_swaps_what_the_live_engine_swapped(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured times would correct the live engine's predictions, which the twin does not measure."""
    monkeypatch.setattr(DriftWatch, "observe", lambda *_, **__: False)
    specs = random_specs("q", "tiny", num_adapters=5, ranks=[4, 8, 6, 4, 2], modules="q")
    engine = plain_engine(12, 12, specs, runs_ahead=runs_ahead, costs=DriftWatch(imagined_machine()))
    assert isinstance(engine._executor, SwappingExecutor)
    kv_swap, clock = engine._executor.kv_swap, ManualClock()
    kv_swap._out, kv_swap._in = SlowStream(clock, seed=1), SlowStream(clock, seed=2)
    live, replayed, outcome = run_both(
        engine,
        [spec.version for spec in specs],
        Traffic(num_requests=20, within_s=0.1, most_prompt=30, most_output=90),
        runs_ahead=runs_ahead,
        clock=clock,
    )
    assert replayed == live
    stats = engine.stats()
    assert outcome.num_preemptions == stats.num_preemptions
    assert outcome.num_swapped_out == stats.kv_blocks_swapped_out
    assert outcome.num_swapped_in == stats.kv_blocks_swapped_in
    # What the run has to show, or the test shows little.
    assert stats.num_preemptions > 5
    assert sum(len(each.swap_outs) for each in live) > 5
    assert sum(len(each.swap_ins) for each in live) > 5
