"""Numbers of examples that property tests draw: some in `make test`, more in `make test-all`."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

SHORT: Final = "short"
THOROUGH: Final = "thorough"
"""The profile of `make test-all`, given as `--hypothesis-profile`."""

# No deadline: shared machines are slow at times, and no test here is about time. The same examples in every
# run: a failure that comes and goes is found by raising max_examples, not by running again.
# A quarter of the usual number: `make test` is to stay well below ten minutes on two cores.
settings.register_profile(SHORT, deadline=None, derandomize=True, max_examples=25)
settings.register_profile(THOROUGH, settings.get_profile(SHORT), max_examples=100)


def examples(short: int, thorough: int) -> int:
    """Return the number of examples of a test, each of which takes long, by the profile in force."""
    is_thorough = settings.default.max_examples == settings.get_profile(THOROUGH).max_examples
    return thorough if is_thorough else short
