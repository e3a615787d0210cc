"""LoRA for rows that share adapters, above all those of prompts, in tensor-core tiles.

Segments are cut into tiles of at most `block_m` rows (`lora_step.cut_tiles`); tiles of one adapter find its
weights in the cache. Grids and layout of h are those of `lora_rows`, except that a program takes every n-th
tile until it finds an empty one: a graph is captured for the most tiles of any step, and starting a program
for each empty one would take longer than the work of a step whose rows share few adapters.

The inputs are cut into parts, as tiles alone are too few to fill the device. The last program of a tile knows
by `counts` that the others are done, and sums the products of all parts, in their order: the result does not
depend on which program is the last.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from loraplex.core.modules import MAX_RANK
from loraplex.kernels.triton.kernel import Kernel
from loraplex.kernels.triton.lora_entries import (
    COLUMNS,
    entry_of,
    group_rank,
    module_of_block,
    rank_before,
    weights_at,
)

LEAST_BLOCK_R: Final = 16
MAX_RANK_BLOCKS: Final = 3 * MAX_RANK // LEAST_BLOCK_R
"""The most blocks of ranks of a tile: three modules of the largest rank, in the smallest blocks."""
_RANK_BLOCKS = tl.constexpr(MAX_RANK_BLOCKS)
_FEW_PROMPT_ROWS: Final = 512
_FEW_DECODES: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksLaunch:
    """Block sizes of a launch. The defaults are for prompts of many rows. `tile_programs`: the most programs
    among which tiles are divided. `shrink_splits`: parts of the inputs."""

    block_m: int = 64
    tile_programs: int = 1 << 16
    shrink_block_r: int = 32
    shrink_block_k: int = 128
    shrink_splits: int = 2
    shrink_warps: int = 4
    shrink_stages: int = 3
    rank_programs: int = 6
    expand_block_n: int = 128
    expand_block_r: int = 32
    expand_warps: int = 4
    expand_stages: int = 1

    @classmethod
    def for_prompts(cls, num_rows: int) -> BlocksLaunch:
        """Return sizes for prompts in a step of this many rows: with few, more parts fill the device."""
        return cls(tile_programs=16, shrink_splits=4) if num_rows <= _FEW_PROMPT_ROWS else cls()

    @classmethod
    def for_decode(cls, num_rows: int) -> BlocksLaunch:
        """Return sizes for few rows per adapter, in a step of this many rows: small tiles, enough of them to
        fill the device."""
        return cls(
            block_m=16,
            tile_programs=16,
            shrink_block_r=LEAST_BLOCK_R,
            shrink_splits=8 if num_rows <= _FEW_DECODES else 4,
            shrink_warps=2,
            rank_programs=12,
            expand_block_r=64,
        )


@Kernel
@triton.jit(do_not_specialize=["num_tiles", "table_row"], do_not_specialize_on_alignment=["tiles", "entries"])
def _shrink_blocks(
    x, x_stride, h, h_split_stride, h_stride, tiles, num_tiles, entries, counts, table_row,
    IN: tl.constexpr, SPLIT_IN: tl.constexpr, NUM_SPLITS: tl.constexpr, NUM_MODULES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    rows = tl.arange(0, BLOCK_M)
    tile = tl.program_id(0)
    num_rows = tl.load(tiles + tile * 2 + 1)
    while num_rows > 0:
        start = tl.load(tiles + tile * 2)
        entry = entry_of(entries, table_row, tile, num_tiles)
        address, total_rank = group_rank(entry, num_tiles, NUM_MODULES)
        weights = weights_at(address, x.dtype.element_ty, IN)
        row_mask = rows < num_rows
        x_rows = x + (start + rows)[:, None] * x_stride
        for r0 in range(tl.program_id(1) * BLOCK_R, total_rank, tl.num_programs(1) * BLOCK_R):
            ranks = r0 + tl.arange(0, BLOCK_R)
            rank_mask = ranks < total_rank
            a_rows = weights + ranks.to(tl.int64)[None, :] * IN
            acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for k0 in range(0, SPLIT_IN, BLOCK_K):
                k = split * SPLIT_IN + k0 + tl.arange(0, BLOCK_K)
                k_mask = k < IN
                a = tl.load(a_rows + k[:, None], mask=k_mask[:, None] & rank_mask[None, :], other=0.0)
                inputs = tl.load(x_rows + k[None, :], mask=row_mask[:, None] & k_mask[None, :], other=0.0)
                acc = tl.dot(inputs, a, acc, input_precision="ieee")
            target = h + (start + rows)[:, None] * h_stride + ranks[None, :]
            mask = row_mask[:, None] & rank_mask[None, :]
            tl.store(target + split * h_split_stride, acc, mask=mask)
            tl.debug_barrier()  # all threads of this program have stored their part
            count = counts + tile * _RANK_BLOCKS + r0 // BLOCK_R
            if tl.atomic_add(count, 1) == NUM_SPLITS - 1:
                total = tl.load(target, mask=mask, other=0.0, cache_modifier=".cg")
                for s in tl.static_range(1, NUM_SPLITS):
                    part = target + s * h_split_stride
                    total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
                tl.store(target, total, mask=mask)
                tl.store(count, 0)
        tile += tl.num_programs(0)
        num_rows = tl.load(tiles + tile * 2 + 1, mask=tile < num_tiles, other=0)


@Kernel
@triton.jit(do_not_specialize=["num_tiles", "table_row"], do_not_specialize_on_alignment=["tiles", "entries"])
def _expand_blocks(
    y, y_stride, h, h_stride, tiles, num_tiles, entries, table_row,
    OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    module, block, out, out_start = module_of_block(tl.program_id(1), OUT0, OUT1, OUT2, BLOCK_N)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < out
    rows = tl.arange(0, BLOCK_M)
    tile = tl.program_id(0)
    num_rows = tl.load(tiles + tile * 2 + 1)
    while num_rows > 0:
        start = tl.load(tiles + tile * 2)
        group = entry_of(entries, table_row, tile, num_tiles)
        entry = group + module * num_tiles * COLUMNS
        rank = tl.load(entry + 2)
        if rank > 0:
            rank_start = rank_before(group, num_tiles, module)
            weights = weights_at(tl.load(entry + 1), y.dtype.element_ty, OUT0 | OUT1 | OUT2)
            scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
            row_mask = rows < num_rows
            h_rows = h + (start + rows)[:, None] * h_stride + rank_start
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for r0 in range(0, rank, BLOCK_R):
                ranks = r0 + tl.arange(0, BLOCK_R)
                rank_mask = ranks < rank
                b = tl.load(
                    weights + ranks.to(tl.int64)[:, None] * out + columns[None, :],
                    mask=rank_mask[:, None] & column_mask[None, :],
                    other=0.0,
                )
                h_mask = row_mask[:, None] & rank_mask[None, :]
                shrunk = tl.load(h_rows + ranks[None, :], mask=h_mask, other=0.0)
                acc = tl.dot((shrunk * scale).to(b.dtype), b, acc, input_precision="ieee")
            target = y + (start + rows)[:, None] * y_stride + out_start + columns[None, :]
            mask = row_mask[:, None] & column_mask[None, :]
            before = tl.load(target, mask=mask, other=0.0)
            tl.store(target, (before + acc).to(y.dtype.element_ty), mask=mask)
        tile += tl.num_programs(0)
        num_rows = tl.load(tiles + tile * 2 + 1, mask=tile < num_tiles, other=0)


def shrink_blocks(
    x_TI: torch.Tensor,
    h_STR: torch.Tensor,
    tiles_N2: torch.Tensor,
    entries: torch.Tensor,
    counts: torch.Tensor,
    *,
    table_row: int,
    num_modules: int,
    launch: BlocksLaunch,
) -> None:
    """Compute h = x A^T for every tile, in the first part of h. `counts`: `MAX_RANK_BLOCKS` zeros for each
    tile, which are zeros again afterwards."""
    in_features = x_TI.shape[1]
    split_in = triton.cdiv(in_features, launch.shrink_splits * launch.shrink_block_k) * launch.shrink_block_k
    num_tiles = tiles_N2.shape[0]
    _shrink_blocks[(min(num_tiles, launch.tile_programs), launch.rank_programs, launch.shrink_splits)](
        x_TI, x_TI.stride(0), h_STR, h_STR.stride(0), h_STR.stride(1), tiles_N2, num_tiles, entries, counts,
        table_row, IN=in_features, SPLIT_IN=split_in, NUM_SPLITS=launch.shrink_splits,
        NUM_MODULES=num_modules, BLOCK_M=launch.block_m, BLOCK_R=launch.shrink_block_r,
        BLOCK_K=launch.shrink_block_k, num_warps=launch.shrink_warps, num_stages=launch.shrink_stages,
    )  # fmt: skip


def expand_blocks(
    y_TO: torch.Tensor,
    h_STR: torch.Tensor,
    tiles_N2: torch.Tensor,
    entries: torch.Tensor,
    *,
    table_row: int,
    out_features: tuple[int, ...],
    launch: BlocksLaunch,
) -> None:
    """Compute y += scale * h B^T for every tile. `out_features`: those of the group's modules, in stacking
    order."""
    out0, out1, out2 = (*out_features, 0, 0)[:3]
    blocks = sum(triton.cdiv(out, launch.expand_block_n) for out in out_features)
    num_tiles = tiles_N2.shape[0]
    _expand_blocks[(min(num_tiles, launch.tile_programs), blocks)](
        y_TO, y_TO.stride(0), h_STR, h_STR.stride(1), tiles_N2, num_tiles, entries, table_row,
        OUT0=out0, OUT1=out1, OUT2=out2, BLOCK_M=launch.block_m, BLOCK_N=launch.expand_block_n,
        BLOCK_R=launch.expand_block_r, num_warps=launch.expand_warps, num_stages=launch.expand_stages,
    )  # fmt: skip
