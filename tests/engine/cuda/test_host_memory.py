"""The host's memory for adapters: taken by pieces, cut where they meet."""

from __future__ import annotations

import pytest

from loraplex.core.errors import CapacityError
from loraplex.engine.cuda.host_memory import HostMemory


def test_a_stretch_is_cut_where_pieces_meet() -> None:
    memory = HostMemory(1000, pinned=False, piece_bytes=256)
    assert list(memory.pieces(200, 600)) == [(200, 256), (256, 512), (512, 600)]
    assert list(memory.pieces(256, 512)) == [(256, 512)]
    assert list(memory.pieces(10, 10)) == []


def test_what_was_written_is_there() -> None:
    memory = HostMemory(1000, pinned=False, piece_bytes=256)
    memory.take(200, 600).fill_(7)
    memory.take(600, 610).fill_(8)
    assert memory.span(199, 201).tolist() == [0, 7]
    assert memory.span(599, 601).tolist() == [7, 8]


def test_nothing_is_pinned_where_there_is_no_device() -> None:
    memory = HostMemory(1000, pinned=False)
    assert not memory.pin_ahead()
    memory.close()
    memory.close()


def test_more_than_the_host_has_is_refused_with_the_option() -> None:
    with pytest.raises(CapacityError, match="--host-adapter-memory"):
        HostMemory(1 << 60, pinned=False)
