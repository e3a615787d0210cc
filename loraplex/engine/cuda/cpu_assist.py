"""CPU workers as a step of the device uses them: they compute LoRA for layers that have not arrived yet.

Before a step is launched its tasks are submitted, one for each layer, group of linears and assisted span. The
step's own kernels start them, or skip those whose weights have arrived meanwhile, and wait for the outputs
(`kernels.triton.assist`). All of it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from loraplex.core.arrays import IntArray
from loraplex.core.errors import CapacityError
from loraplex.core.modules import GROUPS, MODULE_INDEX, MODULES
from loraplex.core.shape import ModelShape
from loraplex.engine.assist import tasks
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.cuda import driver
from loraplex.engine.cuda.adapter_block import table_bytes
from loraplex.engine.cuda.adapter_store import Arrival
from loraplex.engine.cuda.host_memory import HostMemory
from loraplex.engine.cuda.step_sizes import DECODE_ROWS
from loraplex.kernels.lora import TABLE_COLUMNS
from loraplex.kernels.triton.assist import AssistMemory, AssistSpans
from loraplex.kernels.triton.lora_step import LoraStep

_PROFILED_RANK: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistedSpan:
    """Rows of a step whose adapter is being copied. `source`: the byte of host memory where its block begins.
    `num_layers`: workers may compute this many of its first layers."""

    first: int
    count: int
    source: int
    arrival: Arrival
    num_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistedTasks:
    """The submitted tasks of a step, tickets [first_ticket, last_ticket], and their groups of linears."""

    spans: tuple[AssistedSpan, ...]
    groups: tuple[str, ...]
    num_layers: int
    first_ticket: int
    last_ticket: int

    def fields(self) -> dict[str, IntArray]:
        """Return the fields of the step's block of integers (`step_buffers`)."""
        copies = [span.arrival.tickets[1:] for span in self.spans]
        ends = max(span.first + span.count for span in self.spans)
        row_spans = np.zeros(ends, dtype=np.int64)
        for place, span in enumerate(self.spans, 1):
            row_spans[span.first : span.first + span.count] = place
        places = [self.groups.index(group) if group in self.groups else -1 for group in GROUPS]
        head = [self.first_ticket - 1, len(self.spans), len(self.groups), self.num_layers]
        spans = [(span.count, span.num_layers, _table_address(span)) for span in self.spans]
        return {
            "assist_head": np.array(head, dtype=np.int64),
            "assist_groups": np.array(places, dtype=np.int64),
            "assist_spans": np.array(spans, dtype=np.int64),
            "assist_copies": np.array(copies, dtype=np.int64),
            "row_spans": row_spans,
        }


