from __future__ import annotations

import pytest

from loraplex.adapters.patterns import Pattern, match_table
from loraplex.core.errors import AdapterFormatError

KEYS = ["model.layers.0.self_attn.q_proj", "model.layers.10.mlp.up_proj"]


def pattern(regex: str, *, full: bool = True) -> Pattern:
    return Pattern(field="target_modules", source=regex, regex=regex, full=full)


def test_plain_and_elaborate_patterns_match_alike() -> None:
    assert match_table([pattern("model.layers.0.self_attn.q_proj")], KEYS) == [["", None]]
    assert match_table([pattern(r".*\.(q|k)_proj")], KEYS) == [["", None]]
    index = pattern(r".*?\.(?P<idx>\d+)\.", full=False)
    assert match_table([index, pattern("model")], KEYS) == [["0", "10"], [None, None]]


def test_a_pattern_that_would_take_years_is_stopped() -> None:
    with pytest.raises(AdapterFormatError, match=r"more than 0.2 s.*without nested repetition") as caught:
        match_table([pattern(r"(([a-z._0-9])+)+!")], KEYS, time_limit_s=0.2)
    assert caught.value.field == "target_modules"


@pytest.mark.parametrize("regex", ["(", "(" * 5000 + ")" * 5000, "a{2,1}", "(?P<idx>a)(?P<idx>b)", "\\"])
def test_a_pattern_that_does_not_compile_is_refused(regex: str) -> None:
    with pytest.raises(AdapterFormatError, match="not a valid regular expression"):
        match_table([pattern(regex)], KEYS)


def test_very_many_patterns_do_not_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.adapters import pattern_worker

    monkeypatch.setattr(pattern_worker, "match_all", None)
    keys = [f"layers.{n}" for n in range(2000)]
    table = match_table([pattern(f"layers.{n}") for n in range(600)], keys, time_limit_s=60.0)
    assert len(table) == 600
    assert table[5][5] == ""
