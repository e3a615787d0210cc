from __future__ import annotations

import pytest

from loraplex.core.words import plural


@pytest.mark.parametrize(("number", "words"), [(0, "runs"), (1, "run"), (2, "runs"), (1.5, "runs")])
def test_a_noun_follows_its_number(number: float, words: str) -> None:
    assert plural("run", number) == words
