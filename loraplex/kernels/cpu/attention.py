"""Attention of single rows over a paged cache: one work item for each (row, KV head).

The query heads that share a KV head go through the cache together, so each key and value is read once
for all of them. The softmax is taken in one pass over the keys with a running maximum per block.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import numpy as np
from numba import carray, njit

from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.intrinsics import claim, fast_exp, float32_array, int64_array

_FLOAT_BYTES = 4


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _attend(q, out, blocks, context_len, k_head, v_head, block_stride, block_size, head_dim, group, scale):
    """One query row, one KV head: online softmax, block by block, for every query head of the group."""
    scores = np.empty(block_size, dtype=np.float32)
    maxima = np.full(group, np.float32(-3.0e38), dtype=np.float32)
    totals = np.zeros(group, dtype=np.float32)
    for g in range(group):
        out_row = float32_array(out + g * head_dim * _FLOAT_BYTES, head_dim)
        for d in range(head_dim):
            out_row[d] = np.float32(0.0)
    for first in range(0, context_len, block_size):
        count = min(block_size, context_len - first)
        base = blocks[first // block_size] * block_stride * _FLOAT_BYTES
        for g in range(group):
            q_row = float32_array(q + g * head_dim * _FLOAT_BYTES, head_dim)
            out_row = float32_array(out + g * head_dim * _FLOAT_BYTES, head_dim)
            peak = maxima[g]
            for t in range(count):
                k_row = float32_array(k_head + base + t * head_dim * _FLOAT_BYTES, head_dim)
                score = np.float32(0.0)
                for d in range(head_dim):
                    score += q_row[d] * k_row[d]
                score *= scale
                scores[t] = score
                peak = max(peak, score)
            rescale = fast_exp(maxima[g] - peak)
            maxima[g] = peak
            total = totals[g] * rescale
            for t in range(count):
                scores[t] = fast_exp(scores[t] - peak)
            for t in range(count):
                total += scores[t]
            totals[g] = total
            for d in range(head_dim):
                out_row[d] *= rescale
            for t in range(count):
                v_row = float32_array(v_head + base + t * head_dim * _FLOAT_BYTES, head_dim)
                weight = scores[t]
                for d in range(head_dim):
                    out_row[d] += weight * v_row[d]
    for g in range(group):
        out_row = float32_array(out + g * head_dim * _FLOAT_BYTES, head_dim)
        inverse = np.float32(1.0) / totals[g]
        for d in range(head_dim):
            out_row[d] *= inverse


def _decode_attention(block):
    args = carray(block, 17)
    qkv, qkv_stride, out, out_stride = args[1], args[2], args[3], args[4]
    rows, contexts = int64_array(args[5], args[8]), int64_array(args[6], args[8])
    tables, num_rows, table_width = args[7], args[8], args[9]
    k_cache, v_cache, num_kv_heads, block_size = args[10], args[11], args[12], args[13]
    head_dim, group = args[14], args[15]
    scale = float32_array(args[16], 1)[0]
    block_stride = num_kv_heads * block_size * head_dim
    while True:
        item = claim(block)
        if item >= num_rows * num_kv_heads:
            return
        index, kv_head = item // num_kv_heads, item % num_kv_heads
        first_head = kv_head * group * head_dim
        head_offset = kv_head * block_size * head_dim * _FLOAT_BYTES
        _attend(
            qkv + (rows[index] * qkv_stride + first_head) * _FLOAT_BYTES,
            out + (rows[index] * out_stride + first_head) * _FLOAT_BYTES,
            int64_array(tables + index * table_width * 8, table_width),
            contexts[index],
            k_cache + head_offset,
            v_cache + head_offset,
            block_stride,
            block_size,
            head_dim,
            group,
            scale,
        )


DECODE_ATTENTION = team.kernel(_decode_attention)
"""Arguments: qkv, its row stride, out, its row stride, rows, context lengths, block tables, number of
rows, table width, k cache, v cache, KV heads, block size, head size, query heads per KV head, address of
the float32 softmax scale."""
