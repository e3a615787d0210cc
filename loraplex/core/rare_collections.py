"""Makes Python collect garbage rarely while a process starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_YOUNG_OBJECTS: Final = 100_000
"""Number of new objects after which the youngest are collected; Python's default is 700."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect garbage rarely inside the context, and as before afterwards.

    A start imports modules and makes hundreds of thousands of objects that stay: traversing them again and
    again takes a twentieth of the start and frees little. Garbage that does come up is still collected.
    """
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
