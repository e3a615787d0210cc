"""The number of CPU workers that an engine starts, as a table of policies, buses and cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.core.cold_start import ColdStart
from loraplex.core.modules import GROUPS
from loraplex.perf.cost_model import CostModel, with_copies_at_most
from loraplex.perf.named_profiles import find_profile
from loraplex.scheduling.cpu_workers import choose_num_workers, enough_workers

RANK_BYTES = 32 * 3 * 8192 * 2
"""Bytes of an adapter on q, k and v of Llama-2-7B per unit of rank."""


def costs(*, gb_per_s: float = 100.0, measured: bool = True) -> CostModel:
    """Return the shipped profile of an H200, its bus no faster than this."""
    model = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(model, CostModel)
    assert model.memory is not None
    assert model.memory.bytes_per_rank(GROUPS["qkv"]) == RANK_BYTES
    return replace(with_copies_at_most(model, gb_per_s * 1e9), measured=measured)


@pytest.mark.parametrize(
    ("cold_start", "gb_per_s", "measured", "most", "number"),
    [
        (ColdStart.CPU_ASSIST, 100, True, 16, 12),
        (ColdStart.CPU_ASSIST, 100, True, 8, 6),
        (ColdStart.CPU_ASSIST, 100, True, 3, 3),
        (ColdStart.CPU_ASSIST, 6, True, 8, 6),
        (ColdStart.CPU_ASSIST, 100, True, 0, 0),
        (ColdStart.CPU_ASSIST, 100, False, 8, 8),
        (ColdStart.AUTO, 100, True, 8, 0),
        (ColdStart.AUTO, 12, True, 16, 0),
        (ColdStart.AUTO, 6, True, 8, 6),
        (ColdStart.AUTO, 6, True, 1, 0),
        (ColdStart.AUTO, 6, True, 0, 0),
        (ColdStart.AUTO, 6, False, 8, 0),
        (ColdStart.PIPELINED, 6, True, 8, 0),
        (ColdStart.OVERLAP, 6, True, 8, 0),
        (ColdStart.ON_DEMAND, 6, True, 8, 0),
        (ColdStart.CACHED, 6, True, 8, 0),
    ],
)
def test_workers_are_started_where_they_pay(
    cold_start: ColdStart, gb_per_s: float, measured: bool, most: int, number: int
) -> None:
    model = costs(gb_per_s=gb_per_s, measured=measured)
    assert choose_num_workers(cold_start, model, rank_bytes=RANK_BYTES, most=most) == number


def test_workers_that_hardly_save_more_than_their_cost_may_be_off_are_not_started() -> None:
    model = costs(gb_per_s=10)
    assert choose_num_workers(ColdStart.AUTO, model, rank_bytes=RANK_BYTES, most=8) == 0
    exact = replace(model, assist=replace(model.assist, quality=model.step.quality))
    assert choose_num_workers(ColdStart.AUTO, exact, rank_bytes=RANK_BYTES, most=8) == 6


def test_no_more_workers_are_taken_than_make_a_layer_faster() -> None:
    model, num_bytes = costs(), 64 * RANK_BYTES

    def layer_s(number: int) -> float:
        return model.assist_layer_s(num_bytes, num_tokens=128, num_workers=number)

    number, seconds = enough_workers(model, num_bytes, most=16)
    assert seconds == layer_s(number) <= 1.05 * layer_s(16)
    assert all(layer_s(fewer) > 1.05 * layer_s(16) for fewer in range(1, number))
    # One row each of three linears: a fourth worker has nothing to do.
    assert enough_workers(model, num_bytes, most=16, num_tokens=1)[0] == 3
