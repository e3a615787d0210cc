"""A step's few numbers, copied between host and device by kernels, not by the copy engine.

The copy engine makes one copy after the other, and may be busy with adapters or with keys and values for many
steps; kernels read and write pinned host memory beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loraplex.engine.cuda.streams import Moment
from loraplex.kernels.triton.fetch import fetch, send


class SmallCopies:
    """Copies on the current stream. Pinned memory is kept until `take_kept` hands it to the caller, who keeps
    it until the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[torch.Tensor] = []

    def integers(self, values: Sequence[Any]) -> torch.Tensor:
        """Return integers on the device."""
        return self.to_device(torch.tensor(values, dtype=torch.int64))

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy, without waiting for anything launched before. Elements must have eight bytes, so
        that one kernel copies all of them."""
        if self._device.type != "cuda":
            return host.to(self._device)
        pinned = host.pin_memory()
        self._kept.append(pinned)
        on_device = torch.empty_like(host, device=self._device)
        fetch(on_device.view(torch.int64), pinned.view(torch.int64))
        return on_device

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """Return pinned memory that has the numbers as soon as everything launched so far is done."""
        if self._device.type != "cuda":
            return source.clone()
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._kept.append(pinned)
        if source.numel() > 0:
            send(pinned, source.contiguous())
        return pinned

    def to_host_now(self, source: torch.Tensor) -> torch.Tensor:
        """Wait for everything launched so far, and return the numbers."""
        host = self.to_host(source)
        Moment(self._device).wait()
        return host

    def take_kept(self) -> list[torch.Tensor]:
        """Return the memory that copies launched since the last call use."""
        kept, self._kept = self._kept, []
        return kept
