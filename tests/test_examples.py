from __future__ import annotations

from pathlib import Path

from examples import SHORT, THOROUGH, examples
from hypothesis import settings

MAKEFILE = Path(__file__).parent.parent / "Makefile"


def test_property_tests_draw_more_examples_in_the_thorough_profile() -> None:
    in_force = settings.default.max_examples
    try:
        settings.load_profile(SHORT)
        assert examples(5, 12) == 5
        settings.load_profile(THOROUGH)
        assert examples(5, 12) == 12
        assert settings.default.derandomize
    finally:
        settings.load_profile(SHORT if in_force == settings.get_profile(SHORT).max_examples else THOROUGH)


def test_make_test_all_runs_property_tests_in_the_thorough_profile() -> None:
    recipe = MAKEFILE.read_text(encoding="utf-8").split("\ntest-all:")[1].split("\n\n")[0]
    assert '-m "slow or hypothesis"' in recipe
    assert f"--hypothesis-profile {THOROUGH}" in recipe
