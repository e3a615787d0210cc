"""LoRA products of layers that are not on the device yet, computed by CPU workers (`engine.assist`).

The half of a product that may run beside the base model's copies the inputs to memory that the workers share
and signals them; the other half waits for their results, fetches and adds them. All of it is put on
streams: no thread of the host waits for either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from loraplex.adapters.slab import ModuleSlot, SlabLayout
from loraplex.core.errors import CapacityError, EngineDeadError
from loraplex.core.modules import GROUPS, MODULES
from loraplex.core.shape import ModelShape
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.assist.tasks import AssistPart, AssistTask
from loraplex.engine.cuda import driver
from loraplex.engine.cuda.adapter_block import table_bytes
from loraplex.engine.cuda.adapter_store import Arrival
from loraplex.engine.cuda.host_memory import HostMemory
from loraplex.engine.cuda.step_sizes import DECODE_ROWS
from loraplex.kernels.triton.fetch import fetch
from loraplex.kernels.triton.gate import Gate
from loraplex.kernels.triton.lora_step import LoraStep

_PATIENCE_S: Final = 60.0


class Signals(Protocol):
    """Both are put on the current stream."""

    def start(self, ticket: int) -> None:
        """Let workers start on tasks up to this ticket."""
        ...

    def wait(self, ticket: int) -> None:
        """What follows on the stream comes behind that task."""
        ...

    def close(self) -> None: ...


class HostSignals:
    """Where kernels are interpreted: everything before is done, and what follows comes after."""

    def __init__(self, pool: AssistPool) -> None:
        self._pool = pool

    def start(self, ticket: int) -> None:
        self._pool.start(ticket)

    def wait(self, ticket: int) -> None:
        if not self._pool.wait(ticket, _PATIENCE_S):
            raise EngineDeadError("the CPU LoRA workers do not answer")

    def close(self) -> None:
        """Nothing is held."""


class StreamSignals:
    """The stream itself writes the word that workers look at, and looks at theirs."""

    def __init__(self, pool: AssistPool) -> None:
        self._pinned: list[int] = []
        try:
            for block in pool.blocks:
                error = driver.pin(block.address, block.memory.numel())
                if error != 0:
                    raise CapacityError(
                        f"memory of CPU LoRA workers cannot be pinned (CUDA error {error}); allow more of it "
                        "(ulimit -l), or choose --cold-start auto"
                    )
                self._pinned.append(block.address)
            self._signal = driver.written_words([pool.signal_address])
            self._done = driver.awaited_words(list(pool.done_addresses))
        except BaseException:
            self._unpin()
            raise

    def start(self, ticket: int) -> None:
        self._signal.put(ticket)

    def wait(self, ticket: int) -> None:
        self._done.put(ticket)

    def close(self) -> None:
        """After the last step, and before the pool's own end."""
        try:
            torch.cuda.synchronize()
        finally:
            self._unpin()

    def _unpin(self) -> None:
        while self._pinned:
            driver.unpin(self._pinned.pop())


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistedRows:
    """Rows of a step whose adapter is on its way. `source`: the byte of the host's memory where it is whole;
    `num_layers`: up to which one workers compute, unless it is on the device sooner."""

    first: int
    count: int
    layout: SlabLayout
    source: int
    arrival: Arrival
    num_layers: int


