from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.stop_strings import StopMatcher, StopStrings


def run(stops: list[str], parts: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """Return the text shown after each part, and the stop string that ended it."""
    matcher = StopMatcher(StopStrings(stops, include_stop=include_stop))
    shown = []
    for part in parts:
        scan = matcher.push(part)
        shown.append(scan.text)
        if scan.stop is not None:
            return shown, scan.stop
    return [*shown, matcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "stop"),
    [
        (["END"], ["abENDcd"], ["ab"], "END"),
        (["END"], ["abE", "N", "Dcd"], ["ab", "", ""], "END"),
        (["END"], ["abE", "Nx"], ["ab", "ENx", ""], None),
        (["END"], ["abEN"], ["ab", "EN"], None),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", ""], "\n\n"),
        (["xyz", "y"], ["axyz"], ["ax"], "y"),
        (["bc", "abc"], ["abc"], [""], "abc"),
        (["é!"], ["caf", "é", "!"], ["caf", "", ""], "é!"),
    ],
)
def test_text_is_withheld_only_as_far_as_it_could_be_a_stop_string(
    stops: list[str], parts: list[str], shown: list[str], stop: str | None
) -> None:
    assert run(stops, parts) == (shown, stop)


def test_the_stop_string_can_be_part_of_the_output() -> None:
    assert run(["END"], ["abE", "NDcd"], include_stop=True) == (["ab", "END"], "END")


@given(
    st.text(alphabet="ab", max_size=40),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_the_result_is_that_of_a_search_in_the_whole_text(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    shown, stop = run(stops, parts)

    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    expected = min(ends, default=None)
    if expected is None:
        assert ("".join(shown), stop) == (text, None)
    else:
        end, negative_length, found = expected
        assert ("".join(shown), stop) == (text[: end + negative_length], found)
