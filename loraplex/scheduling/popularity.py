"""Counts which adapters were requested most often lately."""

from __future__ import annotations

import heapq
from typing import Final

_HALF_LIFE: Final = 512
"""Number of requests after which an old one counts half as much as a new one."""
_GROWTH: Final = 2 ** (1 / _HALF_LIFE)
_LEAST: Final = 1 / 16
"""Adapters with a smaller count are forgotten."""


class Popularity:
    """Request counts that decay."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._weight = 1.0  # of the next request; growing it has the same effect as decaying all counts

    def asked(self, version: str) -> None:
        self._counts[version] = self._counts.get(version, 0.0) + self._weight
        self._weight *= _GROWTH
        if self._weight > 1 / _LEAST:
            self._fade()

    def forget(self, version: str) -> None:
        self._counts.pop(version, None)

    def most_asked(self, count: int) -> list[str]:
        """Return the most requested versions, in descending order."""
        return heapq.nlargest(count, self._counts, key=self._counts.__getitem__)

    def _fade(self) -> None:
        faded = {version: count / self._weight for version, count in self._counts.items()}
        self._counts = {version: count for version, count in faded.items() if count >= _LEAST}
        self._weight = 1.0
