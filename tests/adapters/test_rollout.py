from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loraplex.adapters.rollout import (
    MAX_PREVIOUS,
    Canary,
    Rollout,
    VersionRef,
    canary_to_json,
    moved_back,
    moved_on,
    previous_to_json,
    rollout_from_json,
    takes_canary,
)
from loraplex.core.hub import HubRepo


def ref(version: str) -> VersionRef:
    return VersionRef(version=version, path=Path("/adapters") / version)


def history(*versions: str) -> tuple[VersionRef, ...]:
    """The previous versions of a name that went through these, one after the other."""
    previous: tuple[VersionRef, ...] = ()
    for old, new in pairwise(versions):
        previous = moved_on(previous, ref(old), new)
    return previous


def names(previous: tuple[VersionRef, ...]) -> str:
    return "".join(each.version for each in previous)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9])
def test_the_canary_gets_its_share_of_many_keys(share: float) -> None:
    num_keys = 40_000
    taken = sum(takes_canary("bot", "v2", share, f"req-{number}") for number in range(num_keys))
    # Four standard deviations of so many draws; the keys are always the same, so it cannot fail by chance.
    assert abs(taken - share * num_keys) < 4 * (share * (1 - share) * num_keys) ** 0.5


def test_which_keys_the_canary_gets_is_fixed() -> None:
    """Another hash would give users another version in the middle of a trial."""
    taken = [number for number in range(40) if takes_canary("bot", "v2", 0.25, f"user-{number}")]
    assert taken == [1, 8, 10, 13, 14, 17, 18, 35, 37]


def test_a_growing_share_keeps_the_keys_it_has_and_takes_more() -> None:
    keys = [f"user-{number}" for number in range(2000)]
    shares = [{key for key in keys if takes_canary("bot", "v2", share, key)} for share in (0.1, 0.2, 0.7)]
    assert shares[0] < shares[1] < shares[2]


def test_other_names_and_other_canaries_have_other_keys() -> None:
    keys = [f"user-{number}" for number in range(2000)]
    first, *others = (
        {key for key in keys if takes_canary(name, version, 0.5, key)}
        for name, version in (("bot", "v2"), ("bot", "v3"), ("poet", "v2"))
    )
    for other in others:
        assert 800 < len(first ^ other) < 1200


def test_a_name_remembers_the_last_versions_it_stood_for() -> None:
    assert names(history("a", "b", "c")) == "ba"
    assert names(history(*"abcdefgh")) == "gfedc"
    assert len(history(*"abcdefgh")) == MAX_PREVIOUS


def test_a_version_is_remembered_once_and_not_while_it_is_served() -> None:
    assert names(history("a", "b", "a")) == "b"
    assert names(history("a", "b", "c", "b")) == "ca"
    assert names(history("a", "a", "b", "b")) == "a"


def test_rolling_back_leads_further_back_and_not_forth() -> None:
    previous = history("a", "b", "c", "d")
    assert names(moved_back(previous, "c")) == "ba"
    assert names(moved_back(moved_back(previous, "c"), "b")) == "a"
    assert names(moved_back(previous, "a")) == ""


@pytest.mark.parametrize("source", [None, HubRepo(repo_id="org/bot", revision="0" * 40)])
def test_json_holds_all_of_it(source: HubRepo | None) -> None:
    canary = Canary(ref=VersionRef(version="v2", path=Path("/a b/ü"), source=source), share=0.1)
    for rollout in (Rollout(canary=canary, previous=history("a", "b", "c")), Rollout()):
        again = rollout_from_json(canary_to_json(rollout.canary), previous_to_json(rollout.previous))
        assert again == rollout


@pytest.mark.parametrize(
    "stored", ["{}", "[]", '{"version": "v", "path": "p", "source": "../x", "share": 1}']
)
def test_other_json_is_refused(stored: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        rollout_from_json(stored, "[]")
