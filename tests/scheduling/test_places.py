"""Contiguous places for adapters below a fixed top and above a border that moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.scheduling.places import Places


def places_of(size: int, **adapters: int) -> Places:
    places = Places(size)
    places.extend(size)
    for name, num_units in adapters.items():
        assert places.put(name, num_units)
        places.unfix(name)
    return places


def test_an_adapter_goes_to_the_upper_end_of_the_smallest_hole() -> None:
    places = places_of(20, a=4, b=3, c=2)
    places.remove("b")
    assert places.put("d", 2)
    assert places.span_of("d") == (14, 2)


def test_the_lowest_is_lifted_into_a_hole_that_takes_it() -> None:
    places = places_of(12, a=4, b=3, c=3)
    places.remove("a")
    (shift,) = places.lift(5)
    assert (shift.name, shift.source, shift.target, shift.size) == ("c", 2, 9, 3)
    assert places.gap == 5


def test_what_fits_no_hole_is_not_lifted() -> None:
    places = places_of(12, a=2, b=3, c=5)
    places.remove("a")
    assert places.lift(4) == []


def test_all_are_pushed_together_from_above() -> None:
    places = places_of(12, a=2, b=3, c=5)
    places.remove("a")
    assert [(s.name, s.source, s.target) for s in places.push_together()] == [("b", 7, 9), ("c", 2, 4)]
    assert places.gap == 4
    assert places.push_together() == []


def test_what_is_fixed_stays() -> None:
    places = places_of(12, a=2, b=3)
    assert places.put("c", 5)
    places.remove("b")
    assert places.lift(4) == places.push_together() == []
    places.unfix("c")
    assert places.push_together() != []


def test_adapters_above_a_lowered_end_go_into_holes_below_it() -> None:
    places = places_of(20, a=4, b=3, c=2)
    places.remove("b")
    shifts = places.lower_end(5)
    assert shifts is not None
    assert [(s.name, s.source, s.target) for s in shifts] == [("a", 16, 7)]
    assert places.end == 15
    places.check_integrity({"a": 4, "c": 2})


def test_where_no_hole_fits_all_are_packed_below_a_lowered_end() -> None:
    places = places_of(12, a=4, b=3, c=3)
    shifts = places.lower_end(1)
    assert shifts is not None
    assert [(s.name, s.source, s.target) for s in shifts] == [("c", 2, 1), ("b", 5, 4), ("a", 8, 7)]
    assert places.lower_end(2) is None, "there is one unit left"
    assert places.end == 11
    places.check_integrity({"a": 4, "b": 3, "c": 3})


def test_what_is_fixed_above_a_lowered_end_keeps_it_where_it_is() -> None:
    places = places_of(12, a=2)
    assert places.put("b", 3)
    assert places.lower_end(2) is not None, "b is fixed below"
    assert places.span_of("b") == (7, 3)
    assert places.lower_end(1) is None
    places.unfix("b")
    assert places.lower_end(1) is not None


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 12), st.sampled_from(["put", "fix", "lower", "raise"])),
        max_size=60,
    )
)
def test_a_moving_end_overwrites_nothing_whatever_is_fixed(
    actions: list[tuple[int, int, str]],
) -> None:
    places, sizes, top = places_of(60), dict[str, int](), 60
    units: list[str | None] = [None] * top
    for number, size, action in actions:
        name = f"n{number}"
        if action == "raise":
            places.raise_end(min(size, top - places.end))
        elif action == "lower":
            before = {known: places.span_of(known) for known in sizes}
            expected = places.can_lower_end(min(size, places.end))
            shifts = places.lower_end(min(size, places.end))
            assert (shifts is not None) == expected
            if shifts is None:
                assert before == {known: places.span_of(known) for known in sizes}
            for shift in shifts or ():
                content = units[shift.source : shift.source + shift.size]
                assert set(content) == {shift.name}, "it was overwritten before it was copied"
                units[shift.target : shift.target + shift.size] = content
        elif name in sizes:
            places.remove(name)
            del sizes[name]
        elif places.put(name, size):
            if action == "put":
                places.unfix(name)
            sizes[name] = size
            start, _ = places.span_of(name)
            units[start : start + size] = [name] * size
        for known, known_size in sizes.items():
            start, _ = places.span_of(known)
            assert units[start : start + known_size] == [known] * known_size
        places.check_integrity(sizes)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.booleans()), max_size=60))
def test_no_two_overlap_and_shifts_account_for_every_change(
    actions: list[tuple[int, int, bool]],
) -> None:
    places, sizes = places_of(40), dict[str, int]()
    for number, size, widens in actions:
        name = f"n{number}"
        starts = {known: places.span_of(known)[0] for known in sizes}
        if widens:
            for shift in [*places.lift(size), *places.push_together()]:
                assert starts[shift.name] == shift.source < shift.target
                starts[shift.name] = shift.target
            assert places.gap == places.num_free
            assert starts == {known: places.span_of(known)[0] for known in sizes}
        elif name in sizes:
            places.remove(name)
            del sizes[name]
        elif places.put(name, size):
            places.unfix(name)
            sizes[name] = size
        places.check_integrity(sizes)
