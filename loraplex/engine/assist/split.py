"""Which rows of a task each worker computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

_MAX_WORKERS: Final = 16
_MIN_CORES: Final = 4
_TIME_SLACK: Final = 1.25


def default_num_workers(num_cores: int) -> int:
    """Half of the cores: the engine and its loaders need the others. None on a machine with few."""
    return 0 if num_cores < _MIN_CORES else min(num_cores // 2, _MAX_WORKERS)


def split_rows(num_rows: int, ready: Sequence[bool], rows_each: int) -> list[int]:
    """Boundaries between slots' rows, one more than there are slots. Slots that are not ready get none.

    No worker gets fewer than `rows_each` rows if a single one could do them in about the same time; the
    rows of those that take part differ by one at most.
    """
    assert min(num_rows, rows_each) > 0
    assert any(ready)
    num_parts = min(sum(ready), -(-num_rows // rows_each))
    bounds, taken = [0], 0
    for is_ready in ready:
        taken += is_ready and taken < num_parts
        bounds.append(num_rows * taken // num_parts)
    return bounds


def rows_worth_a_core(times_us: Mapping[int, float]) -> int:
    """From how long one core takes for so many rows: the most that take it hardly longer than the fewest.

    Below that a core reads weights rather than computes, and another core would read them once more.
    """
    fewest = min(times_us)
    return max(rows for rows, time_us in times_us.items() if time_us <= _TIME_SLACK * times_us[fewest])