class CpuAssist:
    """The pool of workers, over host memory that holds the adapters."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        memory: HostMemory,
        num_workers: int,
        max_rows: int,
        rows_each: int | None = None,
    ) -> None:
        """Start the workers in the background. `max_rows`: rows of prompts in the largest step. `rows_each`:
        number of rows that are worth a core, by which their cost is predicted; None for what they measure."""
        self._shape = shape
        self._host = memory
        self._pinned: list[int] = []
        widest_in = max(shape.in_features(module) for module in MODULES)
        self._widths = {group: sum(map(shape.out_features, modules)) for group, modules in GROUPS.items()}
        self._num_rows = num_rows = max_rows + DECODE_ROWS[-1]  # decoding rows stand before the prompts
        self._pool = AssistPool(
            num_workers=num_workers,
            dtype=dtype,
            x_elements=num_rows * widest_in,
            y_elements=num_rows * max(self._widths.values()),
            profiled=(shape.hidden_size, shape.q_size, _PROFILED_RANK),
            rows_each=rows_each,
        )
        try:
            if device.type == "cuda":
                self._pin()
            self._weights = self._pool.add_weights(memory.block)
        except BaseException:
            self.close()
            raise
        self.memory = memory_of(self._pool)

    @property
    def num_ready(self) -> int:
        """Number of workers that are ready."""
        return self._pool.num_workers

    def arm(self) -> None:
        """Wake the workers for tasks to come."""
        self._pool.arm()

    def submit(self, spans: Sequence[AssistedSpan]) -> AssistedTasks | None:
        """Submit the tasks of the step that is launched next; None if there are none, or if the workers have
        too many already."""
        touched = frozenset[str]().union(*(span.arrival.weights.touched for span in spans))
        groups = tuple(group for group in GROUPS if group in touched)
        num_layers = max((span.num_layers for span in spans), default=0)
        records = np.zeros(
            (num_layers, len(groups), len(spans), tasks.record_words(self._pool.num_slots)), dtype=np.int64
        )
        if not 0 < records[..., 0].size <= self._pool.ring_size:
            return None
        for place, span in enumerate(spans):
            assert span.first + span.count <= self._num_rows, "workers share no memory for these rows"
            for number, group in enumerate(groups):
                self._write_tasks(records[:, number, place], span, group)
        try:
            last = self._pool.submit_records(records.reshape(-1, records.shape[-1]))
        except CapacityError:
            return None
        return AssistedTasks(
            spans=tuple(spans),
            groups=groups,
            num_layers=num_layers,
            first_ticket=last + 1 - records[..., 0].size,
            last_ticket=last,
        )

    def num_computed(self, submitted: AssistedTasks) -> int:
        """Return how many tasks of a step that is over were computed by workers."""
        tickets = range(submitted.first_ticket, submitted.last_ticket + 1)
        return sum(not self._pool.control.is_skipped(ticket) for ticket in tickets)

    def check(self) -> None:
        """Raise EngineDeadError if any output may be wrong."""
        self._pool.raise_if_failed()

    def close(self) -> None:
        """End the workers; call it after the last step."""
        try:
            if self._pinned:
                torch.cuda.synchronize()
        finally:
            while self._pinned:
                driver.unpin(self._pinned.pop())
            self._pool.close()

    def _pin(self) -> None:
        for block in self._pool.blocks:
            error = driver.pin(block.address, block.memory.numel())
            if error != 0:
                raise CapacityError(
                    f"memory of CPU LoRA workers cannot be pinned (CUDA error {error}); allow more of it "
                    "(ulimit -l), or choose --cold-start pipelined"
                )
            self._pinned.append(block.address)

    def _write_tasks(self, records: IntArray, span: AssistedSpan, group: str) -> None:
        """Write the records of one group in every layer. The block in host memory begins with a table of its
        modules, whose offsets count from there."""
        modules, num_layers = GROUPS[group], len(records)
        in_features, width = self._shape.in_features(modules[0]), self._widths[group]
        records[:, tasks.NUM_ROWS : tasks.SHARES] = (
            span.count,
            in_features,
            span.first * in_features,
            in_features,
            span.first * width,
            width,
            len(modules),
        )
        end = span.source + table_bytes(self._shape)
        table = self._host.span(span.source, end).view(torch.int64).numpy()
        table = table.reshape(-1, len(MODULES), TABLE_COLUMNS)[:num_layers]
        first = tasks.parts_start(self._pool.num_slots)
        for place, module in enumerate(modules):
            a, b, rank, out_start, out_features, scale = table[:, MODULE_INDEX[module]].T
            part = records[:, first + place * tasks.PART_WORDS :][:, : tasks.PART_WORDS]
            part[:, 0] = self._weights
            part[:, 1:] = np.stack(
                (a + span.source, b + span.source, rank, scale, out_start, out_features), axis=1
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistedStep:
    """A replacement for the `LoraStep` of a step's prompts that computes each group of linears where its
    weights are: on the device, or on CPU workers."""

    on_device: LoraStep
    spans: AssistSpans

    @property
    def groups(self) -> frozenset[str]:
        return self.on_device.groups

    def gather(self) -> None:
        self.on_device.gather()

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, shape: ModelShape, layer: int, group: str) -> None:
        self.shrink(x_TI, layer, group)
        self.expand(y_TO, x_TI.shape[1], shape, layer, group)

    def shrink(self, x_TI: torch.Tensor, layer: int, group: str) -> None:
        self.spans.send(x_TI, self.on_device.tiles_N2, self.on_device.entries, layer, group)
        self.on_device.shrink(x_TI, layer, group)

    def expand(self, y_TO: torch.Tensor, in_features: int, shape: ModelShape, layer: int, group: str) -> None:
        self.on_device.expand(y_TO, in_features, shape, layer, group)
        self.spans.collect(y_TO, tuple(map(shape.out_features, GROUPS[group])), layer, group)


def memory_of(pool: AssistPool) -> AssistMemory:
    """Return a pool's memory as kernels use it."""
    return AssistMemory(
        x=pool.x,
        y=pool.y,
        words=pool.control.words,
        done=pool.control.done_place,
        skips=pool.control.skips_place,
        ring_size=pool.ring_size,
        num_slots=pool.num_slots,
    )


def meta_memory(dtype: torch.dtype, num_workers: int) -> AssistMemory:
    """Return what kernels of a pool with so many workers are compiled for, without memory."""
    return AssistMemory(
        x=torch.empty(1, dtype=dtype, device="meta"),
        y=torch.empty(1, dtype=dtype, device="meta"),
        words=torch.empty(1, dtype=torch.int64, device="meta"),
        done=0,
        skips=0,
        ring_size=1,
        num_slots=num_workers,
    )


def _table_address(span: AssistedSpan) -> int:
    weights = span.arrival.weights
    return weights.table_address(weights.max_rank)
