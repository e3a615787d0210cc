"""Adapters get the shares that the law asked for gives them, and ranks the numbers."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.workload import WorkloadError
from loraplex.workload.mix import Mix, parse_mix
from loraplex.workload.popularity import (
    InTurn,
    Shares,
    exponential_by_rank,
    exponential_shares,
    power_by_rank,
    shares_like,
    shifting_skew,
    uniform_shares,
    zipf_shares,
    zipf_within_rank,
)

COUNTS = st.integers(1, 300)
SEEDS = st.integers(0, 2**32)
RANKS = st.lists(st.sampled_from([8, 16, 32, 64, 128]), min_size=2, max_size=60).filter(
    lambda ranks: len(set(ranks)) > 1
)


def drawn(shares: np.ndarray, count: int, seed: int) -> np.ndarray:
    draws = Shares(shares=shares).draw(np.random.default_rng(seed), first=0, progress=np.zeros(count))
    return np.bincount(draws, minlength=shares.size) / count


def by_rank(ranks: list[int], shares: np.ndarray) -> dict[int, float]:
    return {rank: float(shares[np.array(ranks) == rank].sum()) for rank in sorted(set(ranks))}


@given(COUNTS, st.floats(0, 3))
def test_zipf_is_one_over_place_to_the_exponent(count: int, exponent: float) -> None:
    shares = zipf_shares(count, exponent)
    assert shares.sum() == pytest.approx(1)
    places = np.arange(1, count + 1)
    assert np.allclose(shares * places**exponent, shares[0])


@given(RANKS, st.floats(0, 3))
def test_zipf_within_rank_is_zipf_among_the_adapters_of_each_of_equal_ranks(
    ranks: list[int], exponent: float
) -> None:
    shares = zipf_within_rank(ranks, exponent)
    for rank, part in by_rank(ranks, shares).items():
        assert part == pytest.approx(1 / len(set(ranks)))
        own = shares[np.array(ranks) == rank]
        assert np.allclose(own, part * zipf_shares(own.size, exponent))


@given(count=COUNTS, exponent=st.floats(0, 2), seed=SEEDS)
def test_draws_have_their_shares(count: int, exponent: float, seed: int) -> None:
    shares = zipf_shares(count, exponent)
    num_draws = 30_000
    error = np.abs(drawn(shares, num_draws, seed) - shares)
    assert (error <= 6 * np.sqrt(shares / num_draws) + 6 / num_draws).all()


@given(st.integers(2, 300), st.floats(0, 8))
def test_exponential_falls_by_the_same_factor_from_each_to_the_next(count: int, decay: float) -> None:
    shares = exponential_shares(count, decay)
    assert shares.sum() == pytest.approx(1)
    assert np.allclose(shares[1:] / shares[:-1], math.exp(-decay / count))


@given(RANKS, st.floats(0, 3))
def test_power_law_by_rank_favours_small_ranks(ranks: list[int], alpha: float) -> None:
    found = by_rank(ranks, power_by_rank(ranks, alpha))
    places = range(1, len(found) + 1)
    total = sum(place**-alpha for place in places)
    assert list(found.values()) == pytest.approx([place**-alpha / total for place in places])


def test_power_law_by_rank_is_loraserves() -> None:
    """With alpha 1/3 the largest of five ranks still gets about 16% of the requests, as the paper says."""
    ranks = [8, 16, 32, 64, 128] * 20
    assert by_rank(ranks, power_by_rank(ranks, 1 / 3))[128] == pytest.approx(0.16, abs=0.005)
    falling = list(by_rank(ranks, exponential_by_rank(ranks, 5)).values())
    assert [after / before for before, after in pairwise(falling)] == pytest.approx([math.exp(-1)] * 4)


@given(RANKS)
def test_adapters_of_one_rank_share_equally(ranks: list[int]) -> None:
    for shares in (power_by_rank(ranks, 1), exponential_by_rank(ranks, 5), shifting_skew(ranks).start):
        assert shares.sum() == pytest.approx(1)
        for rank in set(ranks):
            assert np.ptp(shares[np.array(ranks) == rank]) == pytest.approx(0)


@given(RANKS)
def test_skew_shifts_from_the_largest_rank_to_the_smallest(ranks: list[int]) -> None:
    skew = shifting_skew(ranks)
    start, end = by_rank(ranks, skew.start), by_rank(ranks, skew.end)
    smallest, largest = min(start), max(start)
    others = 0.5 / (len(start) - 1)
    for shares, hot in ((start, largest), (end, smallest)):
        assert shares == pytest.approx({rank: 0.5 if rank == hot else others for rank in shares})


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.5, 1.0])
def test_a_shifting_skew_moves_in_a_straight_line(progress: float) -> None:
    ranks = [8, 16, 32, 64, 128] * 5
    skew = shifting_skew(ranks)
    draws = skew.draw(np.random.default_rng(5), first=0, progress=np.full(60_000, progress))
    found = by_rank(ranks, np.bincount(draws, minlength=25) / 60_000)
    assert found[128] == pytest.approx(0.5 - 0.375 * progress, abs=0.01)
    assert found[8] == pytest.approx(0.125 + 0.375 * progress, abs=0.01)
    assert found[32] == pytest.approx(0.125, abs=0.01)


def test_one_rank_has_nothing_to_shift_to() -> None:
    with pytest.raises(WorkloadError, match="ranks"):
        shifting_skew([8, 8])


def test_in_turn_goes_on_where_it_was() -> None:
    turn = InTurn(num_adapters=3)
    rng = np.random.default_rng(0)
    assert turn.draw(rng, first=0, progress=np.zeros(4)).tolist() == [0, 1, 2, 0]
    assert turn.draw(rng, first=4, progress=np.zeros(2)).tolist() == [1, 2]
    assert turn.mean_shares().tolist() == uniform_shares(3).tolist()


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=200), COUNTS)
def test_shares_like_a_trace_are_as_skewed(totals: list[int], count: int) -> None:
    shares = shares_like(totals, count)
    assert shares.size == count
    assert shares.sum() == pytest.approx(1)
    assert (np.diff(shares) <= 1e-15).all()
    if count == len(totals):
        assert shares.tolist() == pytest.approx([total / sum(totals) for total in sorted(totals)[::-1]])


def test_shares_of_more_adapters_than_the_trace_has_keep_its_skew() -> None:
    totals = (1e6 / np.arange(1, 1_001) ** 1.2).tolist()
    tenth = sum(sorted(totals)[::-1][:100]) / sum(totals)
    assert shares_like(totals, 10_000)[:1_000].sum() == pytest.approx(tenth, abs=0.02)
    with pytest.raises(WorkloadError, match="every total is 0"):
        shares_like([0, 0], 3)


@given(
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda each: sum(each) > 0),
    count=COUNTS,
    seed=SEEDS,
)
def test_a_mix_is_exact_to_one(weights: list[float], count: int, seed: int) -> None:
    values = tuple(float(2**place) for place in range(len(weights)))
    mix = Mix(values=values, weights=tuple(weights))
    assigned = mix.assign(count, np.random.default_rng(seed))
    assert assigned == mix.assign(count, np.random.default_rng(seed))
    assert len(assigned) == count
    counts = Counter(assigned)
    for value, weight in zip(values, weights, strict=True):
        assert abs(counts[value] - count * weight / sum(weights)) < 1 + 1e-9


def test_a_mix_is_read_with_and_without_weights() -> None:
    assert parse_mix("8, 16:3", least=1, whole=True) == Mix(values=(8, 16), weights=(1.0, 3.0))
    assert parse_mix("0.4:2", least=0) == Mix(values=(0.4,), weights=(2.0,))


@pytest.mark.parametrize(
    "text", ["", "8,", "a", "8:b", "0", "-8", "8.5", "8,8", "8:0", "8:-1,4", "8:nan", "8:1:2"]
)
def test_a_bad_mix_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError):
        parse_mix(text, least=1, whole=True)
