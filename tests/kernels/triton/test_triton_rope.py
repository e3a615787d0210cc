"""The rotation and the cache write against plain torch."""

from __future__ import annotations

import pytest
import torch
from kernel_batches import kernel_batch

from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.reference import TorchKernels
from loraplex.kernels.triton.rope import rope_and_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TORCH = TorchKernels()
NUM_BLOCKS, BLOCK_SIZE, NUM_POSITIONS = 6, 8, 50
SHAPES = [(4, 2, 16), (3, 3, 24), (14, 2, 32), (1, 1, 80)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch_at(positions: torch.Tensor, slots: torch.Tensor) -> KernelBatch:
    return kernel_batch(positions_T=positions.long(), slots_T=slots.long())


def cos_sin_table(head_dim: int) -> torch.Tensor:
    angles = torch.arange(NUM_POSITIONS)[:, None] * 0.5 ** torch.arange(head_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)


def arena(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Three layers' keys and values, page by page."""
    return torch.zeros(NUM_BLOCKS, 3, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_rope_and_cache_equals_torch(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_rows: int,
    index_type: torch.dtype,
    dtype: torch.dtype,
) -> None:
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim).to(DEVICE, dtype)
    positions = torch.randint(NUM_POSITIONS, (num_rows,)).to(DEVICE, index_type)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:num_rows].to(DEVICE, index_type)
    caches, expected_caches = (arena(num_kv_heads, head_dim, dtype) for _ in range(2))
    expected, table = qkv.clone(), cos_sin_table(head_dim)
    TORCH.rope_and_cache(
        expected, table, batch_at(positions, slots), expected_caches[:, 1, 0], expected_caches[:, 1, 1]
    )
    rope_and_cache(qkv, table, positions, slots, caches[:, 1, 0], caches[:, 1, 1])
    # Half precision to the last bit; float32 may contract a product and a sum.
    tolerance = {} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(qkv, expected, **tolerance)
    torch.testing.assert_close(caches, expected_caches, **tolerance)


def test_rows_of_a_wider_matrix_are_rotated_where_they_are() -> None:
    wide = torch.randn(3, 200, device=DEVICE)
    expected = wide.clone()
    positions, slots = torch.tensor([3, 0, 49], device=DEVICE), torch.tensor([9, 1, 40], device=DEVICE)
    table = cos_sin_table(24)
    caches, expected_caches = (arena(2, 24, torch.float32) for _ in range(2))
    TORCH.rope_and_cache(
        expected[:, :144],
        table,
        batch_at(positions, slots),
        expected_caches[:, 0, 0],
        expected_caches[:, 0, 1],
    )
    rope_and_cache(wide[:, :144], table, positions, slots, caches[:, 0, 0], caches[:, 0, 1])
    torch.testing.assert_close(wide, expected)
    torch.testing.assert_close(caches, expected_caches)


def test_padding_rows_may_share_a_scratch_block() -> None:
    qkv = torch.randn(4, 4 * 16, device=DEVICE)
    caches, table = arena(1, 16, torch.float32), cos_sin_table(16)
    slots = torch.tensor([2 * BLOCK_SIZE + 3, 0, 0, 0], device=DEVICE)
    positions = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    rope_and_cache(qkv, table, positions, slots, caches[:, 2, 0], caches[:, 2, 1])
    written = caches.abs().sum(dim=(1, 2, 3, 5)).nonzero().tolist()
    assert written == [[0, 0], [2, 3]]
    torch.testing.assert_close(caches[2, 2, 1, 0, 3], qkv[0, 48:])


def test_caches_may_be_larger_than_32_bits_of_elements() -> None:
    block_stride = 2**30 + 16
    memory = torch.empty(
        3 * block_stride, dtype=torch.float16, device=DEVICE
    )  # never touched, so never paged in
    size, strides = (3, 1, BLOCK_SIZE, 16), (block_stride, BLOCK_SIZE * 16, 16, 1)
    k_cache, v_cache = memory.as_strided(size, strides), memory[1024:].as_strided(size, strides)
    qkv = torch.randn(1, 3 * 16).to(DEVICE, torch.float16)
    at = torch.tensor([2 * BLOCK_SIZE + 5], device=DEVICE)
    rope_and_cache(qkv, cos_sin_table(16), at, at, k_cache, v_cache)
    assert torch.equal(k_cache[2, 0, 5], qkv[0, 16:32])
    assert torch.equal(v_cache[2, 0, 5], qkv[0, 32:])
