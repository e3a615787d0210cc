from __future__ import annotations

import pytest

from loraplex.core.clock import ManualClock
from loraplex.core.progress import ProgressLines, in_words, shown_progress


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (61, "1 min"),
        (45 * 60, "45 min"),
        (3600, "1 h 0 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize("words", ["about", "at most"])
def test_there_is_a_line_for_each_phase_and_every_few_seconds_with_what_is_left(words: str) -> None:
    clock, lines = ManualClock(), list[str]()
    report = ProgressLines("measuring", left=words, write=lines.append, now_s=clock.now_s)
    report("engine", 0.0)
    for second in range(1, 41):
        clock.advance(1.0)
        report("steps", second / 80)
    clock.advance(1.0)
    report("disk", 0.5)
    assert lines == [
        "measuring: engine, 0%",
        "measuring: steps, 1%",
        f"measuring: steps, 14%, {words} 1 min left",
        f"measuring: steps, 26%, {words} 59 s left",
        f"measuring: steps, 39%, {words} 49 s left",
        f"measuring: disk, 50%, {words} 41 s left",
    ]


def test_shares_of_a_phase_are_not_taken_for_shares_of_all() -> None:
    clock, lines = ManualClock(), list[str]()
    report = ProgressLines("loading", left=None, write=lines.append, now_s=clock.now_s)
    for done in (None, 0.5, 1.0):
        report("weights", done)
        clock.advance(10.0)
    report("graphs", None)
    assert lines == ["loading: weights", "loading: weights, 50%", "loading: weights, 100%", "loading: graphs"]


def test_without_a_terminal_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress("fitting", expected="some minutes") as report:
        report("round 1", 0.1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["fitting: some minutes", "fitting: round 1, 10%"]


def test_on_a_terminal_there_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown_progress("fitting", expected="some minutes") as report:
        report("round 1", 0.1)
    err = capsys.readouterr().err
    assert "fitting: round 1" in err
    assert "10%" in err
