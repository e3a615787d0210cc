"""LoRA for decode: row by row, bound by reading weights.

A program holds one block of weights in registers, loaded at once: many small blocks keep enough bytes in
flight to use the memory's full bandwidth. Rows that share an adapter read the same weights at the same time,
so all but the first find them in the cache. Where many rows share one, `lora_blocks` reads them once for all.

    shrink   h[s, row, j] = sum over block s of the inputs of x[row, i] A[j, i]
             grid: tiles x rank programs x blocks of inputs
    expand   y[row, o] += scale * sum over s and j of h[s, row, j] B^T[j, o]
             grid: tiles x blocks of the outputs of all modules of the group
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel
from loraplex.kernels.triton.lora_entries import (
    COLUMNS,
    entry_of,
    group_rank,
    module_of_block,
    rank_before,
    segment_of,
    weights_at,
)

FEW_SEGMENTS: Final = 8
_RANK_PROGRAMS: Final = 96
_SHRINK_PROGRAMS: Final = 2048
_MIN_RANK_PROGRAMS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsLaunch:
    """Block sizes of a launch: many small blocks, so that their reads overlap. A tile is one row."""

    block_m: ClassVar[int] = 1
    shrink_block_r: int = 2
    shrink_block_k: int = 2048
    shrink_warps: int = 2
    shrink_stages: int = 2
    rank_programs: int = _RANK_PROGRAMS
    expand_block_n: int = 512
    expand_block_r: int = 4
    expand_warps: int = 2
    expand_stages: int = 4

    @classmethod
    def for_segments(cls, num_segments: int) -> RowsLaunch:
        """Return sizes for a number of segments. Few segments are cut finer, to fill the device. Many fill it
        with few programs each; more would exceed an adapter's rank, and starting and ending those would take
        longer than the others take to read."""
        if num_segments <= FEW_SEGMENTS:
            return cls(shrink_stages=1, expand_block_n=64, expand_block_r=64, expand_warps=2, expand_stages=1)
        wanted = _SHRINK_PROGRAMS // num_segments
        return cls(rank_programs=max(_MIN_RANK_PROGRAMS, min(_RANK_PROGRAMS, wanted)))


@Kernel
@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["segments", "entries"])
def _shrink_rows(
    x, x_stride, h, h_split_stride, h_stride, segments, entries, table_row,
    IN: tl.constexpr, NUM_MODULES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    row, num_rows = segment_of(segments)
    if num_rows == 0:
        return
    num_segments = tl.num_programs(0)
    entry = entry_of(entries, table_row, tl.program_id(0), num_segments)
    address, total_rank = group_rank(entry, num_segments, NUM_MODULES)
    weights = weights_at(address, x.dtype.element_ty, IN)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    k_mask = k < IN
    inputs = tl.load(x + row * x_stride + k, mask=k_mask, other=0.0).to(tl.float32)
    first, stride = tl.program_id(1) * BLOCK_R, tl.num_programs(1) * BLOCK_R
    for r0 in tl.range(first, total_rank, stride, num_stages=STAGES):
        ranks = r0 + tl.arange(0, BLOCK_R)
        rank_mask = ranks < total_rank
        a = tl.load(
            weights + ranks.to(tl.int64)[:, None] * IN + k[None, :],
            mask=rank_mask[:, None] & k_mask[None, :],
            other=0.0,
        ).to(tl.float32)
        target = h + split * h_split_stride + row * h_stride + ranks
        tl.store(target, tl.sum(a * inputs[None, :], axis=1), mask=rank_mask)


@Kernel
@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["segments", "entries"])
def _expand_rows(
    y, y_stride, h, h_split_stride, h_stride, segments, entries, table_row,
    OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, num_rows = segment_of(segments)
    if num_rows == 0:
        return
    module, block, out, out_start = module_of_block(tl.program_id(1), OUT0, OUT1, OUT2, BLOCK_N)
    num_segments = tl.num_programs(0)
    group = entry_of(entries, table_row, tl.program_id(0), num_segments)
    entry = group + module * num_segments * COLUMNS
    rank = tl.load(entry + 2)
    if rank == 0:
        return
    weights = weights_at(tl.load(entry + 1), y.dtype.element_ty, OUT0 | OUT1 | OUT2)
    scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < out
    target = y + row * y_stride + out_start + columns
    before = tl.load(target, mask=column_mask, other=0.0)
    source = h + row * h_stride + rank_before(group, num_segments, module)
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
        ranks = r0 + tl.arange(0, BLOCK_R)
        rank_mask = ranks < rank
        b = tl.load(
            weights + ranks.to(tl.int64)[:, None] * out + columns[None, :],
            mask=rank_mask[:, None] & column_mask[None, :],
            other=0.0,
        ).to(tl.float32)
        acc += _summed(source + ranks, h_split_stride, rank_mask, NUM_SPLITS)[:, None] * b
    result = before + scale * tl.sum(acc, axis=0)
    tl.store(target, result.to(y.dtype.element_ty), mask=column_mask)


@triton.jit
def _summed(source, split_stride, mask, NUM_SPLITS: tl.constexpr):
    """Return the sum of the partial sums of some ranks of h."""
    total = tl.load(source, mask=mask, other=0.0)
    for s in tl.static_range(1, NUM_SPLITS):
        total += tl.load(source + s * split_stride, mask=mask, other=0.0)
    return total


def shrink_rows(
    x_TI: torch.Tensor,
    h_STR: torch.Tensor,
    segments_N2: torch.Tensor,
    entries: torch.Tensor,
    *,
    table_row: int,
    num_modules: int,
    launch: RowsLaunch,
) -> None:
    """Compute h = x A^T for tiles of one row, one partial sum for each block of the inputs."""
    in_features = x_TI.shape[1]
    splits = triton.cdiv(in_features, launch.shrink_block_k)
    _shrink_rows[(segments_N2.shape[0], launch.rank_programs, splits)](
        x_TI, x_TI.stride(0), h_STR, h_STR.stride(0), h_STR.stride(1), segments_N2, entries, table_row,
        IN=in_features, NUM_MODULES=num_modules, BLOCK_R=launch.shrink_block_r,
        BLOCK_K=launch.shrink_block_k, STAGES=launch.shrink_stages,
        num_warps=launch.shrink_warps,
    )  # fmt: skip


def expand_rows(
    y_TO: torch.Tensor,
    h_STR: torch.Tensor,
    segments_N2: torch.Tensor,
    entries: torch.Tensor,
    *,
    table_row: int,
    out_features: tuple[int, ...],
    num_splits: int,
    launch: RowsLaunch,
) -> None:
    """Compute y += scale * h B^T for tiles of one row. `out_features`: those of the group's modules,
    in stacking order."""
    out0, out1, out2 = (*out_features, 0, 0)[:3]
    blocks = sum(triton.cdiv(out, launch.expand_block_n) for out in out_features)
    _expand_rows[(segments_N2.shape[0], blocks)](
        y_TO, y_TO.stride(0), h_STR, h_STR.stride(0), h_STR.stride(1), segments_N2, entries, table_row,
        OUT0=out0, OUT1=out1, OUT2=out2, NUM_SPLITS=num_splits, BLOCK_N=launch.expand_block_n,
        BLOCK_R=launch.expand_block_r, STAGES=launch.expand_stages,
        num_warps=launch.expand_warps,
    )  # fmt: skip
