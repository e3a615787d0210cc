from __future__ import annotations

import contextlib
import gc

from loraplex.core.rare_collections import collecting_rarely


def test_garbage_is_collected_rarely_and_afterwards_as_before() -> None:
    before = gc.get_threshold()
    num_before = gc.get_stats()[0]["collections"]
    with contextlib.suppress(KeyError), collecting_rarely():
        kept = [[] for _ in range(10 * before[0])]
        assert gc.get_stats()[0]["collections"] == num_before
        raise KeyError(len(kept))
    assert gc.get_threshold() == before


def test_cycles_do_not_pile_up_meanwhile() -> None:
    class Link:
        def __init__(self) -> None:
            self.other = self

    num_before = sum(each["collected"] for each in gc.get_stats())
    with collecting_rarely():
        for _ in range(150_000):
            Link()
        assert sum(each["collected"] for each in gc.get_stats()) >= num_before + 50_000
