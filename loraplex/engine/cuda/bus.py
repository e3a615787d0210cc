"""Copies from the host to the device, one after the other beside the steps, with numbers.

The number of the last ones that are complete stands in the device's own memory: a step may wait there for a
copy that was launched before it (`kernels.triton.gate`), and no thread of the host waits for anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from loraplex.engine.cuda.streams import Moment, SideStream

_MAX_UNDER_WAY: Final = 1 << 16
"""Numbers that may be on their way at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """From pinned memory of the host."""

    target: torch.Tensor
    source: torch.Tensor


class Bus:
    """Used by one thread. `ticket_1`: the number of the last copy that is complete."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = SideStream(device)
        self.ticket_1 = torch.zeros(1, dtype=torch.int64, device=device)
        numbers = torch.zeros(_MAX_UNDER_WAY, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers, self._writable = numbers, numbers.numpy()
        self._last = 0

    def wait_for(self, moments: Iterable[Moment]) -> None:
        """What is carried from now on comes after these, of other streams."""
        for moment in moments:
            self._stream.wait_for(moment)

    def carry(self, copies: Iterable[Copy]) -> int:
        """Copy in this order; returns at once, with their number."""
        with self._stream.entered():
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
            return self._publish()

    def moment(self) -> Moment:
        """When all that was launched so far is complete."""
        with self._stream.entered():
            return Moment(self._device, timed=True)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _publish(self) -> int:
        """Behind the copies launched so far, tell the device of them. A copy as well: it waits for no
        multiprocessor to be free."""
        self._last += 1
        place = self._last % _MAX_UNDER_WAY
        self._writable[place] = self._last
        self.ticket_1.copy_(self._numbers[place : place + 1], non_blocking=True)
        return self._last
