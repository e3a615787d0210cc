"""The words that CPU LoRA workers share with the processes and devices that use them, and the ring of tasks.

    signal, submitted, armed, stop    a cache line each
    done                              a cache line for each slot
    ring of records                   `tasks`, the record of ticket t at t modulo the ring's size
    skips                             a word for each place in the ring, and one that is not read

Words are loaded with acquire and stored with release order: a task's record is complete when `submitted`
reaches its ticket, its x when `signal` does, its y when the `done` words of all slots do. A task whose skip
word holds its ticket by the time of its signal is not computed.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numba import carray

from loraplex.core.arrays import IntArray
from loraplex.engine.assist.shared_block import SharedBlock
from loraplex.engine.assist.tasks import TICKET, AssistTask, decode, record_words
from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.intrinsics import load_acquire, relax, store_release
from loraplex.perf.assist_split import Share

FOREVER: Final = (1 << 63) - 1
"""Done word of a slot without work, larger than every ticket."""
_LINE_WORDS: Final = 8
_SIGNAL, _SUBMITTED, _ARMED, _STOP, _NUM_FLAGS = range(5)


class Control:
    """A process's view of the control block. A slot is the place of one worker."""

    def __init__(self, block: SharedBlock, num_slots: int, ring_size: int) -> None:
        self._num_slots = num_slots
        self._ring_size = ring_size
        self._memory = block.memory
        start, end = _ring_start(num_slots), _skips_start(num_slots, ring_size)
        words = block.memory.view(-1).numpy().view(np.int64)
        self._ring = words[start:end].reshape(ring_size, -1)
        self._skips = words[end : end + ring_size]
        self._base = block.address

    @staticmethod
    def num_bytes(num_slots: int, ring_size: int) -> int:
        return 8 * (_skips_start(num_slots, ring_size) + ring_size + 1)

    @property
    def words(self) -> torch.Tensor:
        """All words, for a device; the signal is the first."""
        return self._memory.view(torch.int64)

    @property
    def done_place(self) -> int:
        """Index of the first slot's done word; those of other slots follow, a cache line apart."""
        return _LINE_WORDS * _NUM_FLAGS

    @property
    def skips_place(self) -> int:
        """Index of the first skip word."""
        return _skips_start(self._num_slots, self._ring_size)

    @property
    def signal_address(self) -> int:
        return self._address(_SIGNAL)

    def done_address(self, slot: int) -> int:
        return self._address(_NUM_FLAGS + slot)

    @property
    def signal(self) -> int:
        """Tasks up to this ticket may start."""
        return _load(self.signal_address)

    @signal.setter
    def signal(self, ticket: int) -> None:
        _store(self.signal_address, ticket)

    @property
    def is_armed(self) -> bool:
        """True if workers spin; otherwise they sleep."""
        return _load(self._address(_ARMED)) != 0

    @is_armed.setter
    def is_armed(self, armed: bool) -> None:
        _store(self._address(_ARMED), int(armed))

    @property
    def is_stopped(self) -> bool:
        return _load(self._address(_STOP)) != 0

    def stop(self) -> None:
        _store(self._address(_STOP), 1)

    def done(self, slot: int) -> int:
        """Return the ticket up to which the slot's rows are computed."""
        return _load(self.done_address(slot))

    def set_done(self, slot: int, ticket: int) -> None:
        _store(self.done_address(slot), ticket)

    def wait_submitted(self, ticket: int, spins: int) -> bool:
        """Spin until the ticket's task is written, up to `spins` times; return whether it is."""
        return _wait(self._address(_SUBMITTED), 1, ticket, spins)

    def wait_signal(self, ticket: int, spins: int) -> bool:
        """Spin until the ticket may start, up to `spins` times; return whether it may. Other threads run
        meanwhile."""
        return _wait(self.signal_address, 1, ticket, spins)

    def wait_done(self, ticket: int, spins: int) -> bool:
        """Spin until every slot has done its rows, up to `spins` times; return whether they have."""
        return _wait(self.done_address(0), self._num_slots, ticket, spins)

    def write(self, first_ticket: int, records: IntArray) -> None:
        """Submit records under successive tickets. The tasks before them in their places of the ring must be
        done."""
        tickets = np.arange(first_ticket, first_ticket + len(records))
        places = tickets % self._ring_size
        self._ring[places, : records.shape[1]] = records
        self._ring[places, TICKET] = tickets
        _store(self._address(_SUBMITTED), int(tickets[-1]))

    def is_skipped(self, ticket: int) -> bool:
        """Return whether a task that was signalled is not to be computed."""
        return int(self._skips[ticket % self._ring_size]) == ticket

    def read(self, ticket: int, slot: int) -> tuple[AssistTask, Share]:
        """Return a task with a slot's parts alone, and the slot's share."""
        found, task, share = decode(self._ring[ticket % self._ring_size].tolist(), self._num_slots, slot)
        assert found == ticket
        return task, share

    def _address(self, line: int) -> int:
        return self._base + 8 * _LINE_WORDS * line


def _ring_start(num_slots: int) -> int:
    return _LINE_WORDS * (_NUM_FLAGS + num_slots)


def _skips_start(num_slots: int, ring_size: int) -> int:
    return _ring_start(num_slots) + ring_size * _padded(record_words(num_slots))


def _padded(num_words: int) -> int:
    return -(-num_words // _LINE_WORDS) * _LINE_WORDS


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""Type of compiled functions that run without the interpreter's lock."""


def _load(address: int) -> int:
    args = (ctypes.c_int64 * 2)(address)
    _compiled()[0](args)
    return args[1]


def _store(address: int, value: int) -> None:
    _compiled()[1]((ctypes.c_int64 * 2)(address, value))


def _wait(first_address: int, count: int, value: int, spins: int) -> bool:
    args = (ctypes.c_int64 * 4)(first_address, count, value, spins)
    _compiled()[2](args)
    return args[0] != 0


@lru_cache(maxsize=1)
def _compiled():
    return tuple(_KERNEL(team.kernel(function)) for function in (_load_word, _store_word, _wait_words))


def _load_word(block):
    args = carray(block, 2)
    args[1] = load_acquire(args[0])


def _store_word(block):
    args = carray(block, 2)
    store_release(args[0], args[1])


def _wait_words(block):
    """Spin on one word after the other until each has reached the value."""
    args = carray(block, 4)
    address, count, value, spins = args[0], args[1], args[2], args[3]
    index = 0
    while index < count and spins > 0:
        if load_acquire(address + 64 * index) >= value:
            index += 1
        else:
            relax()
            spins -= 1
    args[0] = 1 if index == count else 0
