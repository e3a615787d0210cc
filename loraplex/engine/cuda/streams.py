"""Streams and events of a CUDA device.

On a CPU, where tests interpret the kernels, everything is done by the time it is launched: a stream is
nothing, and there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A stream beside the one that steps run on."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[object]:
        """Within it, launches go to this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def record_event(device: torch.device) -> Callable[[], None]:
    """Mark this moment of the current stream; the function returned waits for it."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


def keep_until_done(tensor: torch.Tensor) -> None:
    """Before the last reference goes: no one gets the memory while launched steps may read it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
