"""Splits a LoRA task among CPU workers: each computes some rows of some parts.

Parts are split first, as each has weights of its own to read; then the rows of a part, as far as that pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_MAX_WORKERS: Final = 16
_MIN_CORES: Final = 4
_TIME_SLACK: Final = 1.25
MAX_SPANS: Final = 4
"""Prompts of one step that workers assist with."""
ROW_ALIGNMENT: Final = 16
"""Rows that matrix tiles compute at once."""
ROWS_EACH: Final = 32
"""Rows that are worth a core where it was not measured: those of a tile of the product by torch."""


class Share(NamedTuple):
    """Rows [start, end) of parts [first_part, end_part)."""

    start: int = 0
    end: int = 0
    first_part: int = 0
    end_part: int = 0


def default_num_workers(num_cores: int) -> int:
    """Return half of the cores: the engine and its loaders need the others, and two hardware threads of one
    core share its matrix tiles. None on a machine with few cores."""
    return 0 if num_cores < _MIN_CORES else min(num_cores // 2, _MAX_WORKERS)


def split_task(num_rows: int, parts: Sequence[int], ready: Sequence[bool], rows_each: int) -> list[Share]:
    """Return the share of each slot; slots that are not ready get none. `parts`: those with anything to
    compute, in rising order. No worker gets fewer than `rows_each` rows if another could take them too."""
    assert min(num_rows, rows_each) > 0
    shares, workers = [Share()] * len(ready), [slot for slot, is_ready in enumerate(ready) if is_ready]
    assert workers
    num_groups = min(len(parts), len(workers))
    for group in range(num_groups):
        own = parts[len(parts) * group // num_groups : len(parts) * (group + 1) // num_groups]
        slots = workers[len(workers) * group // num_groups : len(workers) * (group + 1) // num_groups]
        num_slices = min(len(slots), -(-num_rows // rows_each))
        step = -(-num_rows // (num_slices * ROW_ALIGNMENT)) * ROW_ALIGNMENT
        for slot, start in zip(slots, range(0, num_rows, step), strict=False):
            shares[slot] = Share(start, min(start + step, num_rows), own[0], own[-1] + 1)
    return shares


def rows_worth_a_core(times_us: Mapping[int, float]) -> int:
    """Return the most rows that take one core hardly longer than the fewest; `times_us` by rows.

    With fewer a core reads weights rather than computes, and another core would read them once more.
    """
    fewest = min(times_us)
    return max(rows for rows, time_us in times_us.items() if time_us <= _TIME_SLACK * times_us[fewest])
