"""Copies numbers from and to pinned host memory by a kernel.

The device's copy engine executes one copy after the other, and may be busy with adapters for a while.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel

_BLOCK = 1024


@Kernel
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source"])
def _fetch(target, source, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


def fetch(target: torch.Tensor, pinned: torch.Tensor) -> None:
    """Copy pinned memory to the device; both must be contiguous and of one dtype. The caller must keep the
    pinned memory unchanged until the kernel has run: torch's allocator does not track this use, as it does
    for a copy."""
    _copy(target, pinned)


def send(pinned: torch.Tensor, source: torch.Tensor) -> None:
    """Copy from the device to pinned memory, which the caller must keep until the kernel has run (see
    `fetch`)."""
    _copy(pinned, source)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    assert target.is_contiguous()
    assert source.is_contiguous()
    assert (target.dtype, target.numel()) == (source.dtype, source.numel())
    target, source = _widened(target, source)
    count = target.numel()
    _fetch[(triton.cdiv(count, _BLOCK),)](target, source, count, BLOCK=_BLOCK)


def _widened(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same memory as elements of eight bytes, if it divides into these: few large elements are
    transferred faster than many small ones."""
    wide = torch.int64
    if any(each.nbytes % wide.itemsize or each.data_ptr() % wide.itemsize for each in (target, source)):
        return target, source
    return target.view(-1).view(wide), source.view(-1).view(wide)
