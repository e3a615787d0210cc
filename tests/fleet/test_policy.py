"""Policies and routers by their names."""

from __future__ import annotations

import pytest

from loraplex.core.errors import UserError
from loraplex.core.words import unknown_name
from loraplex.fleet.policy import PLACEMENTS, PlacementContext, Policy
from loraplex.fleet.routers.named import ROUTERS, router_named


@pytest.mark.parametrize("routing", ROUTERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_policy_is_found_by_its_name(routing: str, placement: str) -> None:
    policy = Policy.of_name(f"{routing}+{placement}")
    assert policy == Policy(routing=routing, placement=placement)
    assert Policy.of_name(policy.name) == policy


def test_auto_has_one_word() -> None:
    assert Policy.of_name("auto") == Policy(routing="auto", placement="auto")
    assert Policy.of_name("auto").name == "auto"
    assert Policy.of_name("auto+migrate").name == "auto+auto+migrate"
    assert Policy.of_name("auto+everywhere+migrate").name == "auto+everywhere+migrate"
    assert Policy.of_name("auto+contiguous").name == "auto+contiguous"


def test_an_oracle_is_auto_that_knows_the_future() -> None:
    oracle = Policy.of_name("oracle")
    assert oracle == Policy(routing="auto", placement="auto", knows_future=True)
    assert oracle.name == "oracle"
    assert Policy.of_name("oracle+loraserve").name == "oracle+loraserve"
    assert Policy.of_name("oracle+auto+migrate").name == "oracle+auto+migrate"


def test_a_routing_alone_places_everywhere() -> None:
    assert Policy.of_name("most-idle").name == "most-idle+everywhere"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("most-idel", r"there is no routing 'most-idel'; did you mean most-idle\?"),
        ("rankaware+random", r"there is no routing 'rankaware'; did you mean rank-aware"),
        ("random+loraserv", r"there is no placement 'loraserv'; did you mean loraserve\?"),
        ("random+xyz", "there is no placement 'xyz'; there are everywhere, contiguous, random, "),
        ("", "there is no routing ''; there are random, round-robin, "),
        ("random+", "there is no placement ''; there are everywhere, "),
        ("a+b+c", r"'a\+b\+c' is no policy; write ROUTING\+PLACEMENT"),
        ("loraserve", r"'loraserve' is a placement, and a routing is wanted here; .* auto\+loraserve"),
        ("random+most-idle", r"'most-idle' is a routing, and a placement is wanted.*most-idle\+everywhere"),
        ("random+migrat", r"did you mean random\+migrate\?"),
        ("random+auto+migrat", r"did you mean random\+auto\+migrate\?"),
        ("auto+auto+migrate+migrate", r"did you mean auto\+auto\+migrate\?"),
        ("auto+migrate+migrate", r"did you mean auto\+migrate\?"),
        ("auto+auto+MIGRATE", r"did you mean auto\+auto\+migrate\?"),
        ("AUTO", r"there is no routing 'AUTO'; did you mean auto\?"),
        ("random+EVERYWHRE", r"there is no placement 'EVERYWHRE'; did you mean everywhere\?"),
    ],
)
def test_a_name_that_is_none_gives_those_near_it(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Policy.of_name(name)


def test_router_named_gives_near_names_too() -> None:
    with pytest.raises(UserError, match="did you mean rendezvous"):
        router_named("rendevous")


def test_several_near_names_are_all_said() -> None:
    assert unknown_name("routing", "routing-tabl", ROUTERS) == (
        "there is no routing 'routing-tabl'; did you mean routing-table or routing-table-random?"
    )


def test_every_placement_can_be_made() -> None:
    rates = {8: 100.0, 64: 50.0}
    context = PlacementContext(operating_points=rates, token_rates=rates, padded=True)
    for name, placement in PLACEMENTS.items():
        assert (placement is None) == (name == "everywhere")
        if placement is not None:
            assert callable(placement.make(context).place)
