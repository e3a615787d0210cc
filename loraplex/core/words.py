"""Words that depend on a number."""

from __future__ import annotations


def plural(noun: str, number: float) -> str:
    """Return the noun as it follows the number: "adapter" after 1, "adapters" after any other."""
    return noun if number == 1 else f"{noun}s"
