"""Code that decode and prefill attention share: the loop of a tile of query rows over a paged context.

Scores use base 2, the base of the hardware's exponential, and are summed in float32.

Shapes, in all attention kernels: M rows of a query tile, L tokens of a key tile, D head size padded to a
power of two. Caches are (num_blocks, num_kv_heads, block_size, head_dim), with any strides except in the last
dimension; offsets into them are 64-bit, because a cache may be larger than 2^31 elements.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# The smallest dimension of a tensor core product.
MIN_DOT = 16
_MAX_TILE_TOKENS = 128


def score_scale(head_dim: int) -> float:
    """Return the factor that makes the product of a query and a key an exponent of 2."""
    return math.log2(math.e) / math.sqrt(head_dim)


def padded_dim(head_dim: int) -> int:
    return max(triton.next_power_of_2(head_dim), MIN_DOT)


def tile_tokens(tile_bytes: int, cache: torch.Tensor) -> int:
    """Return the tokens of a key tile of about `tile_bytes`; a power of two."""
    token_bytes = padded_dim(cache.shape[3]) * cache.element_size()
    return min(max(tile_bytes // token_bytes, MIN_DOT), _MAX_TILE_TOKENS)


def check_layout(
    qkv_TO: torch.Tensor,
    blocks: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_TO: torch.Tensor,
) -> None:
    assert qkv_TO.stride(1) == blocks.stride(1) == k_cache.stride(3) == out_TO.stride(1) == 1
    assert k_cache.stride() == v_cache.stride()
    assert qkv_TO.dtype == k_cache.dtype == v_cache.dtype == out_TO.dtype


@triton.jit
def attend(
    q_MD,
    limits_M,
    peaks_M,
    totals_M,
    sums_MD,
    begin,
    end,
    table,
    k_head,
    v_head,
    stride_block,
    stride_token,
    scale,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Iterate over the keys [begin, end): running peak, total of weights, and weighted sums of values.

    Row m sees the keys up to limits_M[m], and every row must see key `begin` of the first call. Not MASKED:
    the caller knows that every row sees all keys, and that they are whole tiles.
    """
    dims_D = tl.arange(0, BLOCK_D)
    tokens_L = begin + tl.arange(0, TILE)
    blocks_L = tl.load(table + tokens_L // PAGE_SIZE, mask=tokens_L < end, other=0)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        tokens_L = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
        at_L = blocks_L.to(tl.int64) * stride_block + tokens_L % PAGE_SIZE * stride_token
        at_LD = at_L[:, None] + dims_D[None, :]
        # The next tile's blocks are loaded an iteration ahead: key loads that depend on a load of the same
        # iteration would get half of the pipeline's depth.
        next_L = tokens_L + TILE
        blocks_L = tl.load(table + next_L // PAGE_SIZE, mask=next_L < end, other=0)
        inside_LD = (dims_D < HEAD_DIM)[None, :]
        if MASKED:
            inside_LD = (tokens_L < end)[:, None] & inside_LD
        # Zeros, not the memory beyond the context: a weight of zero would not cancel a NaN.
        k_LD = tl.load(k_head + at_LD, mask=inside_LD, other=0.0)
        v_LD = tl.load(v_head + at_LD, mask=inside_LD, other=0.0)
        scores_ML = tl.dot(q_MD, tl.trans(k_LD), input_precision="ieee")
        if MASKED:
            scores_ML = tl.where(tokens_L[None, :] <= limits_M[:, None], scores_ML, float("-inf"))
        peaks_M, totals_M, sums_MD = accumulate_values(scores_ML, v_LD, peaks_M, totals_M, sums_MD, scale)
    return peaks_M, totals_M, sums_MD


@triton.jit
def accumulate_values(scores_ML, v_LD, peaks_M, totals_M, sums_MD, scale):
    """Add a tile's values to the sums, weighted by the scores."""
    new_peaks_M = tl.maximum(peaks_M, tl.max(scores_ML, axis=1) * scale)
    weights_ML = tl.exp2(scores_ML * scale - new_peaks_M[:, None])
    rescale_M = tl.exp2(peaks_M - new_peaks_M)
    totals_M = totals_M * rescale_M + tl.sum(weights_ML, axis=1)
    sums_MD = sums_MD * rescale_M[:, None]
    sums_MD = tl.dot(weights_ML.to(v_LD.dtype), v_LD, sums_MD, input_precision="ieee")
    return new_peaks_M, totals_M, sums_MD
