from __future__ import annotations

from loraplex.core.clock import ManualClock
from loraplex.server.restart_policy import CrashHistory, RestartPolicy


def test_the_delay_doubles_up_to_its_limit() -> None:
    history = CrashHistory(RestartPolicy(first_delay_s=1.0, max_delay_s=5.0, max_crashes=10), ManualClock())
    delays_s = [history.crashed(while_starting=False) for _ in range(5)]
    assert delays_s == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_too_many_crashes_within_the_window_end_it() -> None:
    clock = ManualClock()
    history = CrashHistory(RestartPolicy(max_crashes=3, window_s=60.0), clock)
    for _ in range(2):
        assert history.crashed(while_starting=False) is not None
        clock.advance(29.0)
    assert history.crashed(while_starting=False) is None


def test_crashes_far_apart_are_forgotten() -> None:
    clock = ManualClock()
    history = CrashHistory(RestartPolicy(first_delay_s=1.0, max_crashes=2, window_s=60.0), clock)
    for _ in range(20):
        assert history.crashed(while_starting=False) == 1.0
        history.started()
        clock.advance(60.0)


def test_slow_starts_that_fail_in_a_row_end_it_too() -> None:
    clock = ManualClock()
    history = CrashHistory(RestartPolicy(max_failed_starts=3, window_s=60.0), clock)
    assert history.crashed(while_starting=False) is not None
    for _ in range(2):
        clock.advance(120.0)
        assert history.crashed(while_starting=True) is not None
    clock.advance(120.0)
    assert history.crashed(while_starting=True) is None
