"""Copies between replicas: one after the other on each link, and no faster than the link."""

from __future__ import annotations

import pytest

from loraplex.core.errors import UserError
from loraplex.twin.links import Links, LinkSpeed

SPEED = LinkSpeed(bytes_per_s=100.0, latency_s=0.5)


def test_copies_wait_for_both_links() -> None:
    links = Links(SPEED, 4)
    assert links.copy(source=0, target=1, num_bytes=100, now_s=2.0) == 3.5
    assert links.copy(source=2, target=3, num_bytes=100, now_s=2.0) == 3.5, "other links"
    assert links.copy(source=0, target=2, num_bytes=100, now_s=2.0) == 5.0, "behind the first on its way out"
    assert links.copy(source=3, target=2, num_bytes=100, now_s=2.0) == 6.5, "behind the third on its way in"
    assert links.copy(source=1, target=0, num_bytes=100, now_s=2.0) == 3.5, "the other direction"
    assert links.free_at_s(0) == 5.0


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, float("nan")])
def test_a_link_that_never_delivers_is_refused(bytes_per_s: float) -> None:
    with pytest.raises(UserError, match="never delivers"):
        LinkSpeed(bytes_per_s=bytes_per_s)


@pytest.mark.parametrize("latency_s", [-1.0, float("nan"), float("inf")])
def test_a_latency_that_cannot_be_is_refused(latency_s: float) -> None:
    with pytest.raises(UserError, match="latency must be 0 seconds or more"):
        LinkSpeed(bytes_per_s=1.0, latency_s=latency_s)


def test_a_link_without_end_is_refused() -> None:
    with pytest.raises(UserError, match="give a number"):
        LinkSpeed(bytes_per_s=float("inf"))
