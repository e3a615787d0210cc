"""Returns freed memory to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def release_free_memory() -> None:
    """Return free pages of the C heap to the system, where its allocator (glibc) can.

    A large text becomes millions of small allocations, whose pages the allocator would otherwise keep. Takes
    milliseconds, without the GIL.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
