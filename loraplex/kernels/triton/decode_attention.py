"""Attention of decode rows, one new token each, over their paged contexts.

Reading keys and values dominates the cost, so a context is split among programs until the device is full
(flash decoding), and a second, small kernel combines the splits' results by their weights.

Shapes: T rows of the batch, O the columns of stacked (q, k, v) or of the query heads, D decode rows,
B blocks of a table, P parts (row, query head, split), H head size.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel
from loraplex.kernels.triton.paged_attention import (
    MIN_DOT,
    attend,
    check_layout,
    padded_dim,
    score_scale,
    tile_tokens,
)

_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 16
# A program holds (stages - 1) tiles of keys and of values in shared memory, all in flight while it
# computes. More stages or larger tiles leave room for fewer programs.
_TILE_BYTES = 64 * 128 * 2
_NUM_WARPS = 4
_NUM_STAGES = 3
# From so many programs on, more and smaller ones read faster. Fewer would leave the device idle while the
# longest contexts end.
_MANY_PROGRAMS = 3000
_MANY_TILE_BYTES = 32 * 128 * 2
_MANY_WARPS = 1
_COMBINE_WARPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeScratch:
    """Weighted values and log2 weights of the splits. Used within one call only: share it."""

    values_PH: torch.Tensor
    weights_P: torch.Tensor

    @classmethod
    def empty(
        cls, *, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int, device: torch.device
    ) -> DecodeScratch:
        """Return enough for any result of `choose_num_splits`: the more rows, the fewer splits."""
        num_parts = num_sms * _PROGRAMS_PER_SM * (num_heads // num_kv_heads)
        return cls(
            values_PH=torch.empty(num_parts, head_dim, dtype=torch.float32, device=device),
            weights_P=torch.empty(num_parts, dtype=torch.float32, device=device),
        )


def choose_num_splits(num_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """Return the number of parts that contexts are split into, so that few rows fill the device; a power of
    two."""
    wanted = num_sms * _PROGRAMS_PER_SM // max(num_rows * num_kv_heads, 1)
    num_splits = 1
    while num_splits * 2 <= min(wanted, _MAX_SPLITS):
        num_splits *= 2
    return num_splits


def has_many_programs(num_rows: int, num_kv_heads: int, num_splits: int) -> bool:
    """Return whether a launch has so many programs that small ones are faster."""
    return num_rows * num_kv_heads * num_splits >= _MANY_PROGRAMS


def decode_attention(
    qkv_TO: torch.Tensor,
    rows_D: torch.Tensor,
    contexts_D: torch.Tensor,
    blocks_DB: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_TO: torch.Tensor,
    num_splits: int,
    scratch: DecodeScratch | None,
) -> None:
    """Compute the attention of rows `rows_D` over their contexts, which include themselves.

    For a context of 0 (padding) nothing is read or written. One split needs no scratch.
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    num_rows, num_heads = contexts_D.shape[0], out_TO.shape[1] // head_dim
    check_layout(qkv_TO, blocks_DB, k_cache, v_cache, out_TO)
    # With one split these two are not used: any tensor will do.
    values, weights = out_TO, out_TO
    if num_splits > 1:
        assert scratch is not None
        assert num_rows * num_heads * num_splits <= scratch.weights_P.shape[0]
        values, weights = scratch.values_PH, scratch.weights_P
    is_many = has_many_programs(num_rows, num_kv_heads, num_splits)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded_dim(head_dim),
        "TILE": tile_tokens(_MANY_TILE_BYTES if is_many else _TILE_BYTES, k_cache),
        "NUM_SPLITS": num_splits,
    }
    group = num_heads // num_kv_heads
    # All heads of a row before the next row: programs start in this order, and long contexts come first.
    _decode_kernel[(num_kv_heads, num_rows, num_splits)](
        qkv_TO, rows_D, contexts_D, blocks_DB, k_cache, v_cache, out_TO, values, weights,
        qkv_TO.stride(0), out_TO.stride(0), blocks_DB.stride(0), *k_cache.stride()[:3], score_scale(head_dim),
        GROUP=group, PAGE_SIZE=page_size, BLOCK_M=max(triton.next_power_of_2(group), MIN_DOT), **constants,
        STAGES=_NUM_STAGES, num_warps=_MANY_WARPS if is_many else _NUM_WARPS,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(num_rows, num_heads)](
            rows_D, contexts_D, out_TO, values, weights, out_TO.stride(0), **constants,
            num_warps=_COMBINE_WARPS,
        )  # fmt: skip


