"""The round trip between a device and CPU workers, by the kernels of a step."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.assist.tasks import AssistPart, AssistTask
from loraplex.engine.cuda import driver
from loraplex.engine.cuda.cpu_assist import memory_of
from loraplex.kernels.triton.assist import AssistSpans
from loraplex.perf.assist_split import MAX_SPANS

WIDTH = 32
READY_S = 120.0


def round_trips_us(num_workers: int, count: int) -> list[float]:
    """Return the microseconds from sending one row of inputs to having added its outputs, each time."""
    device = torch.device("cuda")
    torch.zeros(1, device=device)  # makes the device this process's own
    with ExitStack() as closing:
        weights = SharedBlock(1 << 16)
        closing.callback(weights.close)
        pool = closing.enter_context(
            AssistPool(num_workers=num_workers, dtype=torch.bfloat16, x_elements=1 << 12, y_elements=1 << 12)
        )
        for block in pool.blocks:
            assert driver.pin(block.address, block.memory.numel()) == 0
            closing.callback(driver.unpin, block.address)
        index = pool.add_weights(weights)
        assert pool.wait_ready(READY_S) == num_workers
        table = torch.ones(7 * 6, dtype=torch.int64, device=device)  # any rank but 0
        spans = one_span(pool, table)
        x, y = (torch.zeros(1, 3 * WIDTH, dtype=torch.bfloat16, device=device) for _ in range(2))
        tiles = torch.zeros(1, 2, dtype=torch.int64, device=device)
        entries = torch.zeros(7, 1, 6, dtype=torch.int64, device=device)
        times_us = []
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            ticket = pool.submit(task(index))
            spans.head_4[0] = ticket - 1
            torch.cuda.synchronize()
            begin.record()
            spans.send(x[:, :WIDTH], tiles, entries, 0, "o")
            spans.collect(y[:, :WIDTH], (WIDTH,), 0, "o")
            end.record()
            end.synchronize()
            times_us.append(begin.elapsed_time(end) * 1e3)
    return times_us


def one_span(pool: AssistPool, table: torch.Tensor) -> AssistSpans:
    """Return a step of one row, one layer and one group, whose weights never arrive. `table`: its adapter's,
    which has to be kept."""
    device = table.device

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    spans = torch.zeros(MAX_SPANS, 3, dtype=torch.int64, device=device)
    spans[0] = integers(1, 1, table.data_ptr())
    return AssistSpans(
        head_4=integers(0, 1, 1, 1),
        groups_G=integers(-1, 0, -1, -1),
        spans_S3=spans,
        copies_SL=torch.ones(MAX_SPANS, 1, dtype=torch.int64, device=device),
        row_spans_T=integers(1),
        modes_S=torch.zeros(MAX_SPANS, dtype=torch.int64, device=device),
        ticket_1=integers(0),
        memory=memory_of(pool),
    )


def task(weights: int) -> AssistTask:
    part = AssistPart(
        weights=weights,
        a_offset_bytes=0,
        b_offset_bytes=4096,
        rank=1,
        scale=1.0,
        out_start=0,
        out_features=WIDTH,
    )
    return AssistTask(
        num_rows=1, in_features=WIDTH, x_start=0, x_stride=WIDTH, y_start=0, y_stride=WIDTH, parts=(part,)
    )
