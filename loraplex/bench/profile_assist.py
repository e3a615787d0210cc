"""Measurements of `loraplex profile`: LoRA on CPU workers, with the model's widths."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch

from loraplex.bench.alternating import time_alternating
from loraplex.bench.profile_host import Report
from loraplex.core.modules import GROUPS
from loraplex.core.shape import ModelShape
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.assist.tasks import AssistPart, AssistTask
from loraplex.engine.cuda.streams import SideStream
from loraplex.kernels.triton.fetch import fetch
from loraplex.perf.assist_cost import AssistCost, AssistSample, fit_assist_cost

_TOKENS: Final = (16, 64, 128, 256)
_RANKS: Final = (8, 64)
_NUM_LAYERS: Final = 16
"""Weights of this many layers take turns, as in a step: a core's caches hold none of them."""
_READY_S: Final = 120.0
_WAIT_S: Final = 60.0
_PREPARE_S: Final = 300e-6
"""Seconds for workers to prepare a task before it is started, as they have while the device computes."""


def measure_assist(
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    device: torch.device,
    num_workers: int,
    repeats: int,
    report: Report,
) -> AssistCost:
    """Measure q, k and v of one layer, on all workers and on a third of them."""
    samples: list[AssistSample] = []
    rows_each: int | None = None  # as measured by all workers; others would measure a little more or less
    for number in sorted({num_workers, max(num_workers // 3, 1)}, reverse=True):
        with ExitStack() as closing:
            tasks = _Tasks(shape, dtype, number, rows_each, closing)
            rows_each = tasks.rows_each
            timed = [partial(tasks.seconds, tokens, rank) for tokens in _TOKENS for rank in _RANKS]
            took_s = time_alternating(timed, repeats=repeats, report=report)
            sizes = [(tokens, rank) for tokens in _TOKENS for rank in _RANKS]
            samples += [
                AssistSample(
                    num_tokens=tokens,
                    weights=tasks.weights(rank),
                    num_workers=tasks.num_workers,
                    seconds=seconds,
                    rows_each=rows_each,
                )
                for (tokens, rank), seconds in zip(sizes, took_s, strict=True)
            ]
    return fit_assist_cost(
        samples,
        round_trip_s=_round_trip_s(device, repeats),
        token_s=_token_s(shape, dtype, device, repeats),
    )


class _Tasks:
    """A pool of workers, and tasks for it."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        num_workers: int,
        rows_each: int | None,
        closing: ExitStack,
    ) -> None:
        self._in = shape.hidden_size
        self._outs = [shape.out_features(module) for module in GROUPS["qkv"]]
        self._itemsize = dtype.itemsize
        self._layer_bytes = sum(self.weights(max(_RANKS))) * dtype.itemsize
        self._block = SharedBlock(_NUM_LAYERS * self._layer_bytes)
        closing.callback(self._block.close)
        self._block.memory.view(dtype).normal_(std=0.02)
        self._pool = AssistPool(
            num_workers=num_workers,
            dtype=dtype,
            x_elements=max(_TOKENS) * self._in,
            y_elements=max(_TOKENS) * sum(self._outs),
            profiled=(self._in, self._outs[0], max(_RANKS)),
            rows_each=rows_each,
        )
        closing.callback(self._pool.close)
        self._pool.x.normal_()
        self._index = self._pool.add_weights(self._block)
        # Without any, one thread computes.
        self.num_workers = max(self._pool.wait_ready(_READY_S), 1)
        self.rows_each = self._pool.rows_each
        self._num_submitted = 0

    def weights(self, rank: int) -> tuple[int, ...]:
        """Return the weights of each part."""
        return tuple(rank * (self._in + out) for out in self._outs)

    def seconds(self, num_tokens: int, rank: int) -> float:
        """Return the seconds from a task's start to its end."""
        self._num_submitted += 1
        start = self._num_submitted % _NUM_LAYERS * self._layer_bytes
        ticket = self._pool.submit(self._task(num_tokens, rank, start))
        _spin(_PREPARE_S)
        started = time.perf_counter()
        self._pool.start(ticket)
        assert self._pool.wait(ticket, _WAIT_S), "CPU LoRA workers do not answer"
        return time.perf_counter() - started

    def _task(self, num_tokens: int, rank: int, start: int) -> AssistTask:
        parts, out_start = [], 0
        for out in self._outs:
            b_offset = start + rank * self._in * self._itemsize
            parts.append(
                AssistPart(
                    weights=self._index,
                    a_offset_bytes=start,
                    b_offset_bytes=b_offset,
                    rank=rank,
                    scale=1.0,
                    out_start=out_start,
                    out_features=out,
                )
            )
            start, out_start = b_offset + rank * out * self._itemsize, out_start + out
        return AssistTask(
            num_rows=num_tokens,
            in_features=self._in,
            x_start=0,
            x_stride=self._in,
            y_start=0,
            y_stride=out_start,
            parts=tuple(parts),
        )


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _round_trip_s(device: torch.device, repeats: int) -> float:
    """Return the seconds to copy a word from the device and one back to it; 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    word, host = torch.zeros(1, device=device), torch.zeros(1, pin_memory=True)
    stream = SideStream(device)

    def there_and_back() -> float:
        started = time.perf_counter()
        with stream.entered():
            host.copy_(word, non_blocking=True)
            stream.synchronize()
            word.copy_(host, non_blocking=True)
            stream.synchronize()
        return time.perf_counter() - started

    return time_alternating([there_and_back], repeats=10 * repeats)[0]


def _token_s(shape: ModelShape, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Return the seconds that one more token's inputs and outputs of q, k and v take on the bus; 0 without a
    GPU."""
    if device.type != "cuda":
        return 0.0
    width = shape.hidden_size + sum(map(shape.out_features, GROUPS["qkv"]))
    num_tokens = max(_TOKENS)
    pinned = torch.zeros(num_tokens * width, dtype=dtype, pin_memory=True)
    target = torch.zeros(num_tokens * width, dtype=dtype, device=device)

    def transfer(count: int) -> Callable[[], float]:
        def timed() -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            fetch(target[: count * width], pinned[: count * width])
            torch.cuda.synchronize()
            return time.perf_counter() - started

        return timed

    few, many = time_alternating([transfer(num_tokens // 8), transfer(num_tokens)], repeats=10 * repeats)
    return max(many - few, 0.0) / (num_tokens - num_tokens // 8)
