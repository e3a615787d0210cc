"""One core's product, by matrix tiles and by torch, over sizes that fill tiles and that do not."""

from __future__ import annotations

import pytest
import torch

from loraplex.engine.assist.product import PROFILED_ROWS, Product, profile
from loraplex.engine.assist.tasks import AssistPart, AssistTask
from loraplex.kernels.cpu.amx import has_amx

NUM_ROWS = 80
TILES = pytest.param(True, marks=pytest.mark.skipif(not has_amx(), reason="this CPU has no matrix tiles"))


def slice_of(
    dtype: torch.dtype,
    ranks: tuple[int, ...],
    in_features: int,
    out_features: int,
    rows: tuple[int, int],
    *,
    has_tiles: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, which was NaNs before, and what it should be. x and y have gaps between their rows."""
    x = torch.randn(NUM_ROWS, in_features + 8).to(dtype)
    y = torch.full((NUM_ROWS, len(ranks) * out_features + 24), float("nan"), dtype=dtype)
    weights, parts, start = [], [], 0
    expected = y.double()
    for index, rank in enumerate(ranks):
        a = (torch.randn(rank, in_features) / in_features**0.5).to(dtype)
        b = (torch.randn(rank, out_features) / rank**0.5).to(dtype)
        parts.append(
            AssistPart(
                weights=0,
                a_offset_bytes=start,
                b_offset_bytes=start + a.nbytes,
                rank=rank,
                scale=0.7,
                out_start=8 + index * out_features,
                out_features=out_features,
            )
        )
        start += a.nbytes + b.nbytes
        weights += [a.flatten(), b.flatten()]
        product = 0.7 * (x[:, :in_features].double() @ a.double().t()) @ b.double()
        columns = slice(8 + index * out_features, 8 + (index + 1) * out_features)
        expected[rows[0] : rows[1], columns] = product[rows[0] : rows[1]]
    task = AssistTask(
        num_rows=NUM_ROWS,
        in_features=in_features,
        x_start=0,
        x_stride=x.shape[1],
        y_start=0,
        y_stride=y.shape[1],
        parts=tuple(parts),
    )
    blocks = [tensor.flatten().view(torch.uint8) for tensor in (x, y, torch.cat(weights))]
    product = Product(dtype, blocks[0], blocks[1], has_tiles=has_tiles)
    product.compute(task, {0: blocks[2]}, *rows)
    return y.double(), expected


@pytest.mark.parametrize("has_tiles", [False, TILES])
@pytest.mark.parametrize("rows", [(0, 1), (3, 19), (7, 24), (16, 48), (0, 80), (11, 76)])
@pytest.mark.parametrize("ranks", [(1,), (7, 16), (64, 33, 8)])
def test_bfloat16(rows: tuple[int, int], ranks: tuple[int, ...], has_tiles: bool) -> None:
    found, expected = slice_of(torch.bfloat16, ranks, 96, 160, rows, has_tiles=has_tiles)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize(("in_features", "out_features"), [(32, 32), (256, 1056), (64, 128), (40, 50)])
def test_bfloat16_widths(in_features: int, out_features: int) -> None:
    found, expected = slice_of(
        torch.bfloat16, (100,), in_features, out_features, (5, 60), has_tiles=has_amx()
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("rows", [(0, 1), (3, 19), (11, 76)])
def test_float32(rows: tuple[int, int]) -> None:
    found, expected = slice_of(torch.float32, (1, 20), 96, 160, rows, has_tiles=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.skipif(not has_amx(), reason="this CPU has no matrix tiles")
def test_tiles_are_no_less_exact_than_torch() -> None:
    errors = []
    for has_tiles in (True, False):
        torch.manual_seed(7)
        found, expected = slice_of(torch.bfloat16, (64,), 512, 512, (0, NUM_ROWS), has_tiles=has_tiles)
        errors.append((found - expected).nan_to_num().square().mean().sqrt().item())
    assert errors[0] < 1.1 * errors[1]


def test_a_profile_has_every_size() -> None:
    times_us = profile(torch.float32, 64, 64, 4)
    assert tuple(times_us) == PROFILED_ROWS
    assert min(times_us.values()) > 0
