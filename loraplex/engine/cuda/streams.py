"""Streams and events of a CUDA device.

On a CPU, where tests interpret the kernels, everything is done by the time it is launched: a stream is
nothing, and there is nothing to wait for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def use_device(device: torch.device) -> None:
    """From now on this thread's calls are about that device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # any call to the runtime: only that makes the driver's calls work


class Moment:
    """A moment of a stream, the current one if none is named: all that was launched on it before."""

    def __init__(
        self, device: torch.device, *, timed: bool = False, stream: torch.cuda.Stream | None = None
    ) -> None:
        """`timed`: it can be told how long after another such one it came."""
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            self.event.record(stream)

    @property
    def passed(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Moment) -> float | None:
        """When both have passed; None where nothing takes time."""
        if self.event is None or earlier.event is None:
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1e3

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def hold_back(self) -> None:
        """What is launched on the current stream from now on runs after it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class SideStream:
    """A stream beside the one that steps run on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.handle: int | None = None
        """As the driver knows it; None where there is no stream."""
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.handle = self._stream.cuda_stream

    def entered(self) -> AbstractContextManager[object]:
        """Within it, launches go to this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def moment(self) -> Moment:
        """When all that was launched here so far is complete; timed."""
        return Moment(self._device, timed=True, stream=self._stream)

    def wait_for(self, moment: Moment) -> None:
        """What is launched here from now on runs after it."""
        if self._stream is not None and moment.event is not None:
            self._stream.wait_event(moment.event)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
