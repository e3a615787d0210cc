"""Causal attention of spans of new rows over their paged contexts, all spans of a step in one launch.

Keys and values that were cached before are read from their pages; those of the new rows from the stacked (q,
k, v), where they are contiguous and the tensor memory accelerator loads whole tiles of them. Tiles of keys
begin at multiples of their size in the context, wherever a span begins: the results do not depend on how much
of a prompt was cached, or on how it was cut into spans.

Shapes: T rows of the batch, O the columns of stacked (q, k, v) or of the query heads, S spans, B blocks of
a table.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loraplex.kernels.triton.kernel import Kernel
from loraplex.kernels.triton.paged_attention import (
    accumulate_values,
    attend,
    check_layout,
    padded_dim,
    score_scale,
    tile_tokens,
)

# Query rows and keys of a tile: as many rows as four warps need for tensor cores. float32 is multiplied
# without tensor cores, and its sums must still fit into registers.
_TILE_TOKENS = 64
_FLOAT32_TILE_TOKENS = 32
_TILE_BYTES = 64 * 128 * 2
_NUM_WARPS = 4
_NUM_STAGES = 3


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
    """Compute the attention of rows [start, start + len) over `context` tokens, the last of which are those
    rows.

    `max_span_len` bounds the device's `span_lens_S`; a span of length 0 costs nothing.
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    num_heads, block_d = out_TO.shape[1] // head_dim, padded_dim(head_dim)
    most = _FLOAT32_TILE_TOKENS if qkv_TO.dtype == torch.float32 else _TILE_TOKENS
    tile = min(tile_tokens(_TILE_BYTES, k_cache), most)
    check_layout(qkv_TO, blocks_SB, k_cache, v_cache, out_TO)
    # Consecutive programs are query heads that share keys: later ones find these in the device's cache.
    _prefill_kernel[(num_heads, triton.cdiv(max_span_len, tile), contexts_S.shape[0])](
        TensorDescriptor.from_tensor(qkv_TO, [tile, block_d]),
        span_starts_S,
        span_lens_S,
        contexts_S,
        blocks_SB,
        k_cache,
        v_cache,
        out_TO,
        out_TO.stride(0),
        blocks_SB.stride(0),
        *k_cache.stride()[:3],
        score_scale(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        TILE=tile,
        BLOCK_D=block_d,
        STAGES=_NUM_STAGES,
        num_warps=_NUM_WARPS,
    )


# Tables differ from step to step in width and start: do not specialise the kernel on these.
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
    stride_out,
    stride_table,
    stride_block,
    stride_head,
    stride_token,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one query head for a tile of query rows. `qkv`: a descriptor of tiles of that size."""
    head, num_heads, span = tl.program_id(0), tl.num_programs(0), tl.program_id(2).to(tl.int64)
    kv_head = head * NUM_KV_HEADS // num_heads
    # The last tiles see the most keys: started first, so that none of them runs alone at the end.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE
    span_len = tl.load(span_lens + span).to(tl.int32)
    if first >= span_len:
        return
    context = tl.load(contexts + span).to(tl.int32)
    span_start = tl.load(span_starts + span).to(tl.int32)
    prefix = context - span_len

    rows_M, dims_D = first + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    inside_MD = (rows_M < span_len)[:, None] & (dims_D < HEAD_DIM)[None, :]
    q_MD = tl.where(inside_MD, qkv.load([span_start + first, head * HEAD_DIM]), 0.0)
    limits_M = tl.minimum(prefix + rows_M, context - 1)
    peaks_M = tl.full([TILE], float("-inf"), tl.float32)
    totals_M = tl.zeros([TILE], tl.float32)
    sums_MD = tl.zeros([TILE, BLOCK_D], tl.float32)
    seen_by_any = tl.minimum(prefix + first + TILE, context)

    # From pages: whole tiles of the cached prefix, then the tile in which it ends.
    cached = prefix // TILE * TILE
    new = tl.cdiv(prefix, TILE) * TILE
    for MASKED in tl.static_range(2):
        peaks_M, totals_M, sums_MD = attend(
            q_MD,
            limits_M,
            peaks_M,
            totals_M,
            sums_MD,
            cached if MASKED else 0,
            tl.minimum(new, seen_by_any) if MASKED else cached,
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
            STAGES=1 if MASKED else STAGES,
        )
    # From the new rows: whole tiles that all rows of this one see, then the others.
    seen_by_all = tl.maximum((prefix + first + 1) // TILE * TILE, new)
    k_column = (num_heads + kv_head) * HEAD_DIM
    for MASKED in tl.static_range(2):
        begin, end = (seen_by_all, seen_by_any) if MASKED else (new, seen_by_all)
        for start in tl.range(begin, end, TILE, num_stages=1 if MASKED else STAGES):
            row = span_start + start - prefix
            k_LD = qkv.load([row, k_column])
            v_LD = qkv.load([row, k_column + NUM_KV_HEADS * HEAD_DIM])
            scores_ML = tl.dot(q_MD, tl.trans(k_LD), input_precision="ieee")
            if MASKED:
                tokens_L = start + tl.arange(0, TILE)
                scores_ML = tl.where(tokens_L[None, :] <= limits_M[:, None], scores_ML, float("-inf"))
                # Rows of other sequences: a weight of zero would not cancel a NaN.
                v_LD = tl.where((tokens_L < context)[:, None], v_LD, 0.0)
            peaks_M, totals_M, sums_MD = accumulate_values(scores_ML, v_LD, peaks_M, totals_M, sums_MD, scale)

    at_MD = (span_start + rows_M).to(tl.int64)[:, None] * stride_out + head * HEAD_DIM + dims_D[None, :]
    result_MD = (sums_MD / totals_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_MD, result_MD, mask=inside_MD)
