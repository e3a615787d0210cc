"""The workers of a pool, and the thread that watches them.

The thread wakes when a worker dies, computes the rows that it left undone, and starts another. A slot without
a worker gets no rows, and its done word is larger than every ticket. A worker that hangs is killed before its
rows are computed again, so that it never writes to memory that has been reused.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from statistics import median_low
from typing import Any, Final

import numpy as np

from loraplex.core.arrays import IntArray
from loraplex.core.errors import CapacityError, EngineDeadError
from loraplex.core.exits import describe_exit
from loraplex.engine.assist.control import FOREVER, Control
from loraplex.engine.assist.messages import Go, Launch, Wake
from loraplex.engine.assist.process import WorkerProcess
from loraplex.engine.assist.product import Product
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.assist.tasks import NUM_ROWS, PART_WORDS, RANK, SHARE_WORDS, SHARES, parts_start
from loraplex.perf.assist_split import ROWS_EACH, rows_worth_a_core, split_task

logger = logging.getLogger(__name__)

_STAND_IN_SPINS: Final = 2_000
_STAND_IN_SLICES: Final = 8
"""Number of slices that the watching thread computes for dead workers before it checks processes again."""
_LEAVE_S: Final = 2.0
"""Seconds that workers may take to exit when asked to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Limits on the time that workers may take, in seconds, and on their failures."""

    start_s: float = 120.0
    slice_s: float = 1.0
    """Seconds without a finished slice, though one may start, after which a worker counts as hung."""
    idle_s: float = 0.2
    """Seconds without tasks after which an armed pool disarms."""
    max_failures: int = 3
    """Number of workers in a row that fail in one slot without computing anything before it is dropped."""


class _Slot:
    """A place for a worker. `owed`: the last ticket whose rows the watching thread has to compute for it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: WorkerProcess | None = None
        self.rows_each: int | None = None
        self.is_ready = False
        self.is_dropped = False
        self.owed: int | None = None
        self.num_failures = 0
        self.last_before = 0  # the ticket before its worker's first
        self.overdue: tuple[int, float] | None = None  # its done word, and when it became overdue


