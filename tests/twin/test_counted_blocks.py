"""Blocks that are counted are as many as blocks that have numbers."""

from __future__ import annotations

import random

import pytest

from loraplex.scheduling.blocks import BlockPool
from loraplex.twin.counted_blocks import CountedPool


@pytest.mark.parametrize("seed", range(20))
def test_counted_blocks_are_as_many_as_numbered_ones(seed: int) -> None:
    rng = random.Random(seed)
    numbered, counted = BlockPool(20, 16), CountedPool(20, 16)
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(300):
        what, count = rng.choice("aaarrex"), rng.randint(0, 6)
        if what == "a":
            one, other = numbered.allocate(count), counted.allocate(count)
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert len(one) == len(other) == count
                held.append((one, other))
        elif what == "r" and held:
            one, other = held.pop(rng.randrange(len(held)))
            numbered.release(one)
            counted.release(other)
        elif what == "e":
            numbered.extend(count)
            counted.extend(count)
        elif what == "x" and count <= numbered.num_empty and count < numbered.num_blocks:
            moves = numbered.retract(count)
            assert counted.retract(count) == {}
            held = [([moves.get(block, block) for block in one], other) for one, other in held]
        assert (counted.num_blocks, counted.num_empty, counted.num_free, counted.num_obtainable) == (
            numbered.num_blocks,
            numbered.num_empty,
            numbered.num_free,
            numbered.num_obtainable,
        )
        numbered.check_integrity([one for one, _ in held])
        counted.check_integrity([other for _, other in held])


def test_blocks_given_back_twice_are_noticed() -> None:
    pool = CountedPool(4, 16)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
