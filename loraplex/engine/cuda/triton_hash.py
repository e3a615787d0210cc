"""Triton's hash of itself, which is a part of the key of every kernel that it keeps on disk.

Triton hashes its own files for it, half a gigabyte, and keeps the result for as long as the process lives.
Threads that come to need it at the same time would all compute it.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()


def hash_triton() -> None:
    """Have it computed, or wait for the thread that does so. Imports Triton; nothing if that is not here."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        return
    with _lock:
        triton_key()
