"""Frees a device's memory, for scripts that build one engine after the other."""

from __future__ import annotations

import gc

import torch


def release() -> None:
    """Free unreferenced memory: the next engine takes what the device has left.

    The caller must hold no reference to the closed engine or any part of it. Parts refer to each other, so
    their memory is freed by the garbage collector only; and torch keeps freed memory until its cache is
    emptied.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