@triton.jit
def _split_tokens(context, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Return the tokens of every split but the last, whole tiles. A short context leaves the later splits
    empty."""
    return tl.cdiv(tl.cdiv(context, TILE), NUM_SPLITS) * TILE


# Tables differ from step to step in width and start: do not specialise the kernel on these.
@Kernel
@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["rows", "contexts", "blocks"])
def _decode_kernel(
    qkv,
    rows,
    contexts,
    blocks,
    k_cache,
    v_cache,
    out,
    values,
    weights,
    stride_qkv,
    stride_out,
    stride_table,
    stride_block,
    stride_head,
    stride_token,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute one split of one row's context, for all query heads of one KV head."""
    kv_head, index, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    context = tl.load(contexts + index).to(tl.int32)
    split_tokens = _split_tokens(context, TILE, NUM_SPLITS)
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, context)
    if begin >= end:
        return
    row = tl.load(rows + index).to(tl.int64)

    members_M = tl.arange(0, BLOCK_M)
    dims_D = tl.arange(0, BLOCK_D)
    heads_M = kv_head * GROUP + members_M
    inside_MD = (members_M < GROUP)[:, None] & (dims_D < HEAD_DIM)[None, :]
    at_MD = (heads_M * HEAD_DIM)[:, None] + dims_D[None, :]
    q_MD = tl.load(qkv + row * stride_qkv + at_MD, mask=inside_MD, other=0.0)
    peaks_M, totals_M, sums_MD = attend(
        q_MD,
        tl.full([BLOCK_M], context - 1, tl.int32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        begin,
        end,
        blocks + index * stride_table,
        k_cache + kv_head.to(tl.int64) * stride_head,
        v_cache + kv_head.to(tl.int64) * stride_head,
        stride_block,
        stride_token,
        scale,
        HEAD_DIM=HEAD_DIM,
        PAGE_SIZE=PAGE_SIZE,
        TILE=TILE,
        BLOCK_D=BLOCK_D,
        MASKED=True,
        STAGES=STAGES,
    )
    if NUM_SPLITS == 1:
        result_MD = sums_MD / totals_M[:, None]
        tl.store(out + row * stride_out + at_MD, result_MD.to(out.dtype.element_ty), mask=inside_MD)
    else:
        num_heads = tl.num_programs(0) * GROUP
        parts_M = (index * num_heads + heads_M) * NUM_SPLITS + split
        at_MD = (parts_M * HEAD_DIM)[:, None] + dims_D[None, :]
        tl.store(values + at_MD, sums_MD / totals_M[:, None], mask=inside_MD)
        tl.store(weights + parts_M, peaks_M + tl.log2(totals_M), mask=members_M < GROUP)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["rows", "contexts"])
def _combine_kernel(
    rows,
    contexts,
    out,
    values,
    weights,
    stride_out,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Combine the splits' values of one row and query head by their weights."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(contexts + index).to(tl.int32)
    if context == 0:
        return
    row = tl.load(rows + index).to(tl.int64)
    splits_S = tl.arange(0, NUM_SPLITS)
    dims_D = tl.arange(0, BLOCK_D)
    inside_D = dims_D < HEAD_DIM
    parts_S = (index * tl.num_programs(1) + head) * NUM_SPLITS + splits_S
    # Empty splits wrote nothing: their memory may hold anything.
    used_S = splits_S * _split_tokens(context, TILE, NUM_SPLITS) < context
    weights_S = tl.load(weights + parts_S, mask=used_S, other=float("-inf"))
    at_SD = (parts_S * HEAD_DIM)[:, None] + dims_D[None, :]
    values_SD = tl.load(values + at_SD, mask=used_S[:, None] & inside_D[None, :], other=0.0)
    weights_S = tl.exp2(weights_S - tl.max(weights_S, axis=0))
    result_D = tl.sum(values_SD * weights_S[:, None], axis=0) / tl.sum(weights_S, axis=0)
    at_D = row * stride_out + head * HEAD_DIM + dims_D
    tl.store(out + at_D, result_D.to(out.dtype.element_ty), mask=inside_D)
