"""Places of running requests become free no later than what they are behind says."""

from __future__ import annotations

import random

import pytest
from views import requests

from loraplex.scheduling.batching.place_lags import PlaceLags

MERGED_S, UNMERGED_S = 1.0, 1.5
MOST_S = 10.0


def test_what_a_place_is_behind_goes_on_to_the_next_request_on_it() -> None:
    lags, (first, second, third) = PlaceLags(), requests("abc")
    lags.place([first, second], 5.0, any_waits=True)
    first.lag_s = 2.0
    lags.place([second, third], 6.0, any_waits=False)
    assert (second.lag_s, third.lag_s) == (0.0, 2.0)


def test_what_a_place_is_ahead_does_not_go_on() -> None:
    lags, (first, second) = PlaceLags(), requests("ab")
    lags.place([first], 5.0, any_waits=True)
    first.lag_s = -2.0
    lags.place([second], 6.0, any_waits=False)
    assert second.lag_s == 0.0


def test_nobody_is_behind_by_more_than_it_has_waited() -> None:
    lags, (first, second) = PlaceLags(), requests("ab")
    lags.place([first], 5.0, any_waits=True)
    first.lag_s, second.arrived_s = 2.0, 5.5
    lags.place([second], 6.0, any_waits=False)
    assert second.lag_s == 0.5


def test_a_place_that_nobody_waited_for_is_no_longer_behind() -> None:
    lags, (first, second) = PlaceLags(), requests("ab")
    lags.place([first], 5.0, any_waits=False)
    first.lag_s = 2.0
    lags.place([], 6.0, any_waits=False)
    lags.place([second], 7.0, any_waits=False)
    assert second.lag_s == 0.0


def test_few_places_are_as_late_as_the_one_that_is_furthest_behind() -> None:
    lags, (first, second) = PlaceLags(), requests("ab")
    lags.place([first, second], 5.0, any_waits=True)
    first.lag_s = 2.0
    assert lags.latest_s([first], MERGED_S, 0.5, 6.0) == 3.0
    assert lags.latest_s([second], MERGED_S, 0.5, 6.0) == 1.5


def test_many_places_are_as_late_as_their_mean_and_a_margin() -> None:
    lags, made = PlaceLags(), requests("a" * 164)
    for step in range(65):  # one ends and one begins in each
        lags.place(made[step : step + 100], 100.0 + step, any_waits=True)
    made[64].lag_s = 50.0
    latest_s = lags.latest_s(made[64:65], 0.0, 0.0, 164.0)
    assert 0.5 < latest_s < 0.5 + 2.1 * 0.5**0.5, "half an end is missing, more or less"


@pytest.mark.parametrize("places", [16, 32])
@pytest.mark.parametrize("share", [0.7, 0.9])
def test_nobody_is_admitted_later_than_the_places_were_allowed_to_be(places: int, share: float) -> None:
    rng = random.Random(places)
    tokens = [max(1, int(rng.lognormvariate(3, 0.9))) for _ in range(8 * places)]
    hot = [rng.random() < share for _ in tokens]
    expected, _ = _admissions(tokens, hot, places, 0.0)
    found, num_pauses = _admissions(tokens, hot, places, MOST_S)
    assert num_pauses > 0
    assert max(one - other for one, other in zip(found, expected, strict=True)) <= MOST_S + 1e-6


def _admissions(tokens: list[int], hot: list[bool], places: int, most_s: float) -> tuple[list[float], int]:
    """Return when each request is admitted, in order, and how often one paused. Requests that are not on the
    hot adapter pause while no place is predicted to be late by more than `most_s`."""
    made, lags = requests("a" * len(tokens)), PlaceLags()
    left: dict[int, int] = {}
    admitted: list[float] = []
    now_s, num_pauses = 0.0, 0
    while left or len(admitted) < len(tokens):
        while len(left) < places and len(admitted) < len(tokens):
            left[len(admitted)] = tokens[len(admitted)]
            made[len(admitted)].arrived_s = -1000.0
            admitted.append(now_s)
        lags.place([made[each] for each in left], now_s, any_waits=len(admitted) < len(tokens))
        paused = [each for each in left if not hot[each]]
        gains_s = UNMERGED_S - MERGED_S
        merges = len(paused) < len(left) * gains_s / UNMERGED_S and (
            lags.latest_s([made[each] for each in paused], MERGED_S, gains_s, now_s) <= most_s
        )
        for each in list(left):
            if merges and not hot[each]:
                made[each].lag_s += MERGED_S
                num_pauses += 1
                continue
            made[each].lag_s -= gains_s if merges else 0.0
            left[each] -= 1
            if left[each] == 0:
                del left[each]
        now_s += MERGED_S if merges else UNMERGED_S
    return admitted, num_pauses