class Crew:
    """Gives tasks to workers and restarts workers that die."""

    def __init__(
        self,
        control: Control,
        product: Product,
        launch: Callable[[int, int], Launch],
        *,
        num_workers: int,
        num_slots: int,
        ring_size: int,
        rows_each: int | None,
        patience: Patience,
    ) -> None:
        """`launch(slot, socket_fd)`: returns a worker's command line. Slots beyond `num_workers` stay
        empty. `rows_each`: number of rows that are worth a core; None for what the workers measure."""
        self._control = control
        self._product = product
        self._launch = launch
        self._ring_size = ring_size
        self._given_rows_each = rows_each
        self._patience = patience
        self._slots = [_Slot(index) for index in range(num_slots)]
        for slot in self._slots:
            slot.is_dropped = slot.index >= num_workers
            control.set_done(slot.index, FOREVER)
        self._changed = threading.Condition()  # guards all below, and the slots' states
        self._weights: dict[int, SharedBlock] = {}
        self._num_weights = 0  # ever added: no two blocks have the same index
        self._last_ticket = 0
        self._last_use = 0.0
        self._failure: str | None = None
        self._closing = False
        self._wake_fd: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="assist-watch", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the workers that are ready, by slot."""
        with self._changed:
            return {slot.index: slot.process.pid for slot in self._slots if slot.is_ready and slot.process}

    @property
    def num_ready(self) -> int:
        """Number of workers that are ready. Read without the lock, so that a step never waits for it: it may
        be out of date by a moment, as it would be with the lock."""
        return sum(slot.is_ready for slot in self._slots)

    @property
    def rows_each(self) -> int:
        """Number of rows that are worth a core, as given or as measured by the workers."""
        with self._changed:
            return self._rows_each()

    def wait_ready(self, timeout_s: float) -> int:
        """Wait until every slot has its worker or is dropped; return how many are ready."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or all(slot.is_ready or slot.is_dropped for slot in self._slots),
                timeout_s,
            )
            return sum(slot.is_ready for slot in self._slots)

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def add_weights(self, block: SharedBlock) -> int:
        with self._changed:
            index = self._num_weights
            self._num_weights += 1
            self._weights[index] = block
            for slot in self._slots:
                if slot.process is not None:
                    slot.process.send_weights(index, block)
            return index

    def weights_bytes(self, index: int) -> int:
        return self._weights[index].num_bytes

    def arm(self) -> None:
        with self._changed:
            self._arm()

    def submit(self, records: IntArray) -> int:
        """Submit tasks under successive tickets and return the last one. Raises CapacityError if the ring is
        full, EngineDeadError if a task could not be computed before."""
        self.raise_if_failed()
        with self._changed:
            assert not self._closing, "the pool is closed"
            first, last = self._last_ticket + 1, self._last_ticket + len(records)
            if last > self._ring_size and not self._control.wait_done(last - self._ring_size, 1):
                raise CapacityError(
                    f"{self._ring_size} tasks wait for CPU LoRA workers; wait for some of them"
                )
            ready = [slot.is_ready for slot in self._slots]
            if not any(ready):
                self._owe(self._slots[0], first, last)
                ready[0] = True
            self._split(records, ready)
            self._control.write(first, records)
            self._last_ticket = last
            self._arm()
            return last

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._control.stop()
        if self._wake_fd is not None:
            self._wake()
            self._thread.join()
            os.close(self._wake_fd)
            self._wake_fd = None
        self._weights.clear()

    def _rows_each(self) -> int:
        if self._given_rows_each is not None:
            return self._given_rows_each
        measured = [slot.rows_each for slot in self._slots if slot.rows_each is not None]
        return median_low(measured) if measured else ROWS_EACH

    def _arm(self) -> None:
        self._last_use = time.monotonic()
        if not self._control.is_armed:
            self._control.is_armed = True
            for slot in self._slots:
                if slot.is_ready and slot.process is not None:
                    slot.process.send(Wake())
            self._wake()

    def _split(self, records: IntArray, ready: Sequence[bool]) -> None:
        """Fill in the shares. Records with equal numbers of rows and the same parts are split alike."""
        num_slots = len(self._slots)
        ranks = records[:, parts_start(num_slots) + RANK :: PART_WORDS]
        kinds = np.column_stack((records[:, NUM_ROWS], ranks > 0))
        is_one_kind = (kinds == kinds[0]).all()
        for kind in kinds[:1] if is_one_kind else np.unique(kinds, axis=0):
            parts = np.flatnonzero(kind[1:]).tolist()
            shares = split_task(int(kind[0]), parts, ready, self._rows_each())
            alike = slice(None) if is_one_kind else (kinds == kind).all(axis=1)
            records[alike, SHARES : SHARES + num_slots * SHARE_WORDS] = np.ravel(shares)

    def _owe(self, slot: _Slot, first: int, last: int) -> None:
        """Make the watching thread compute the slot's rows of these tickets."""
        if slot.owed is None:
            self._control.set_done(slot.index, first - 1)
        slot.owed = last
        self._wake()

    def _wake(self) -> None:
        if self._wake_fd is not None:
            os.eventfd_write(self._wake_fd, 1)

    # The watching thread.

    def _watch(self) -> None:
        try:
            while not self._closing:
                self._look_after_all()
                self._stand_in()
                for slot in self._slots:
                    if slot.process is None and not slot.is_dropped:
                        self._start(slot)
                self._disarm_if_idle()
                self._sleep()
        except Exception as error:
            logger.exception("the thread that watches CPU LoRA workers failed")
            self._failure = f"CPU LoRA workers are not watched any more ({error})"
        finally:
            self._end_all()

    def _look_after_all(self) -> None:
        for slot in self._slots:
            if slot.process is None:
                continue
            if slot.process.poll() is not None:
                self._replace(slot)
            elif not slot.is_ready:
                self._admit(slot, slot.process)
            elif self._hangs(slot):
                logger.warning("CPU LoRA worker %d hangs", slot.index)
                self._replace(slot)

    def _admit(self, slot: _Slot, process: WorkerProcess) -> None:
        """Give a worker that reports ready its share, from the next task on."""
        if (times_us := process.receive_ready()) is not None:
            slot.rows_each = rows_worth_a_core(times_us)
        if slot.rows_each is None:
            if time.monotonic() - process.started_at > self._patience.start_s:
                self._replace(slot)
            return
        with self._changed:
            if slot.owed is not None:
                return  # the done word still counts what is owed: that comes first
            slot.last_before = self._last_ticket
            self._control.set_done(slot.index, self._last_ticket)
            process.send(Go(self._last_ticket + 1))
            slot.is_ready = True
            self._changed.notify_all()

    def _hangs(self, slot: _Slot) -> bool:
        done = self._control.done(slot.index)
        if done >= min(self._control.signal, self._last_ticket):
            slot.overdue = None
        elif slot.overdue is None or slot.overdue[0] != done:
            slot.overdue = done, time.monotonic()
        return slot.overdue is not None and time.monotonic() - slot.overdue[1] > self._patience.slice_s

    def _replace(self, slot: _Slot) -> None:
        """Kill the worker; the watching thread computes what it owes."""
        assert slot.process is not None
        exit_code = slot.process.kill()
        logger.warning("CPU LoRA worker %d: %s", slot.index, describe_exit(exit_code))
        with self._changed:
            done = self._control.done(slot.index)
            worked = slot.is_ready and done > slot.last_before
            slot.num_failures = 1 if worked else slot.num_failures + 1
            if slot.is_ready and done < self._last_ticket:
                slot.owed = self._last_ticket
            elif slot.is_ready:
                self._control.set_done(slot.index, FOREVER)
            slot.process, slot.is_ready, slot.rows_each, slot.overdue = None, False, None, None
            self._drop_if_hopeless(slot)

    def _drop_if_hopeless(self, slot: _Slot) -> None:
        if slot.num_failures >= self._patience.max_failures:
            logger.error("CPU LoRA worker %d fails again and again; it is not started any more", slot.index)
            slot.is_dropped = True
            self._changed.notify_all()

    def _stand_in(self) -> None:
        """Compute what slots without a worker owe, as far as those tasks may start."""
        for _ in range(_STAND_IN_SLICES):
            owing = [slot for slot in self._slots if slot.owed is not None]
            if not owing:
                return
            slot = min(owing, key=lambda slot: self._control.done(slot.index))
            ticket = self._control.done(slot.index) + 1
            if not self._control.wait_signal(ticket, _STAND_IN_SPINS):
                return
            self._compute(slot, ticket)
            with self._changed:
                if slot.owed == ticket:
                    slot.owed = None
                    self._control.set_done(slot.index, FOREVER)
                else:
                    self._control.set_done(slot.index, ticket)

    def _compute(self, slot: _Slot, ticket: int) -> None:
        task, share = self._control.read(ticket, slot.index)
        if share.start == share.end or self._control.is_skipped(ticket):
            return
        try:
            weights = {part.weights: self._weights[part.weights].memory for part in task.parts}
            self._product.compute(task, weights, share.start, share.end)
        except Exception as error:  # waiters must not wait for ever
            logger.exception("a LoRA product failed on the CPU")
            self._failure = f"a LoRA product could not be computed on the CPU ({error})"

    def _start(self, slot: _Slot) -> None:
        try:
            process = WorkerProcess(lambda socket_fd: self._launch(slot.index, socket_fd))
        except OSError as error:
            logger.warning("CPU LoRA worker %d cannot be started: %s", slot.index, error.strerror)
            with self._changed:
                slot.num_failures += 1
                self._drop_if_hopeless(slot)
            return
        with self._changed:
            for index, block in self._weights.items():
                process.send_weights(index, block)
            slot.process = process

    def _disarm_if_idle(self) -> None:
        with self._changed:
            is_idle = time.monotonic() - self._last_use > self._patience.idle_s
            if is_idle and self._control.is_armed and self._control.wait_done(self._last_ticket, 1):
                self._control.is_armed = False

    def _sleep(self) -> None:
        """Sleep until something happens, or until the next check is due."""
        watched: list[Any] = [self._wake_fd]
        timeout_s: float | None = None
        for slot in self._slots:
            if slot.process is not None:
                watched.append(slot.process.sentinel)
                if slot.rows_each is None:
                    watched.append(slot.process.channel)
                    timeout_s = 1.0
            elif not slot.is_dropped:
                timeout_s = 0.0
        if self._control.is_armed:
            timeout_s = min(self._patience.slice_s / 4, self._patience.idle_s)
        if any(slot.owed is not None for slot in self._slots):
            timeout_s = 0.0
        if self._wake_fd is not None and self._wake_fd in wait(watched, timeout_s):
            os.eventfd_read(self._wake_fd)

    def _end_all(self) -> None:
        processes = []
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            for slot in self._slots:
                if slot.process is not None and slot.is_ready:
                    processes.append(slot.process)
                elif slot.process is not None:
                    slot.process.kill()  # still starting: nothing to finish, and it does not listen yet
                slot.process, slot.is_ready = None, False
        self._control.stop()
        until = time.monotonic() + _LEAVE_S
        for process in processes:
            process.channel.close()
        for process in processes:
            if not process.wait(max(until - time.monotonic(), 0.0)):
                process.kill()
        if self._failure is None and not self._control.wait_done(self._last_ticket, 1):
            self._failure = "CPU LoRA workers were ended before all their tasks were done"
        for slot in self._slots:  # release the waiters
            self._control.set_done(slot.index, FOREVER)
