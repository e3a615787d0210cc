"""Shared memory is there in full or refused with the way out, and gone when closed."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest
import torch
from assist_pools import open_fds

from loraplex.core.errors import CapacityError
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.assist.shared_block import SharedBlock

MIB = 1 << 20


@pytest.fixture
def one_mib_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_block_is_zero_and_seen_by_all_who_map_it() -> None:
    block = SharedBlock(10_000)
    other = SharedBlock(10_000, fd=os.dup(block.fd))
    assert block.memory.count_nonzero() == 0
    block.memory[9_999] = 7
    assert other.memory[9_999] == 7
    assert other.address != block.address
    block.close()
    assert other.memory[9_999] == 7
    other.close()


def test_closing_gives_the_descriptor_back_once_and_leaves_views_alone() -> None:
    before = open_fds()
    block = SharedBlock(MIB)
    view = block.memory[:8]
    view.fill_(3)
    block.close()
    block.close()
    assert open_fds() == before
    assert view.tolist() == [3] * 8


def test_memory_that_the_machine_does_not_have_is_refused_with_the_way_out() -> None:
    before = open_fds()
    with pytest.raises(CapacityError, match=r"MiB are free.*keep fewer adapters in host memory"):
        SharedBlock(1 << 50)
    assert open_fds() == before


@pytest.mark.usefixtures("one_mib_limit")
def test_memory_that_the_kernel_refuses_is_an_error_at_once() -> None:
    before = open_fds()
    with pytest.raises(CapacityError, match=r"2 MiB of shared memory.*File too large"):
        SharedBlock(2 * MIB)
    assert open_fds() == before


@pytest.mark.usefixtures("one_mib_limit")
def test_a_pool_without_memory_leaves_nothing_behind() -> None:
    before = open_fds()
    with pytest.raises(CapacityError, match="shared memory"):
        AssistPool(num_workers=2, dtype=torch.float32, x_elements=1000, y_elements=MIB)
    assert open_fds() == before
