"""The LoRA product of some rows on one core: by matrix tiles where the core has them, by torch otherwise.

Torch's libraries compile a kernel for every new number of rows, which takes far longer than the product
itself. So rows are given to them in blocks of a few sizes, the last one padded.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

import torch
from numba import carray

from loraplex.engine.assist.tasks import AssistPart, AssistTask
from loraplex.kernels.cpu import amx_lora, team
from loraplex.kernels.cpu.intrinsics import prefetch

TILE_ROWS: Final = 32
PROFILED_ROWS: Final = (8, 16, 32, 64, 128)
_PROFILE_REPEATS: Final = 5
_LINE_BYTES: Final = 64
_MAX_TOUCHED_BYTES: Final = 1 << 20
"""Bytes of weights to prefetch: what a core's own cache holds beside x and y."""


class Product:
    """Computes slices of tasks over blocks of one dtype. Used by one thread."""

    def __init__(
        self, dtype: torch.dtype, x: torch.Tensor, y: torch.Tensor, *, has_tiles: bool | None = None
    ) -> None:
        """`x` and `y`: bytes of the blocks that tasks point into. `has_tiles`: False to compute by torch."""
        self._dtype = dtype
        self._x = x.view(dtype)
        self._y = y.view(dtype)
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        self._tiles = amx_lora.amx_lora() if dtype == torch.bfloat16 and has_tiles is not False else None

    def compute(self, task: AssistTask, weights: Mapping[int, torch.Tensor], start: int, end: int) -> None:
        """Compute y of rows [start, end). `weights`: bytes of the blocks that its parts name, by index."""
        self._work(task, weights, start, end)()

    def prepare(
        self, task: AssistTask, weights: Mapping[int, torch.Tensor], start: int, end: int
    ) -> Callable[[], object]:
        """Prefetch the weights; return a function that computes y of rows [start, end), to be called when x
        is complete."""
        left_bytes = _MAX_TOUCHED_BYTES
        for part in task.parts:
            address = weights[part.weights].data_ptr()
            for offset, width in (
                (part.a_offset_bytes, task.in_features),
                (part.b_offset_bytes, part.out_features),
            ):
                num_bytes = min(part.rank * width * self._dtype.itemsize, left_bytes)
                left_bytes -= num_bytes
                _touch_kernel()((ctypes.c_int64 * 2)(address + offset, num_bytes))
        return self._work(task, weights, start, end)

    def _work(
        self, task: AssistTask, weights: Mapping[int, torch.Tensor], start: int, end: int
    ) -> Callable[[], object]:
        if not task.parts:
            return lambda: None
        if self._tiles is not None and all(
            amx_lora.takes(task.in_features, part.out_features) for part in task.parts
        ):
            return partial(self._tiles, self._tile_arguments(task, weights, start, end))
        return partial(self._compute_by_torch, task, weights, start, end)

    def _tile_arguments(
        self, task: AssistTask, weights: Mapping[int, torch.Tensor], start: int, end: int
    ) -> ctypes.Array[ctypes.c_int64]:
        size = self._dtype.itemsize
        max_rank = max(part.rank for part in task.parts)
        scratch = self._scratch_bytes(amx_lora.scratch_bytes(task.in_features, max_rank))
        x = self._x.data_ptr() + (task.x_start + start * task.x_stride) * size
        y = self._y.data_ptr() + (task.y_start + start * task.y_stride) * size
        words = [x, task.x_stride * size, end - start, task.in_features, len(task.parts), scratch]
        for part in task.parts:
            address = weights[part.weights].data_ptr()
            words += [
                address + part.a_offset_bytes,
                address + part.b_offset_bytes,
                part.rank,
                struct.unpack("i", struct.pack("f", part.scale))[0],
                y + part.out_start * size,
                task.y_stride * size,
                part.out_features,
            ]
        return (ctypes.c_int64 * len(words))(*words)

    def _scratch_bytes(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes` of scratch memory, at the beginning of a cache line."""
        found = self._scratch.get(("tiles", 0))
        if found is None or found.numel() < num_bytes + _LINE_BYTES:
            found = self._scratch["tiles", 0] = torch.zeros(num_bytes + _LINE_BYTES, dtype=torch.uint8)
        return -(-found.data_ptr() // _LINE_BYTES) * _LINE_BYTES

    def _compute_by_torch(
        self, task: AssistTask, weights: Mapping[int, torch.Tensor], start: int, end: int
    ) -> None:
        matrices = [self._matrices(part, weights[part.weights], task.in_features) for part in task.parts]
        for first in range(start, end, TILE_ROWS):
            num_rows = min(TILE_ROWS, end - first)
            x_TI = self._x_tile(task, first, num_rows)
            for part, (a_RI, b_t_RO) in zip(task.parts, matrices, strict=True):
                y_TO = self._y.as_strided(
                    (num_rows, part.out_features),
                    (task.y_stride, 1),
                    task.y_start + first * task.y_stride + part.out_start,
                )
                self._multiply(x_TI, a_RI, b_t_RO, part.scale, y_TO)

    def _matrices(
        self, part: AssistPart, weights: torch.Tensor, in_features: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (
            weights[offset : offset + part.rank * width * self._dtype.itemsize].view(self._dtype)
            for offset, width in (
                (part.a_offset_bytes, in_features),
                (part.b_offset_bytes, part.out_features),
            )
        )
        return a.view(part.rank, in_features), b.view(part.rank, part.out_features)

    def _x_tile(self, task: AssistTask, first: int, num_rows: int) -> torch.Tensor:
        """Return the rows, padded to the size of a tile."""
        x_TI = self._x.as_strided(
            (num_rows, task.in_features), (task.x_stride, 1), task.x_start + first * task.x_stride
        )
        tile_rows = _tile_rows(num_rows)
        if tile_rows == num_rows:
            return x_TI
        tile = self._scratch_tile("x", tile_rows, task.in_features)
        tile[:num_rows] = x_TI
        return tile

    def _multiply(
        self, x_TI: torch.Tensor, a_RI: torch.Tensor, b_t_RO: torch.Tensor, scale: float, y_TO: torch.Tensor
    ) -> None:
        # In this order x, the smaller one, is repacked for the product.
        shrunk_TR = torch.mm(a_RI, x_TI.t()).t()
        num_rows = y_TO.shape[0]
        if x_TI.shape[0] == num_rows:
            y_TO.addmm_(shrunk_TR, b_t_RO, beta=0, alpha=scale)
        else:
            tile = self._scratch_tile("y", x_TI.shape[0], y_TO.shape[1])
            y_TO.copy_(tile.addmm_(shrunk_TR, b_t_RO, beta=0, alpha=scale)[:num_rows])

    def _scratch_tile(self, use: str, num_rows: int, width: int) -> torch.Tensor:
        if (use, width) not in self._scratch:
            self._scratch[use, width] = torch.zeros(TILE_ROWS, width, dtype=self._dtype)
        return self._scratch[use, width][:num_rows]


@lru_cache(maxsize=1)
def _touch_kernel() -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(team.kernel(_touch))


def _touch(block: Any) -> None:
    args = carray(block, 2)
    prefetch(args[0], args[1])


def _tile_rows(num_rows: int) -> int:
    """Return the next power of two."""
    return 1 << (num_rows - 1).bit_length()


def profile(dtype: torch.dtype, in_features: int, out_features: int, rank: int) -> dict[int, float]:
    """Return number of rows -> microseconds on this thread. Also makes the libraries load their kernels."""
    num_rows = max(PROFILED_ROWS)
    x, y = (torch.zeros(num_rows * width, dtype=dtype) for width in (in_features, out_features))
    weights = torch.zeros(rank * (in_features + out_features), dtype=dtype).view(torch.uint8)
    part = AssistPart(
        weights=0,
        a_offset_bytes=0,
        b_offset_bytes=rank * in_features * dtype.itemsize,
        rank=rank,
        scale=1.0,
        out_start=0,
        out_features=out_features,
    )
    task = AssistTask(
        num_rows=num_rows,
        in_features=in_features,
        x_start=0,
        x_stride=in_features,
        y_start=0,
        y_stride=out_features,
        parts=(part,),
    )
    product = Product(dtype, x.view(torch.uint8), y.view(torch.uint8))
    return {rows: _fastest_us(product, task, weights, rows) for rows in PROFILED_ROWS}


def _fastest_us(product: Product, task: AssistTask, weights: torch.Tensor, num_rows: int) -> float:
    times = []
    for _ in range(_PROFILE_REPEATS):
        started = time.perf_counter()
        product.compute(task, {0: weights}, 0, num_rows)
        times.append(time.perf_counter() - started)
    return 1e6 * min(times)
