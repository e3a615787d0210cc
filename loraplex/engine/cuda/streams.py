"""Streams and events of a CUDA device.

On a CPU, where tests interpret the kernels, a launch returns when it is done: there are no streams, and
nothing waits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def use_device(device: torch.device) -> None:
    """Make a device the current one of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # any runtime call: before one, driver calls fail


class Moment:
    """A point in a stream, by default the current one; it passes when everything launched before is done."""

    def __init__(
        self, device: torch.device, *, timed: bool = False, stream: torch.cuda.Stream | None = None
    ) -> None:
        """`timed`: `seconds_since` can measure from and to it."""
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            self.event.record(stream)

    @property
    def passed(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Moment) -> float | None:
        """Return the seconds since an earlier timed moment, once both have passed; None on a CPU."""
        if self.event is None or earlier.event is None:
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1e3

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def hold_back(self) -> None:
        """Make everything launched on the current stream from now on run after it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class SideStream:
    """A stream beside the one that steps run on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.handle: int | None = None
        """The driver's handle; None where there is no stream."""
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.handle = self._stream.cuda_stream

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which launches go to this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def moment(self) -> Moment:
        """Return the timed moment at which everything launched here so far is complete."""
        return Moment(self._device, timed=True, stream=self._stream)

    def wait_for(self, moment: Moment) -> None:
        """Make everything launched here from now on run after a moment of another stream."""
        if self._stream is not None and moment.event is not None:
            self._stream.wait_event(moment.event)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
