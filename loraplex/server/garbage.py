"""Run Python's full garbage collections when few requests are in flight, so that none is delayed.

A full collection traverses every object made since the start, which takes 0.1 ms for each request in flight,
and nothing else runs meanwhile. By Python's own rule there are several while a burst arrives, each longer
than the one before. Collections of young objects keep that rule: they are always short, and free nearly all
cycles.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

_NEVER: Final = 2**31 - 1
_DUE: Final = 10
"""Number of middle-generation collections, each after some 7,000 surviving objects, that make a full one due:
Python's default."""
_LOOK_INTERVAL_S: Final = 1.0
_REQUESTS_PER_COLLECTION: Final = 8
"""Requests in flight that postpone a full collection by one more middle-generation collection. Their own
objects account for a third of one, so only objects that outlive requests make a full collection due while
many are in flight."""


def keep_all_made_until_now() -> None:
    """Exclude all existing objects from garbage collection, and leave full collections to
    `collect_if_due`."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


def collect_if_due(num_in_flight: int) -> bool:
    """Run a full collection if one is due with this many requests in flight; return whether it ran."""
    if gc.get_count()[2] < _DUE + num_in_flight // _REQUESTS_PER_COLLECTION:
        return False
    gc.collect()
    return True


async def collect_while_serving(num_in_flight: Callable[[], int]) -> None:
    """Check every second whether a full collection is due, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_INTERVAL_S)
        collect_if_due(num_in_flight())
