"""Copies slowed down to a rate, to measure what a slower bus would do (`engine.cuda.bus`)."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel


@triton.jit
def _now_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@Kernel
@triton.jit
def _begin(free_at_ns):
    tl.store(free_at_ns, tl.maximum(tl.load(free_at_ns), _now_ns()))


@Kernel
@triton.jit(do_not_specialize=["duration_ns"])
def _end(free_at_ns, duration_ns):
    until_ns = tl.load(free_at_ns) + duration_ns
    tl.store(free_at_ns, until_ns)
    while _now_ns() < until_ns:
        pass


class Pace:
    """A stream's copies at a given rate: from `begin` to `end` no less time passes than they take at it."""

    def __init__(self, bytes_per_s: float, device: torch.device) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_ns = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Call before copies are put on the current stream."""
        _begin[(1,)](self._free_at_ns, num_warps=1)

    def end(self, num_bytes: int) -> None:
        """Call after them."""
        _end[(1,)](self._free_at_ns, round(num_bytes / self._bytes_per_s * 1e9), num_warps=1)
