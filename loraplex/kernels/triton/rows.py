"""Row-wise kernels: norm, residual add with norm, gated activation.

Shapes: T rows of the batch, H hidden size, F feed-forward size, N heads. The last dimension of every input is
contiguous; the others may be strided. Arithmetic is float32 and rounded to the tensors' type where plain
torch rounds, so that the results are those of the reference models.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel

# Eight 16-bit elements are one 16-byte load, the widest a thread can make.
_ELEMENTS_PER_THREAD = 8
_MAX_WARPS = 16
# Short rows (heads) share a program until it has this many elements.
_NORM_TILE = 1024
_SILU_TILE = 1024


def rms_norm(x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm over the last dimension of (T, H) or (T, N, H), a new contiguous tensor."""
    assert x.stride(-1) == 1
    size = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.shape[0] * inner
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _NORM_TILE // block_size)
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x,
        weight_H,
        out,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        num_rows,
        eps,
        INNER=inner,
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=_num_warps(block_rows * block_size),
    )
    return out


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to residual in place; return the norm of the sum."""
    assert x_TH.stride(1) == 1
    assert residual_TH.stride(1) == 1
    num_rows, size = x_TH.shape
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    block_size = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_rows,)](
        x_TH,
        residual_TH,
        weight_H,
        out_TH,
        x_TH.stride(0),
        residual_TH.stride(0),
        eps,
        SIZE=size,
        BLOCK_SIZE=block_size,
        num_warps=_num_warps(block_size),
    )
    return out_TH


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of a stacked (gate, up)."""
    assert gate_up_T2F.stride(1) == 1
    num_rows, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty(num_rows, size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(size, _SILU_TILE))](
        gate_up_T2F,
        out_TF,
        gate_up_T2F.stride(0),
        SIZE=size,
        TILE=_SILU_TILE,
        num_warps=_num_warps(_SILU_TILE),
    )
    return out_TF


def _num_warps(num_elements: int) -> int:
    """Return the number of warps, a power of two because both bounds and the number of elements are."""
    return min(max(num_elements // (32 * _ELEMENTS_PER_THREAD), 1), _MAX_WARPS)


@triton.jit
def _normalise(x32, weight, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Divide rows of x32, zero beyond SIZE, by their root mean square, and round before multiplying the
    weight."""
    variance = tl.sum(x32 * x32, axis=1) / SIZE
    normed = (x32 * tl.rsqrt(variance + eps)[:, None]).to(dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)[None, :]).to(dtype)


# The number of rows differs from step to step: do not specialise the kernel on it.
@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    stride_outer,
    stride_inner,
    num_rows,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Normalise rows; row r of the (outer, inner) rows is at outer * stride_outer + inner * stride_inner."""
    dtype: tl.constexpr = out.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_SIZE)
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    starts = rows // INNER * stride_outer + rows % INNER * stride_inner
    x32 = tl.load(x + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0)
    result = _normalise(x32, weights, eps, SIZE, dtype)
    tl.store(out + (rows * SIZE)[:, None] + columns[None, :], result, mask=inside)


@Kernel
@triton.jit
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    stride_x,
    stride_residual,
    eps,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    inside = columns < SIZE
    residuals = residual + row * stride_residual + columns
    x32 = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    total = (x32 + tl.load(residuals, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(residuals, total, mask=inside)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    result = _normalise(total.to(tl.float32)[None, :], weights, eps, SIZE, dtype)
    tl.store(out + row * SIZE + columns[None, :], result, mask=inside[None, :])


@Kernel
@triton.jit
def _silu_mul_kernel(gate_up, out, stride_row, SIZE: tl.constexpr, TILE: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gates = gate_up + row * stride_row + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype)
    tl.store(out + row * SIZE + columns, (activated.to(tl.float32) * up).to(dtype), mask=inside)
