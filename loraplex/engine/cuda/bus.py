"""Copies from the host to the device, one after the other beside the steps, with numbers.

The number of the last ones that are complete stands in the device's own memory: a step may wait there for a
copy that was launched before it (`kernels.triton.gate`), and no thread of the host waits for anything.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import torch

from loraplex.engine.cuda import driver
from loraplex.engine.cuda.streams import Moment, SideStream


class Stretch(NamedTuple):
    """Bytes of the host's memory, pinned if copies are to run beside the steps."""

    address: int
    num_bytes: int


class Copy(NamedTuple):
    """To an address of the device. By addresses, as tensors would take longer to make than to copy."""

    target: int
    source: Stretch


class Bus:
    """Used by one thread. `ticket_1`: the number of the last copy that is complete."""

    def __init__(self, device: torch.device) -> None:
        self._stream = SideStream(device)
        self.ticket_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._ticket = self.ticket_1.data_ptr()
        self._last = -1
        self._publish()  # a device or a driver that cannot do it says so now

    def wait_for(self, moments: Iterable[Moment]) -> None:
        """What is carried from now on comes after these, of other streams."""
        for moment in moments:
            self._stream.wait_for(moment)

    def carry(self, copies: Iterable[Copy]) -> int:
        """Copy in this order; returns at once, with their number."""
        for target, source in copies:
            if source.num_bytes > 0:
                self._copy(target, source.address, source.num_bytes)
        return self._publish()

    def moment(self) -> Moment:
        """When all that was launched so far is complete; timed."""
        return self._stream.moment()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _publish(self) -> int:
        """Behind the copies launched so far, tell the device of them: by the stream itself, for which no
        multiprocessor has to be free."""
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
