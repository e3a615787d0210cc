"""CPU LoRA workers: they compute scale * x A B from x, both in shared memory, with a core for each worker.

A task is submitted first and started later by its ticket: by `start`, or by a GPU that writes the ticket to
the signal word when x is complete. It is done when the done words of all slots have reached the ticket. Tasks
start in order; the rows of x and y that a task uses are its own until it is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import torch

from loraplex.core.arrays import IntArray
from loraplex.core.logs import current_format, current_level
from loraplex.engine.assist.control import Control
from loraplex.engine.assist.crew import Crew, Patience
from loraplex.engine.assist.messages import Launch
from loraplex.engine.assist.product import Product
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.assist.tasks import AssistTask, encode
from loraplex.engine.machine import spread_cores

_RING_SIZE: Final = 4096
_WAIT_SPINS: Final = 20_000
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class AssistPool:
    """The shared blocks, and the crew that works on them.

    One thread submits and starts; any thread may wait. Weights must stay in place while tasks use them.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        dtype: torch.dtype,
        x_elements: int,
        y_elements: int,
        profiled: tuple[int, int, int] = (4096, 4096, 64),
        cores: Sequence[int] | None = None,
        ring_size: int = _RING_SIZE,
        rows_each: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Start workers in the background (`wait_ready`); without any, this process computes itself.

        `rows_each`: number of rows that are worth a core; None for what the workers measure, by the product
        whose in_features, out_features and rank are `profiled`. Raises CapacityError if there is no memory
        for x, y or the tasks.
        """
        assert num_workers >= 0
        assert dtype in _DTYPES
        num_slots = max(num_workers, 1)
        self._dtype = dtype
        self._num_slots = num_slots
        self._ring_size = ring_size
        self._profiled = profiled
        self._cores = list(cores) if cores is not None else spread_cores(num_slots)
        self._blocks: list[SharedBlock] = []
        try:
            control_bytes = Control.num_bytes(num_slots, ring_size)
            for num_bytes in (control_bytes, x_elements * dtype.itemsize, y_elements * dtype.itemsize):
                self._blocks.append(SharedBlock(num_bytes))
            control, x, y = self._blocks
            self._control = Control(control, num_slots, ring_size)
            self._crew = Crew(
                self._control,
                Product(dtype, x.memory, y.memory),
                self._launch,
                num_workers=num_workers,
                num_slots=num_slots,
                ring_size=ring_size,
                rows_each=rows_each,
                patience=patience or Patience(),
            )
        except BaseException:
            self._close_blocks()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_workers(self) -> int:
        """Number of workers that are ready. Without any, a thread of this process computes the tasks."""
        return self._crew.num_ready

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that are ready, by slot."""
        return self._crew.pids

    @property
    def rows_each(self) -> int:
        """Number of rows that are worth a core."""
        return self._crew.rows_each

    @property
    def x(self) -> torch.Tensor:
        """The elements that tasks read."""
        return self._blocks[1].memory.view(self._dtype)

    @property
    def y(self) -> torch.Tensor:
        """The elements that tasks write."""
        return self._blocks[2].memory.view(self._dtype)

    @property
    def blocks(self) -> tuple[SharedBlock, ...]:
        """The blocks that a GPU uses: control words, x and y."""
        return tuple(self._blocks)

    @property
    def control(self) -> Control:
        """The control words, for a GPU that starts tasks and waits for them."""
        return self._control

    @property
    def num_slots(self) -> int:
        """Number of places for workers, ready or not."""
        return self._num_slots

    @property
    def ring_size(self) -> int:
        """Most tasks that can be submitted before the first of them is done."""
        return self._ring_size

    def wait_ready(self, timeout_s: float) -> int:
        """Wait for the workers to start; return how many have."""
        return self._crew.wait_ready(timeout_s)

    def add_weights(self, block: SharedBlock) -> int:
        """Share a block of weights with the workers; return its index in tasks. The caller closes it."""
        return self._crew.add_weights(block)

    def arm(self) -> None:
        """Wake the workers, which then spin for tasks. `submit` does so too, but then the first task waits
        for them to wake."""
        self._crew.arm()

    def submit(self, task: AssistTask) -> int:
        """Submit a task and return its ticket. Raises CapacityError if the ring is full of tasks that are not
        done."""
        self._check(task)
        return self._crew.submit(encode(task, self._num_slots)[None])

    def submit_records(self, records: IntArray) -> int:
        """Submit tasks as records, which are filled in, and return the last ticket. For steps, where one
        object for each task would take too long. The caller checks what the records point to."""
        return self._crew.submit(records)

    def start(self, ticket: int) -> None:
        """Let tasks up to this ticket start: their x is complete."""
        if ticket > self._control.signal:
            self._control.signal = ticket

    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Wait for a task; return whether it is done. Raises EngineDeadError if it could not be computed."""
        control, until = self._control, time.monotonic() + timeout_s
        while not control.wait_done(ticket, _WAIT_SPINS):
            if time.monotonic() > until:
                return False
            os.sched_yield()
        self.raise_if_failed()
        return True

    def raise_if_failed(self) -> None:
        """Raise EngineDeadError if any y may be wrong; for callers that wait on the done words."""
        self._crew.raise_if_failed()

    def close(self) -> None:
        """End the workers and free the memory. Idempotent."""
        self._crew.close()
        self._close_blocks()

    def _close_blocks(self) -> None:
        for block in self._blocks:
            block.close()

    def _launch(self, slot: int, socket_fd: int) -> Launch:
        control, x, y = self._blocks
        return Launch(
            slot=slot,
            num_slots=self._num_slots,
            ring_size=self._ring_size,
            core=self._cores[slot % len(self._cores)],
            dtype=str(self._dtype).removeprefix("torch."),
            parent_pid=os.getpid(),
            socket_fd=socket_fd,
            control_fd=control.fd,
            control_bytes=control.num_bytes,
            x_fd=x.fd,
            x_bytes=x.num_bytes,
            y_fd=y.fd,
            y_bytes=y.num_bytes,
            profiled=self._profiled,
            log_level=current_level(),
            log_format=current_format(),
        )

    def _check(self, task: AssistTask) -> None:
        """Assert that a task stays within its blocks; otherwise our bug would show elsewhere."""
        assert task.num_rows > 0
        num_before = task.num_rows - 1
        assert min(task.x_start, task.y_start) >= 0
        assert task.x_start + num_before * task.x_stride + task.in_features <= self.x.numel()
        for part in task.parts:
            last = task.y_start + num_before * task.y_stride + part.out_start + part.out_features
            assert part.out_start >= 0
            assert last <= self.y.numel()
            num_bytes, size = self._crew.weights_bytes(part.weights), self._dtype.itemsize
            for offset, width in (
                (part.a_offset_bytes, task.in_features),
                (part.b_offset_bytes, part.out_features),
            ):
                assert offset >= 0
                assert offset % size == 0
                assert offset + part.rank * width * size <= num_bytes
