"""Adapters in host memory between disk and device: within a budget, least recently used dropped first."""

from __future__ import annotations

import pytest
import torch

from loraplex.adapters.slab import SlabLayout
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import random_specs
from loraplex.engine.cuda.adapter_store import block_bytes, table_bytes
from loraplex.engine.cuda.host_pool import HostPool
from loraplex.model.shapes import config_of_shape

SHAPE = config_of_shape("tiny").shape
SPECS = random_specs("a", "tiny", num_adapters=5, ranks=[4], modules="q")
UNIT = 4096
BLOCK = -(-block_bytes(SPECS[0], SHAPE, torch.float32) // UNIT) * UNIT


class Disk:
    """Fills slabs with the adapter's number, and counts."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def __call__(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        self.reads.append(spec.version)
        slab.fill_(SPECS.index(spec))


def pool_of(disk: Disk, *, blocks: int, shelf: int = 2) -> HostPool:
    return HostPool(
        SHAPE,
        torch.float32,
        budget_bytes=blocks * BLOCK,
        shelf_bytes=shelf * BLOCK,
        pinned=False,
        read=disk,
    )


def number_in(block: torch.Tensor) -> float:
    weights = block[table_bytes(SHAPE) :].view(torch.float32)
    assert bool((weights == weights[0]).all())
    return float(weights[0])


def test_what_is_kept_is_not_read_again() -> None:
    disk = Disk()
    pool = pool_of(disk, blocks=3)
    for index in (0, 1, 2, 1, 0):
        assert number_in(pool(SPECS[index])) == index
    assert disk.reads == [spec.version for spec in SPECS[:3]]
    assert pool.tier().versions == {spec.version for spec in SPECS[:3]}
    assert pool.tier().used_bytes == 3 * BLOCK == pool.tier().budget_bytes


def test_the_least_recently_used_makes_room() -> None:
    disk = Disk()
    pool = pool_of(disk, blocks=3)
    for index in (0, 1, 2, 0, 3):
        assert number_in(pool(SPECS[index])) == index
    assert pool.tier().versions == {SPECS[index].version for index in (0, 2, 3)}
    assert [number_in(pool(SPECS[index])) for index in (2, 0, 3)] == [2, 0, 3]


def test_without_a_budget_everything_passes_through() -> None:
    disk = Disk()
    pool = pool_of(disk, blocks=0)
    assert [number_in(pool(SPECS[0])) for _ in range(2)] == [0, 0]
    assert len(disk.reads) == 2
    assert pool.tier().used_bytes == 0


def test_memory_is_taken_by_the_shelf() -> None:
    pool = pool_of(Disk(), blocks=5, shelf=2)
    pool(SPECS[0])
    assert pool.tier().used_bytes == BLOCK
    for spec in SPECS:
        pool(spec)
    assert pool.tier().used_bytes == 5 * BLOCK


def test_an_adapter_that_cannot_be_read_leaves_nothing_behind() -> None:
    def broken(spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        raise OSError("gone")

    pool = HostPool(SHAPE, torch.float32, budget_bytes=4 * BLOCK, pinned=False, read=broken)
    with pytest.raises(OSError, match="gone"):
        pool(SPECS[0])
    assert pool.tier().used_bytes == 0
    assert not pool.tier().versions


def test_an_adapter_larger_than_a_shelf_empties_none_for_nothing() -> None:
    disk = Disk()
    pool = pool_of(disk, blocks=4, shelf=2)
    for spec in SPECS[:4]:
        pool(spec)
    (large,) = random_specs("large", "tiny", num_adapters=1, ranks=[64], modules="all")
    SPECS.append(large)
    try:
        assert number_in(pool(large)) == len(SPECS) - 1
    finally:
        SPECS.remove(large)
    assert pool.tier().versions == {spec.version for spec in SPECS[:4]}
