"""Numbered copies from the host to the device, one after the other, beside the steps.

The number of the last complete copy is in device memory: a step may wait there for a copy that was launched
before it (`kernels.triton.gate`), so that no thread of the host has to wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from loraplex.engine.cuda import driver
from loraplex.engine.cuda.streams import Moment, SideStream
from loraplex.kernels.triton.pace import Pace


class Stretch(NamedTuple):
    """A range of host memory, pinned if copies are to run beside the steps."""

    address: int
    num_bytes: int


class Copy(NamedTuple):
    """A copy to a device address, in plain numbers: making tensors would take longer than copying."""

    target: int
    source: Stretch


class Bus:
    """Launches numbered copies; used by one thread. `ticket_1`: the number of the last complete copy."""

    def __init__(self, device: torch.device, max_bytes_per_s: float | None = None) -> None:
        """`max_bytes_per_s`: a rate to slow copies down to, for comparison."""
        self._stream = SideStream(device)
        self._pace = None
        if max_bytes_per_s is not None and self._stream.handle is not None:
            self._pace = Pace(max_bytes_per_s, device)
        self.ticket_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._ticket = self.ticket_1.data_ptr()
        self._last = -1
        self._publish()  # raises now if the device or its driver cannot do it

    def wait_for(self, moments: Iterable[Moment]) -> None:
        """Make copies that are launched from now on wait for these moments of other streams."""
        for moment in moments:
            self._stream.wait_for(moment)

    def carry(self, copies: Iterable[Copy]) -> int:
        """Launch copies in this order. Return their number at once."""
        if self._pace is not None:
            return self._carry_slowly(list(copies), self._pace)
        for target, source in copies:
            if source.num_bytes > 0:
                self._copy(target, source.address, source.num_bytes)
        return self._publish()

    def moment(self) -> Moment:
        """Return the moment, with its time, at which all copies launched so far are complete."""
        return self._stream.moment()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _carry_slowly(self, copies: Sequence[Copy], pace: Pace) -> int:
        with self._stream.entered():
            pace.begin()
            for target, source in copies:
                self._copy(target, source.address, source.num_bytes)
            pace.end(sum(source.num_bytes for _, source in copies))
        return self._publish()

    def _publish(self) -> int:
        """Publish the copies launched so far once they are complete, and return their number. The stream
        itself writes it, so that no multiprocessor has to be free."""
        self._last += 1
        if self._stream.handle is None:
            self.ticket_1.fill_(self._last)
        else:
            driver.write_word(self._ticket, self._last, self._stream.handle)
        return self._last

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        if self._stream.handle is None:
            ctypes.memmove(target, source, num_bytes)
        else:
            driver.copy_to_device(target, source, num_bytes, self._stream.handle)