class CpuAssist:
    """The workers as a step sees them. `weights`: the index of the host's memory among theirs."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, pool: AssistPool, weights: int, signals: Signals
    ) -> None:
        self._slab_start = table_bytes(shape)
        self._element_bytes = dtype.itemsize
        self._pool = pool
        self._weights = weights
        self._signals = signals

    @property
    def is_ready(self) -> bool:
        """Whether any worker is there."""
        return self._pool.num_workers > 0

    def arm(self) -> None:
        """Wake the workers for products to come."""
        self._pool.arm()

    def send(
        self, rows: AssistedRows, x_TI: torch.Tensor, slots: Sequence[ModuleSlot], width: int
    ) -> int | None:
        """Have a product of these rows computed, `width` columns wide; its ticket, or None if the workers
        have too much to do."""
        in_features = x_TI.shape[1]
        task = AssistTask(
            num_rows=rows.count,
            in_features=in_features,
            x_start=rows.first * in_features,
            x_stride=in_features,
            y_start=rows.first * width,
            y_stride=width,
            parts=tuple(self._part(rows.source + self._slab_start, slot) for slot in slots),
        )
        try:
            ticket = self._pool.submit(task)
        except CapacityError:
            return None
        shared = self._pool.x[task.x_start : task.x_start + rows.count * in_features]
        shared.view(rows.count, in_features).copy_(_rows(x_TI, rows), non_blocking=True)
        self._signals.start(ticket)
        return ticket

    def add(self, ticket: int, rows: AssistedRows, y_TO: torch.Tensor, slots: Sequence[ModuleSlot]) -> None:
        """Add what came of it, when it has come."""
        self._signals.wait(ticket)
        width = y_TO.shape[1]
        shared = self._pool.y[rows.first * width : (rows.first + rows.count) * width].view(rows.count, width)
        found = torch.empty_like(shared, device=y_TO.device)
        fetch(found, shared)  # a copy would stand in line behind the adapter's
        for slot in slots:
            columns = slice(slot.out_start, slot.out_start + slot.out_features)
            _rows(y_TO, rows)[:, columns] += found[:, columns]

    def check(self) -> None:
        """EngineDeadError if any product may be wrong."""
        self._pool.raise_if_failed()

    def close(self) -> None:
        try:
            self._signals.close()
        finally:
            self._pool.close()

    def _part(self, slab: int, slot: ModuleSlot) -> AssistPart:
        return AssistPart(
            weights=self._weights,
            a_offset_bytes=slab + slot.a_start * self._element_bytes,
            b_offset_bytes=slab + slot.b_start * self._element_bytes,
            rank=slot.lora.rank,
            scale=slot.lora.scale,
            out_start=slot.out_start,
            out_features=slot.out_features,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistedStep:
    """In place of a `LoraStep`, of rows of one adapter: each layer where it is sooner.

    `on_device`: the same by the device's kernels, behind `gate`. Only for steps that run kernel by kernel.
    """

    rows: AssistedRows
    shape: ModelShape
    on_device: LoraStep
    gate: Gate
    assist: CpuAssist
    _sent: dict[tuple[int, str], int] = field(default_factory=dict)  # tickets

    @property
    def groups(self) -> frozenset[str]:
        return self.on_device.groups

    def gather(self) -> None:
        self.gate.await_tables()
        self.on_device.gather()

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, shape: ModelShape, layer: int, group: str) -> None:
        self.shrink(x_TI, layer, group)
        self.expand(y_TO, x_TI.shape[1], shape, layer, group)

    def shrink(self, x_TI: torch.Tensor, layer: int, group: str) -> None:
        slots = self.rows.layout.layers[layer].get(group, ())
        if not slots:
            return
        width = sum(self.shape.out_features(module) for module in GROUPS[group])
        ticket = None if self._is_there(layer) else self.assist.send(self.rows, x_TI, slots, width)
        if ticket is not None:
            self._sent[layer, group] = ticket
            return
        self.gate.await_layer(layer)
        self.on_device.shrink(x_TI, layer, group)

    def expand(self, y_TO: torch.Tensor, in_features: int, shape: ModelShape, layer: int, group: str) -> None:
        slots = self.rows.layout.layers[layer].get(group, ())
        ticket = self._sent.pop((layer, group), None)
        if ticket is not None:
            self.assist.add(ticket, self.rows, y_TO, slots)
        elif slots:
            self.on_device.expand(y_TO, in_features, shape, layer, group)

    def _is_there(self, layer: int) -> bool:
        return layer >= self.rows.num_layers or self.rows.arrival.done.passed


def _rows(tensor: torch.Tensor, rows: AssistedRows) -> torch.Tensor:
    return tensor[rows.first : rows.first + rows.count]


def start_assist(
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    memory: HostMemory,
    num_workers: int,
    max_rows: int,
) -> CpuAssist:
    """Workers over the host's memory for adapters; they start in the background."""
    widest_in = max(shape.in_features(module) for module in MODULES)
    widest_out = max(sum(map(shape.out_features, modules)) for modules in GROUPS.values())
    # Decoding rows stand before the prompts.
    num_rows = max_rows + DECODE_ROWS[-1]
    pool = AssistPool(
        num_workers=num_workers,
        dtype=dtype,
        x_elements=num_rows * widest_in,
        y_elements=num_rows * widest_out,
    )
    try:
        signals: Signals = StreamSignals(pool) if device.type == "cuda" else HostSignals(pool)
        return CpuAssist(shape, dtype, pool, pool.add_weights(memory.block), signals)
    except BaseException:
        pool.close()
        raise
