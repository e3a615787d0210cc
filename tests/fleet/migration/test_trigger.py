from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.errors import UserError
from loraplex.fleet.migration.trigger import UnevenReplicas, uneven_replicas


@pytest.mark.parametrize(
    ("kv_share", "num_requests", "uneven"),
    [
        ([0.95, 0.5, 0.2], [5, 5, 5], ([0], [2])),
        ([0.9, 0.89, 0.89], [5, 5, 5], ([0], [1])),
        ([0.89, 0.1, 0.1], [5, 5, 5], None),
        ([0.95, 0.95, 0.95], [5, 5, 5], None),
        ([0.1, 0.1, 0.1], [30, 4, 2], ([0], [2])),
        ([0.1, 0.1, 0.1], [26, 4, 2], None),
        # If every replica is short of memory, the requests decide.
        ([0.95, 0.95, 0.95], [30, 4, 2], ([0], [2])),
        ([0.5], [100], None),
    ],
)
def test_the_artifacts_thresholds_pair_the_most_with_the_least_loaded(
    kv_share: list[float], num_requests: list[int], uneven: tuple[list[int], list[int]] | None
) -> None:
    found = uneven_replicas(kv_share=kv_share, num_requests=num_requests)
    assert (found and (list(found.overloaded), list(found.underloaded))) == uneven


def test_several_pairs_enter_the_most_extreme_first() -> None:
    found = uneven_replicas(kv_share=[0.92, 0.3, 0.95, 0.99, 0.1, 0.2], num_requests=[0] * 6, num_pairs=2)
    assert found == UnevenReplicas(overloaded=(3, 2), underloaded=(4, 5))


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 200)), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_no_replica_enters_on_both_sides_and_looking_changes_nothing(
    load: list[tuple[float, int]], num_pairs: int
) -> None:
    shares = np.array([share for share, _ in load])
    requests = np.array([number for _, number in load], np.int64)
    before = shares.copy(), requests.copy()
    found = uneven_replicas(kv_share=shares, num_requests=requests, num_pairs=num_pairs)
    assert (shares == before[0]).all()
    assert (requests == before[1]).all()
    if found is not None:
        assert not set(found.overloaded) & set(found.underloaded)
        assert 1 <= len(found.overloaded) <= num_pairs
        assert 1 <= len(found.underloaded) <= num_pairs


@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 1000))
def test_equal_replicas_never_enter(num_replicas: int, share: float, requests: int) -> None:
    load = {"kv_share": [share] * num_replicas, "num_requests": [requests] * num_replicas}
    assert uneven_replicas(**load) is None


@pytest.mark.parametrize(
    ("kv_share", "num_requests", "message"),
    [
        ([], [], "a fleet of no replicas"),
        ([0.5, 0.5], [1], "KV shares of 2 replicas and requests of 1"),
        ([0.5, math.nan], [1, 1], "among the KV shares is nan, of replica 1"),
        ([0.5, 0.5], [-1, 1], "among the numbers of requests is -1, of replica 0"),
    ],
)
def test_loads_without_sense_are_refused(
    kv_share: list[float], num_requests: list[int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        uneven_replicas(kv_share=kv_share, num_requests=num_requests)


def test_a_replica_that_accepts_nothing_is_not_sent_requests() -> None:
    accepts = [True, False, True]
    found = uneven_replicas(kv_share=[0.95, 0.0, 0.5], num_requests=[9, 0, 5], accepts=accepts)
    assert found is not None
    assert found.underloaded == (2,)
    found = uneven_replicas(kv_share=[0.5, 0.0, 0.1], num_requests=[90, 0, 5], accepts=accepts)
    assert found is not None
    assert found.underloaded == (2,)


@pytest.mark.parametrize(
    ("num_requests", "uneven"),
    [
        ([27, 13, 0, 0], None),  # 17 above the mean of four, 7 above that of two
        ([40, 4, 0, 0], ([0], [1])),
        ([40, 11, 0, 0], None),
        ([44, 11, 0, 0], ([0], [1])),  # not below the mean of four
    ],
)
def test_replicas_that_are_down_are_no_part_of_the_mean(
    num_requests: list[int], uneven: tuple[list[int], list[int]] | None
) -> None:
    accepts = [True, True, False, False]
    found = uneven_replicas(kv_share=[0.1] * 4, num_requests=num_requests, accepts=accepts)
    assert (found and (list(found.overloaded), list(found.underloaded))) == uneven
    assert uneven_replicas(kv_share=[0.1] * 4, num_requests=[0] * 4, accepts=[False] * 4) is None
    drained = uneven_replicas(kv_share=[0.1] * 3, num_requests=[40, 2, 2], accepts=[False, True, True])
    assert drained == UnevenReplicas(overloaded=(0,), underloaded=(1,)), "one that is drained still has some"
