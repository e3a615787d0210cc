"""Gives the memory of a device back, for scripts that build one engine after the other."""

from __future__ import annotations

import gc

import torch


def release() -> None:
    """Free what was dropped: the next engine takes what the device has left.

    The caller must hold no reference to the engine that was closed, nor to any part of it. Parts refer to
    each other, so memory waits for the garbage collector; and torch keeps what is freed until it is told not
    to.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
