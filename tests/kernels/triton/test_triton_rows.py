"""Row-wise Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.reference import TorchKernels
from loraplex.kernels.triton.rows import add_rms_norm, rms_norm, silu_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TORCH = TorchKernels()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
SIZES = pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (5, 24), (3, 513), (1, 1536)])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(DEVICE, dtype)


@DTYPES
@SIZES
def test_rms_norm_equals_torch(num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = normal(num_rows, size, dtype=dtype), normal(size, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


@DTYPES
def test_rms_norm_takes_heads_inside_wider_rows(dtype: torch.dtype) -> None:
    heads, weight = normal(3, 50, 24, dtype=dtype), normal(24, dtype=dtype)
    part = heads[:, 2:47]
    normed = rms_norm(part, weight, 1e-6)
    assert normed.is_contiguous()
    torch.testing.assert_close(normed, TORCH.rms_norm(part, weight, 1e-6))


def test_rms_norm_takes_no_rows() -> None:
    assert rms_norm(normal(0, 24, dtype=torch.float32), normal(24, dtype=torch.float32), 1e-6).shape == (
        0,
        24,
    )


@DTYPES
@SIZES
def test_add_rms_norm_changes_the_residual_in_place(num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = normal(num_rows, size, dtype=dtype), normal(num_rows, size, dtype=dtype)
    weight = normal(size, dtype=dtype)
    expected_residual = residual.clone()
    expected = TORCH.add_rms_norm(x, expected_residual, weight, 1e-6)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-6), expected)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)


def test_add_rms_norm_leaves_what_is_between_strided_rows() -> None:
    weight = normal(40, dtype=torch.float32)
    x, residual = normal(4, 48, dtype=torch.float32), normal(4, 56, dtype=torch.float32)
    expected_residual = residual.clone()
    expected = TORCH.add_rms_norm(x[:, :40], expected_residual[:, :40], weight, 1e-6)
    torch.testing.assert_close(add_rms_norm(x[:, :40], residual[:, :40], weight, 1e-6), expected)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)


@DTYPES
@SIZES
def test_silu_mul_equals_torch(num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 5 * normal(num_rows, 2 * size, dtype=dtype)
    torch.testing.assert_close(silu_mul(gate_up), TORCH.silu_mul(gate_up))


def test_silu_mul_takes_strided_rows() -> None:
    gate_up = normal(3, 100, dtype=torch.float32)[:, 10:58]
    torch.testing.assert_close(silu_mul(gate_up), TORCH.silu_mul(gate_up))


def test_half_precision_is_rounded_where_torch_rounds() -> None:
    """A rounding left out changes the last bit of every fourth element or so, and adds up over a model."""
    x, weight = normal(4, 256, dtype=torch.float16), normal(256, dtype=torch.float16)
    normed, activated = rms_norm(x, weight, 1e-5), silu_mul(x)
    assert (normed != TORCH.rms_norm(x, weight, 1e-5)).float().mean() < 0.02
    assert (activated != TORCH.silu_mul(x)).float().mean() < 0.02
