"""Causal attention of spans of new rows over their paged contexts, all spans of a step in one launch.

A span's keys and values are read from the cache, where they have just been written: what was cached before
and what is new are then one context. A query tile holds all heads of a KV head for consecutive tokens.

Shapes: T rows of the batch, O the columns of stacked (q, k, v) or of the query heads, S spans, B blocks of
a table.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel
from loraplex.kernels.triton.paged_attention import (
    attend,
    check_layout,
    padded_dim,
    score_scale,
    tile_tokens,
)

# Tensor cores take 64 rows for every four warps.
_TILE_ROWS = 128
_TILE_BYTES = 64 * 128 * 2
_NUM_WARPS = 8
_NUM_STAGES = 3
# float32 is multiplied without tensor cores, and its sums must still fit into registers.
_FLOAT32_TILE_ROWS = 32


def prefill_attention(
    qkv_TO: torch.Tensor,
    span_starts_S: torch.Tensor,
    span_lens_S: torch.Tensor,
    contexts_S: torch.Tensor,
    blocks_SB: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_TO: torch.Tensor,
    max_span_len: int,
) -> None:
    """Attention of rows [start, start + len) over `context` tokens, the last of which are those rows.

    `max_span_len` bounds the device's `span_lens_S`; a span of length 0 costs nothing.
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    group = out_TO.shape[1] // head_dim // num_kv_heads
    check_layout(qkv_TO, blocks_SB, k_cache, v_cache, out_TO)
    tile_rows = _FLOAT32_TILE_ROWS if qkv_TO.dtype == torch.float32 else _TILE_ROWS
    num_tiles = triton.cdiv(max_span_len * group, tile_rows)
    _prefill_kernel[(num_kv_heads, num_tiles, contexts_S.shape[0])](
        qkv_TO,
        span_starts_S,
        span_lens_S,
        contexts_S,
        blocks_SB,
        k_cache,
        v_cache,
        out_TO,
        qkv_TO.stride(0),
        out_TO.stride(0),
        blocks_SB.stride(0),
        *k_cache.stride()[:3],
        score_scale(head_dim),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        TILE=tile_tokens(_TILE_BYTES, k_cache),
        BLOCK_M=tile_rows,
        BLOCK_D=padded_dim(head_dim),
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )


# Tables differ from step to step in width and in where they start: no new kernel for their divisors.
@Kernel
@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["span_starts", "span_lens", "contexts", "blocks"],
)
def _prefill_kernel(
    qkv,
    span_starts,
    span_lens,
    contexts,
    blocks,
    k_cache,
    v_cache,
    out,
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
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One query tile: row m of the span is query head m % GROUP of the KV head, for token m // GROUP."""
    kv_head, span = tl.program_id(0), tl.program_id(2).to(tl.int64)
    # The last tiles see most keys: started first, none of them is left to run alone at the end.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    span_len = tl.load(span_lens + span).to(tl.int32)
    if first_row >= span_len * GROUP:
        return
    context = tl.load(contexts + span).to(tl.int32)
    prefix = context - span_len

    rows_M = first_row + tl.arange(0, BLOCK_M)
    tokens_M = rows_M // GROUP
    dims_D = tl.arange(0, BLOCK_D)
    inside_MD = (tokens_M < span_len)[:, None] & (dims_D < HEAD_DIM)[None, :]
    batch_rows_M = tl.load(span_starts + span).to(tl.int64) + tokens_M
    columns_MD = ((kv_head * GROUP + rows_M % GROUP) * HEAD_DIM)[:, None] + dims_D[None, :]
    q_MD = tl.load(qkv + (batch_rows_M * stride_qkv)[:, None] + columns_MD, mask=inside_MD, other=0.0)

    limits_M = prefix + tokens_M
    peaks_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    totals_M = tl.zeros([BLOCK_M], tl.float32)
    sums_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    seen_by_all = (prefix + first_row // GROUP + 1) // TILE * TILE
    seen_by_any = tl.minimum(prefix + (first_row + BLOCK_M - 1) // GROUP + 1, context)
    for MASKED in tl.static_range(2):
        peaks_M, totals_M, sums_MD = attend(
            q_MD,
            limits_M,
            peaks_M,
            totals_M,
            sums_MD,
            seen_by_all if MASKED else 0,
            seen_by_any if MASKED else seen_by_all,
            blocks + span * stride_table,
            k_cache + kv_head.to(tl.int64) * stride_head,
            v_cache + kv_head.to(tl.int64) * stride_head,
            stride_block,
            stride_token,
            scale,
            HEAD_DIM=HEAD_DIM,
            PAGE_SIZE=PAGE_SIZE,
            TILE=TILE,
            BLOCK_D=BLOCK_D,
            MASKED=MASKED,
        )
    result_MD = (sums_MD / totals_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + (batch_rows_M * stride_out)[:, None] + columns_MD, result_MD, mask=inside_MD)
