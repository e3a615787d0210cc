"""Pools with real processes, random weights, and what their tasks should come to."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.assist.crew import Patience
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.assist.tasks import AssistPart, AssistTask

IN, OUT, ROWS = 96, 160, 300
READY_S = 120.0
WAIT_S = 60.0


class Loras:
    """A block of weights with one LoRA for each rank; their outputs are stacked."""

    def __init__(self, pool: AssistPool, dtype: torch.dtype, ranks: tuple[int, ...] = (8,)) -> None:
        num_elements = sum(rank * (IN + OUT) for rank in ranks)
        self.block = SharedBlock(num_elements * dtype.itemsize)
        values = self.block.memory.view(dtype)
        values.normal_(std=0.2)
        self.matrices: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        self.parts: tuple[AssistPart, ...] = ()
        index, start = pool.add_weights(self.block), 0
        for number, rank in enumerate(ranks):
            middle, end = start + rank * IN, start + rank * (IN + OUT)
            scale = 0.5 + 0.7 * number
            self.matrices.append(
                (values[start:middle].view(rank, IN), values[middle:end].view(rank, OUT), scale)
            )
            part = AssistPart(
                weights=index,
                a_offset_bytes=start * dtype.itemsize,
                b_offset_bytes=middle * dtype.itemsize,
                rank=rank,
                scale=scale,
                out_start=number * OUT,
                out_features=OUT,
            )
            self.parts += (part,)
            start = end

    def task(self, num_rows: int, **changes: Any) -> AssistTask:
        width = len(self.parts) * OUT
        fields = {"x_start": 0, "x_stride": IN, "y_start": 0, "y_stride": width, "parts": self.parts}
        return AssistTask(num_rows=num_rows, in_features=IN, **(fields | changes))

    def expected(self, x_TI: torch.Tensor) -> torch.Tensor:
        """In float64, all parts side by side."""
        products = [scale * (x_TI.double() @ a.double().t()) @ b.double() for a, b, scale in self.matrices]
        return torch.cat(products, dim=1)


@contextmanager
def running_pool(
    num_workers: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[AssistPool]:
    """A pool whose workers are ready, with room for ROWS rows of four stacked outputs."""
    options = {"patience": Patience(idle_s=1.0, slice_s=30.0)} | options
    with AssistPool(
        num_workers=num_workers,
        dtype=dtype,
        x_elements=ROWS * IN,
        y_elements=ROWS * OUT * 4,
        profiled=(IN, OUT, 8),
        **options,
    ) as pool:
        assert pool.wait_ready(READY_S) == num_workers
        yield pool


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


def check(pool: AssistPool, loras: Loras, num_rows: int) -> None:
    """A task over fresh numbers comes to what it should, in every row and no other."""
    ticket, expected = submit_random(pool, loras, num_rows)
    pool.start(ticket)
    assert pool.wait(ticket, WAIT_S)
    assert_equal(pool, expected)


def submit_random(pool: AssistPool, loras: Loras, num_rows: int) -> tuple[int, torch.Tensor]:
    pool.x.normal_()
    pool.y.fill_(float("nan"))
    expected = loras.expected(pool.x[: num_rows * IN].view(num_rows, IN))
    return pool.submit(loras.task(num_rows)), expected


def assert_equal(pool: AssistPool, expected: torch.Tensor) -> None:
    found = pool.y[: expected.numel()].view(expected.shape)
    allowed = tolerance(found.dtype)
    torch.testing.assert_close(found.double(), expected, rtol=allowed, atol=allowed)
    assert pool.y[expected.numel() :].isnan().all()


def done_word(pool: AssistPool, slot: int) -> int:
    return ctypes.c_int64.from_address(pool.control.done_address(slot)).value


def eventually(condition: Callable[[], object], timeout_s: float = WAIT_S) -> bool:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return False


def process_state(pid: int) -> str | None:
    """The letter that Linux has for it; None for one that is gone or only waits to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else state


def open_fds() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # the listing's own
            continue
    return found
