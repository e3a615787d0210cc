"""Rotary embedding of queries and keys, and the write of keys and values to the cache, in one launch.

Shapes: T rows of the batch, O the columns of stacked (q, k, v), P positions, D head size. Caches are
(num_blocks, num_kv_heads, block_size, head_dim), with any strides except in the last dimension.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel

# A row's heads are divided among programs: steps of few rows would otherwise leave most of the device idle.
_HEADS_PER_PROGRAM = 8
# Eight 16-bit elements of either half are one 16-byte load.
_PAIRS_PER_THREAD = 8


def rope_and_cache(
    qkv_TO: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Rotate q and k inside qkv, in place, and write k and v to the rows' slots.

    A slot is block * block_size + offset. Rows may share a slot only if it is never read (the scratch block
    of padding rows): which of them is kept is undefined.
    """
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    num_heads = qkv_TO.shape[1] // head_dim
    block_half = triton.next_power_of_2(head_dim // 2)
    assert qkv_TO.stride(1) == cos_sin_PD.stride(1) == k_cache.stride(3) == 1
    assert k_cache.stride() == v_cache.stride()
    _rope_and_cache_kernel[(qkv_TO.shape[0], triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
        qkv_TO,
        cos_sin_PD,
        positions_T,
        slots_T,
        k_cache,
        v_cache,
        qkv_TO.stride(0),
        cos_sin_PD.stride(0),
        *k_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAGE_SIZE=page_size,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK_HALF=block_half,
        num_warps=max(_HEADS_PER_PROGRAM * block_half // (32 * _PAIRS_PER_THREAD), 1),
    )


# These are parts of one buffer, anywhere in it: do not specialise the kernel on their alignment.
@Kernel
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_and_cache_kernel(
    qkv,
    cos_sin,
    positions,
    slots,
    k_cache,
    v_cache,
    stride_qkv,
    stride_cos_sin,
    stride_block,
    stride_head,
    stride_token,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Process some heads of one row. Heads are those of q, then k, then v; a program may have some of
    each."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    first_v: tl.constexpr = NUM_HEADS - NUM_KV_HEADS
    first_k: tl.constexpr = first_v - NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (heads < NUM_HEADS) & (dims < HALF)
    rotated = heads < first_v

    at_qkv = qkv + row * stride_qkv + heads * (2 * HALF) + dims
    first = tl.load(at_qkv, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at_qkv + HALF, mask=inside, other=0.0).to(tl.float32)
    at_cos = cos_sin + tl.load(positions + row).to(tl.int64) * stride_cos_sin + dims
    # Rounded, as are the products below: the reference models rotate in the weights' dtype.
    cos = tl.load(at_cos, mask=dims < HALF, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(at_cos + HALF, mask=dims < HALF, other=0.0).to(dtype).to(tl.float32)
    turned_first = _rounded(first * cos, dtype) - _rounded(second * sin, dtype)
    turned_second = _rounded(second * cos, dtype) + _rounded(first * sin, dtype)
    first = tl.where(rotated, turned_first, first).to(dtype)
    second = tl.where(rotated, turned_second, second).to(dtype)
    tl.store(at_qkv, first, mask=inside & rotated)
    tl.store(at_qkv + HALF, second, mask=inside & rotated)

    slot = tl.load(slots + row).to(tl.int64)
    at_slot = slot // PAGE_SIZE * stride_block + slot % PAGE_SIZE * stride_token
    at_k = k_cache + at_slot + (heads - first_k) * stride_head + dims
    is_k = inside & rotated & (heads >= first_k)
    tl.store(at_k, first, mask=is_k)
    tl.store(at_k + HALF, second, mask=is_k)
    at_v = v_cache + at_slot + (heads - first_v) * stride_head + dims
    is_v = inside & (heads >= first_v)
    tl.store(at_v, first, mask=is_v)
    tl.store(at_v + HALF, second, mask=is_v)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)
