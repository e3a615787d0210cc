"""When Python's garbage is collected in full: when few requests are in flight, so that nobody waits for it.

A full collection goes through every object that was made since the start, which is 0.1 ms for each request in
flight, and nothing else runs meanwhile. By Python's own rule there are several while a burst arrives, and
each takes longer than the one before. Collections of young objects go on by that rule: they are short
whatever is in flight, and free nearly all cycles.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

_NEVER: Final = 2**31 - 1
_DUE: Final = 10
"""Collections of the middle generation, each after some 7,000 objects that stayed: Python's own number."""
_LOOK_INTERVAL_S: Final = 1.0
_REQUESTS_PER_COLLECTION: Final = 8
"""Requests in flight that put a full collection off by one more of these. Their own objects are a third of
what that amounts to, so that only what outlives requests makes one due while many are in flight."""


def keep_all_made_until_now() -> None:
    """Take what exists out of garbage collection, and leave full collections to `collect_if_due`."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


def collect_if_due(num_in_flight: int) -> bool:
    """Collect in full if it is time for that with so many requests in flight; return whether it was."""
    if gc.get_count()[2] < _DUE + num_in_flight // _REQUESTS_PER_COLLECTION:
        return False
    gc.collect()
    return True


async def collect_while_serving(num_in_flight: Callable[[], int]) -> None:
    """Look every second whether a full collection is due, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_INTERVAL_S)
        collect_if_due(num_in_flight())
