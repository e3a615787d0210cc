"""Attention of single rows over a paged cache: one work item for each (row, KV head).

The softmax is computed in one pass over the blocks, with a running maximum.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import numpy as np
from numba import carray, njit

from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.intrinsics import claim, fast_exp, float32_array, int64_array
from loraplex.kernels.cpu.vectors import FLOAT_BYTES, add_rows, dot, scale


@njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
def _attend(q, out, blocks, context_len, k_head, v_head, block_bytes, block_size, head_dim, factor, scores):
    """Compute one query head over its context: online softmax, block by block."""
    peak = np.float32(-3.0e38)
    total = np.float32(0.0)
    for d in range(head_dim):
        out[d] = np.float32(0.0)
    for first in range(0, context_len, block_size):
        count = min(block_size, context_len - first)
        offset = blocks[first // block_size] * block_bytes
        before = peak
        for t in range(count):
            key = float32_array(k_head + offset + t * head_dim * FLOAT_BYTES, head_dim)
            scores[t] = dot(q, key, head_dim) * factor
            peak = max(peak, scores[t])
        for t in range(count):
            scores[t] = fast_exp(scores[t] - peak)
        if peak > before:
            rescale = fast_exp(before - peak)
            total *= rescale
            scale(out, head_dim, rescale)
        for t in range(count):
            total += scores[t]
        add_rows(out, head_dim, scores, count, v_head + offset)
    scale(out, head_dim, np.float32(1.0) / total)


def _decode_attention(block):
    args = carray(block, 17)
    qkv, qkv_stride, out, out_stride = args[1], args[2], args[3], args[4]
    rows, contexts = int64_array(args[5], args[8]), int64_array(args[6], args[8])
    tables, num_rows, table_width = args[7], args[8], args[9]
    k_cache, v_cache, num_kv_heads, block_size = args[10], args[11], args[12], args[13]
    head_dim, group = args[14], args[15]
    factor = float32_array(args[16], 1)[0]
    head_bytes = block_size * head_dim * FLOAT_BYTES
    scores = np.empty(block_size, dtype=np.float32)
    while True:
        item = claim(block)
        if item >= num_rows * num_kv_heads:
            return
        index, kv_head = item // num_kv_heads, item % num_kv_heads
        for head in range(kv_head * group, (kv_head + 1) * group):
            _attend(
                float32_array(qkv + (rows[index] * qkv_stride + head * head_dim) * FLOAT_BYTES, head_dim),
                float32_array(out + (rows[index] * out_stride + head * head_dim) * FLOAT_BYTES, head_dim),
                int64_array(tables + index * table_width * 8, table_width),
                contexts[index],
                k_cache + kv_head * head_bytes,
                v_cache + kv_head * head_bytes,
                num_kv_heads * head_bytes,
                block_size,
                head_dim,
                factor,
                scores,
            )


DECODE_ATTENTION = team.kernel(_decode_attention)
"""Arguments: qkv, its row stride, out, its row stride, rows, context lengths, block tables, number of
rows, table width, k cache, v cache, KV heads, block size, head size, query heads per KV head, address of
the float32 softmax scale."""
