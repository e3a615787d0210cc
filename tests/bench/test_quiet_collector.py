"""Measurements without garbage collection leave the process as it was."""

from __future__ import annotations

import gc
import weakref

from loraplex.bench.alternating import quiet_collector


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_during_a_measurement() -> None:
    assert gc.isenabled()
    with quiet_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_frozen_stays_frozen() -> None:
    num_frozen = gc.get_freeze_count()
    assert num_frozen > 0, "all that was collected (conftest.py)"
    with quiet_collector():
        assert gc.get_freeze_count() <= num_frozen
    assert num_frozen // 2 < gc.get_freeze_count() <= num_frozen


def test_what_lived_during_a_measurement_is_freed_later() -> None:
    cycle = Cycle()
    kept = weakref.ref(cycle)
    with quiet_collector():
        pass
    del cycle
    gc.collect()
    assert kept() is None
