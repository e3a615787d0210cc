"""The host's memory for adapters: taken by pieces, cut where they meet."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest

from loraplex.core.errors import CapacityError
from loraplex.engine.cuda import driver, host_memory
from loraplex.engine.cuda.host_memory import HostMemory


def test_a_stretch_is_cut_where_pieces_meet() -> None:
    memory = HostMemory(1000, pinned=False, piece_bytes=256)
    assert list(memory.pieces(200, 600)) == [(200, 256), (256, 512), (512, 600)]
    assert list(memory.pieces(256, 512)) == [(256, 512)]
    assert list(memory.pieces(10, 10)) == []


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_written_is_there(shared: bool) -> None:
    memory = HostMemory(1000, pinned=False, shared=shared, piece_bytes=256)
    memory.take(200, 600).fill_(7)
    memory.take(600, 610).fill_(8)
    assert memory.span(199, 201).tolist() == [0, 7]
    assert memory.span(599, 601).tolist() == [7, 8]


def test_nothing_is_pinned_where_there_is_no_device() -> None:
    memory = HostMemory(1000, pinned=False)
    assert not memory.pin_ahead()
    memory.close()
    memory.close()


@pytest.mark.parametrize("shared", [False, True])
def test_more_than_the_host_has_is_refused_with_the_option(shared: bool) -> None:
    with pytest.raises(CapacityError, match="--host-adapter-memory"):
        HostMemory(1 << 60, pinned=False, shared=shared)


def test_memory_that_is_not_there_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(1000, pinned=False, piece_bytes=256)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 255)
    with pytest.raises(CapacityError, match="--host-adapter-memory"):
        memory.take(200, 600)


def test_a_shared_memory_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    memory = HostMemory(1000, pinned=False, shared=True, piece_bytes=256)
    monkeypatch.setattr(os, "posix_fallocate", none_left)
    with pytest.raises(CapacityError, match="No space left on device"):
        memory.take(200, 600)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    results = iter([0, 2, 0])
    pinned: dict[int, int] = {}
    unpinned: list[int] = []

    def pin(address: int, num_bytes: int) -> int:
        pinned[address] = next(results)
        return pinned[address]

    monkeypatch.setattr(driver, "pin", pin)
    monkeypatch.setattr(driver, "unpin", unpinned.append)
    memory = HostMemory(1000, pinned=True, piece_bytes=400)
    memory.take(0, 1000).fill_(7)
    assert caplog.text.count("cannot be pinned (CUDA error 2)") == 1
    memory.close()
    assert unpinned == [address for address, error in pinned.items() if error == 0]
    assert len(unpinned) == 2


def test_memory_is_there_when_it_is_taken_and_gone_when_it_is_closed() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = 64 << 20
    memory = HostMemory(2 * size, pinned=False, piece_bytes=size)
    before = resident_bytes()
    memory.take(0, size)
    assert resident_bytes() - before > 0.9 * size, "its pages come only as they are touched"
    memory.close()
    assert resident_bytes() - before < 0.1 * size


def test_other_threads_run_while_the_system_looks_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interpreter's lock held, this thread would never run before the memory is there. Without it, a
    busy machine may still let the other one be faster a few times."""
    size = 64 << 20
    asked, there = threading.Event(), threading.Event()
    populated = host_memory._populate

    def populate(address: int, num_bytes: int) -> None:
        asked.set()  # nobody takes turns before this thread lets go of the lock
        populated(address, num_bytes)
        there.set()

    def runs_meanwhile() -> bool:
        asked.clear()
        there.clear()
        memory = HostMemory(size, pinned=False, piece_bytes=size)
        taking = threading.Thread(target=memory.take, args=(0, size))
        taking.start()
        assert asked.wait(60.0)
        was_there = there.is_set()
        taking.join()
        memory.close()
        return not was_there

    monkeypatch.setattr(host_memory, "_POPULATED_BYTES", size)
    monkeypatch.setattr(host_memory, "_populate", populate)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e3)
    try:
        assert any(runs_meanwhile() for _ in range(50))
    finally:
        sys.setswitchinterval(interval_s)


def test_memory_that_is_refused_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(address: int, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    memory = HostMemory(1000, pinned=False, piece_bytes=256)
    monkeypatch.setattr(host_memory, "_populate", none_left)
    with pytest.raises(CapacityError, match="Cannot allocate memory"):
        memory.take(200, 600)


def test_memory_may_be_had_again_after_it_was_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "pin", lambda address, num_bytes: 0)
    monkeypatch.setattr(driver, "unpin", lambda address: None)
    memory = HostMemory(1000, pinned=True, piece_bytes=256)
    available = 0
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    assert not memory.pin_ahead()
    available = 1000
    assert not memory.pin_ahead(), "it is not tried again and again"
    memory.take(900, 1000)
    assert memory.pin_ahead()
    memory.close()


def test_nothing_is_taken_outside_of_it() -> None:
    memory = HostMemory(1000, pinned=False, piece_bytes=256)
    for begin, end in ((-1, 10), (990, 1001)):
        with pytest.raises(AssertionError, match="outside"):
            memory.take(begin, end)
