"""Merged weights: W + scale * B A of a group of linears, read once and written once.

A program computes one tile of the stacked weight of a group: it finds A and B of the tile's module through
the adapter's table (`lora_entries`), sums B A in float32 over the ranks, adds W and rounds once. Tiles of
modules that the adapter does not touch (rank 0) are copied bit for bit.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel
from loraplex.kernels.triton.lora_entries import COLUMNS, first_row, module_of_block, weights_at

_BLOCK_O: Final = 64
_BLOCK_I: Final = 128
_BLOCK_R: Final = 32
_WARPS: Final = 4


@Kernel
@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["table"],
)
def _merge(
    weight, merged, table, table_row,
    IN: tl.constexpr, OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    module, block, out, out_start = module_of_block(tl.program_id(0), OUT0, OUT1, OUT2, BLOCK_O)
    entry = table + (table_row + module) * COLUMNS
    address = table.to(tl.int64)  # the entry's addresses are relative to it
    dtype: tl.constexpr = weight.dtype.element_ty
    a_rows = weights_at(address + tl.load(entry), dtype, IN)
    b_rows = weights_at(address + tl.load(entry + 1), dtype, OUT0 | OUT1 | OUT2)
    rank = tl.load(entry + 2)
    scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
    outs = block * BLOCK_O + tl.arange(0, BLOCK_O)
    ins = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    out_mask, in_mask = outs < out, ins < IN
    at = (out_start + outs).to(tl.int64)[:, None] * IN + ins[None, :]
    mask = out_mask[:, None] & in_mask[None, :]
    before = tl.load(weight + at, mask=mask, other=0.0)  # arrives while A and B are multiplied
    acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        ranks = r0 + tl.arange(0, BLOCK_R)
        rank_mask = ranks < rank
        b = tl.load(
            b_rows + ranks.to(tl.int64)[:, None] * out + outs[None, :],
            mask=rank_mask[:, None] & out_mask[None, :],
            other=0.0,
        )
        a = tl.load(
            a_rows + ranks.to(tl.int64)[:, None] * IN + ins[None, :],
            mask=rank_mask[:, None] & in_mask[None, :],
            other=0.0,
        )
        acc = tl.dot(tl.trans(b), a, acc, input_precision="ieee")
    total = (before.to(tl.float32) + scale * acc).to(dtype)
    tl.store(merged + at, tl.where(rank > 0, total, before), mask=mask)


def merge_group(
    weight_OI: torch.Tensor,
    merged_OI: torch.Tensor,
    table_LM: torch.Tensor,
    *,
    layer: int,
    group: str,
    out_features: tuple[int, ...],
) -> None:
    """Write the merged weight of a group of linears. `table_LM`: the adapter's table, with addresses relative
    to itself; `out_features`: those of the group's modules, in stacking order."""
    assert weight_OI.is_contiguous()
    assert merged_OI.is_contiguous()
    out0, out1, out2 = (*out_features, 0, 0)[:3]
    in_features = weight_OI.shape[1]
    out_blocks = sum(triton.cdiv(out, _BLOCK_O) for out in out_features)
    _merge[(out_blocks, triton.cdiv(in_features, _BLOCK_I))](
        weight_OI, merged_OI, table_LM, first_row(layer, group),
        IN=in_features, OUT0=out0, OUT1=out1, OUT2=out2,
        BLOCK_O=_BLOCK_O, BLOCK_I=_BLOCK_I, BLOCK_R=_BLOCK_R, num_warps=_WARPS,
    )  # fmt: skip
