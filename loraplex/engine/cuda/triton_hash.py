"""Triton's hash of itself, which is part of the key of every kernel in its cache on disk.

Triton hashes its own files for it, half a gigabyte, and caches the result in the process. Threads that need
it at the same time would all compute it.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()


def hash_triton() -> None:
    """Compute it, or wait for the thread that does. Imports Triton; does nothing if it is not installed."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    with _lock:
        triton_key()
