"""Waits on the device for weights that are still being copied to it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel


@Kernel
@triton.jit(do_not_specialize=["place"], do_not_specialize_on_alignment=["wanted"])
def _wait(ticket, wanted, place):
    last = tl.load(wanted + place)
    seen = tl.load(ticket, volatile=True)
    while seen < last:
        seen = tl.load(ticket, volatile=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Waits for copies. `ticket_1`: the number of the last complete copy; copies are numbered in order.
    `wanted_G`: number of the copy after which the step has the adapters' tables, then of the copy after which
    it has each layer; 0 for none.

    Only for copies that were launched before the step, so that it cannot wait for ever. One program polls,
    and copies need no multiprocessor, so it does not hold them up.
    """

    ticket_1: torch.Tensor
    wanted_G: torch.Tensor

    def await_tables(self) -> None:
        """Make everything launched on this stream from now on wait for the adapters' tables."""
        _wait[(1,)](self.ticket_1, self.wanted_G, 0)

    def await_layer(self, layer: int) -> None:
        """Make everything launched on this stream from now on wait for a layer's weights."""
        _wait[(1,)](self.ticket_1, self.wanted_G, 1 + layer)
