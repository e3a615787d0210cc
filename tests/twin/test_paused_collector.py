"""The garbage collector is paused while a simulation runs, and only then."""

from __future__ import annotations

import gc
import weakref

import pytest

from loraplex.twin.paused_collector import paused_collector


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_collector_goes_on_after_an_error() -> None:
    def fail() -> None:
        with paused_collector():
            assert not gc.isenabled()
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        fail()
    assert gc.isenabled()


def test_cycles_that_were_dropped_inside_are_freed_at_the_end() -> None:
    with paused_collector():
        alive = weakref.ref(Ring())
        assert alive() is not None
    assert alive() is None


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
