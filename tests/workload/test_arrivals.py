"""Arrivals keep their rate and their burstiness, whichever way they are drawn."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.workload import WorkloadError
from loraplex.workload.arrivals import RenewalArrivals, ReplayArrivals
from loraplex.workload.gaps import Gaps, GapTable
from loraplex.workload.rates import ChangingRates, ConstantRates
from loraplex.workload.streams import Purpose, stream
from loraplex.workload.traffic import PerAdapterTraffic

CVS = st.floats(0.2, 3.0)
SEEDS = st.integers(0, 2**32)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def times_until(arrivals: RenewalArrivals, end_s: float, seed: int) -> np.ndarray:
    found = []
    for batch in arrivals.batches_s(rng(seed)):
        found.append(batch)
        if batch[-1] >= end_s:
            break
    times_s = np.concatenate(found)
    return times_s[times_s < end_s]


@st.composite
def any_gaps(draw: st.DrawFn) -> tuple[Gaps, float]:
    """And their coefficient of variation."""
    cv = draw(CVS)
    shape = draw(st.floats(0.6, 3.0))
    weibull = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
    return draw(
        st.sampled_from(
            [
                (Gaps.poisson(), 1.0),
                (Gaps.gamma(cv=cv), cv),
                (Gaps.log_normal(cv=cv), cv),
                (Gaps.weibull(shape=shape), math.sqrt(weibull)),
                (Gaps.regular(), 0.0),
            ]
        )
    )


@given(any_gaps(), SEEDS)
def test_gaps_have_mean_1_and_their_cv(kind: tuple[Gaps, float], seed: int) -> None:
    gaps, cv = kind
    drawn = GapTable.of([gaps]).draw(rng(seed), np.zeros(40_000, dtype=np.int64))
    assert drawn.min() >= 0
    assert drawn.mean() == pytest.approx(1, abs=6 * cv / 200 + 1e-12)
    # The deviation of heavy tails is itself hard to sample, hence the wide bounds.
    assert drawn.std() == pytest.approx(cv, rel=0.06 if cv < 1.2 else 0.5, abs=1e-12)


@given(any_gaps(), SEEDS)
def test_the_first_gap_is_half_a_length_biased_one(kind: tuple[Gaps, float], seed: int) -> None:
    gaps, cv = kind
    first = GapTable.of([gaps]).draw_first(rng(seed), np.zeros(40_000, dtype=np.int64))
    assert first.mean() == pytest.approx((1 + cv**2) / 2, rel=0.08 if cv < 1.2 else 0.6)


@given(kind=any_gaps(), rate=st.floats(0.5, 200), seed=SEEDS)
def test_arrivals_come_at_their_rate_and_in_order(kind: tuple[Gaps, float], rate: float, seed: int) -> None:
    gaps, cv = kind
    expected = 9_000
    times_s = times_until(RenewalArrivals(rate_per_s=rate, gaps=gaps), expected / rate, seed)
    assert (np.diff(times_s) >= 0).all()
    assert times_s.size == pytest.approx(expected, abs=6 * max(cv, 0.02) * math.sqrt(expected))


@pytest.mark.parametrize("gaps", [Gaps.gamma(cv=3), Gaps.log_normal(cv=3), Gaps.weibull(shape=0.5)])
def test_bursty_arrivals_do_not_begin_with_a_burst(gaps: Gaps) -> None:
    """With an ordinary gap at first, ten expected requests would be about fourteen."""
    arrivals = RenewalArrivals(rate_per_s=1.0, gaps=gaps)
    counts = [np.searchsorted(next(arrivals.batches_s(rng(seed))), 10.0) for seed in range(1_500)]
    assert np.mean(counts) == pytest.approx(10, abs=1.2)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9_000).map(sorted), st.floats(0.1, 50))
def test_a_replay_is_the_same_times_faster(times_s: list[float], speed: float) -> None:
    batches = list(ReplayArrivals(times_s=lambda: iter(times_s), speed=speed).batches_s(rng(0)))
    assert np.concatenate(batches).tolist() == [time_s / speed for time_s in times_s]


@pytest.mark.parametrize("cv", [0, -1, 1e9, math.nan])
def test_a_cv_out_of_range_is_refused(cv: float) -> None:
    for kind in (Gaps.gamma, Gaps.log_normal):
        with pytest.raises(WorkloadError, match="cv must be"):
            kind(cv=cv)
    with pytest.raises(WorkloadError, match="rate must be"):
        RenewalArrivals(rate_per_s=cv if cv < 1 else math.nan, gaps=Gaps.poisson())
    with pytest.raises(WorkloadError, match="shape of WEIBULL"):
        Gaps.weibull(shape=0.01)


def drawn(traffic: PerAdapterTraffic, end_s: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    times_s, adapters = [], []
    for batch_s, who in traffic.batches(seed):
        times_s.append(batch_s)
        adapters.append(who)
        if batch_s.size and batch_s[-1] >= end_s:
            break
    all_s, everybody = np.concatenate(times_s), np.concatenate(adapters)
    assert (np.diff(all_s) >= 0).all()
    return all_s[all_s < end_s], everybody[all_s < end_s]


@given(
    kind=any_gaps(), rates=st.lists(st.floats(0.01, 20), min_size=1, max_size=30), seed=st.integers(0, 999)
)
def test_every_adapter_has_its_rate(kind: tuple[Gaps, float], rates: list[float], seed: int) -> None:
    gaps, cv = kind
    per_s = np.array([*rates, 0.0])
    end_s = 3_000 / per_s.sum()
    _, adapters = drawn(PerAdapterTraffic(rates=ConstantRates(rates_per_s=per_s, gaps=gaps)), end_s, seed)
    counts = np.bincount(adapters, minlength=per_s.size)
    expected = per_s * end_s
    assert (np.abs(counts - expected) <= 7 * max(cv, 1) * np.sqrt(expected) + 7 * max(cv, 1) ** 2).all()
    assert counts[-1] == 0, "a rate of nothing brings nothing"


def changing(num_adapters: int = 40) -> ChangingRates:
    return ChangingRates(
        rates_per_s=np.full(num_adapters, 0.8),
        every_s=300,
        factor=2,
        least_per_s=0.3,
        most_per_s=3.2,
        choices=(Gaps.poisson(), Gaps.log_normal(cv=2)),
    )


@given(SEEDS)
def test_rates_change_by_the_factor_within_their_bounds(seed: int) -> None:
    windows = list(islice(changing().windows(rng(seed)), 20))
    assert [window.start_s for window in windows] == [300.0 * number for number in range(20)]
    assert (windows[0].rates_per_s == 0.8).all()
    for before, after in pairwise(windows):
        assert after.start_s == before.end_s
        ratio = after.rates_per_s / before.rates_per_s
        at_bound = np.isin(after.rates_per_s, [0.3, 3.2])
        assert (np.isclose(ratio, 2) | np.isclose(ratio, 0.5) | at_bound).all()
        assert after.rates_per_s.min() >= 0.3
        assert after.rates_per_s.max() <= 3.2
    assert len({tuple(window.rates_per_s) for window in windows}) == 20


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_follow_rates_that_change(seed: int) -> None:
    traffic = PerAdapterTraffic(rates=changing())
    times_s, adapters = drawn(traffic, 1_500, seed)
    again_s, same = drawn(traffic, 1_500, seed)
    assert times_s.tolist() == again_s.tolist()
    assert adapters.tolist() == same.tolist()
    for window in islice(changing().windows(stream(seed, Purpose.RATE_CHANGES)), 5):
        inside = adapters[(times_s >= window.start_s) & (times_s < window.end_s)]
        expected = window.rates_per_s.sum() * 300
        assert inside.size == pytest.approx(expected, abs=6 * 2 * math.sqrt(expected))
        high = window.rates_per_s[inside] > np.median(window.rates_per_s)
        share = window.rates_per_s[window.rates_per_s > np.median(window.rates_per_s)].sum()
        assert high.mean() == pytest.approx(share / window.rates_per_s.sum(), abs=0.1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"every_s": 0}, "change_every_s"), ({"factor": 0.5}, "change_factor"), ({"least_per_s": 9}, "bounds")],
)
def test_changes_that_make_no_sense_are_refused(changes: dict[str, float], field: str) -> None:
    options = {"every_s": 300.0, "factor": 2.0, "least_per_s": 0.3, "most_per_s": 3.2} | changes
    with pytest.raises(WorkloadError, match=field):
        ChangingRates(rates_per_s=np.ones(2), choices=(Gaps.poisson(),), **options)


def test_kinds_of_gaps_can_be_mixed() -> None:
    table = GapTable.of([Gaps.regular(), Gaps.gamma(cv=3), Gaps.poisson()])
    who = np.tile(np.arange(3), 20_000)
    gaps = table.draw(rng(1), who)
    assert (gaps[who == 0] == 1).all()
    assert gaps[who == 1].std() == pytest.approx(3, rel=0.1)
    assert gaps[who == 2].std() == pytest.approx(1, rel=0.05)
