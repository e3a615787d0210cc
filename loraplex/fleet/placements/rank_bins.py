"""The replicas of a LoRAServe placement while they are filled, before they have numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_NEGLIGIBLE: Final = 1e-9
"""Relative size below which shares of a bin or of an adapter come from rounding alone."""


@dataclass(kw_only=True, slots=True)
class RankBins:
    """Bins to be filled to the same utilisation, `target`.

    With padded kernels the largest rank in a bin sets the pace of everything in it; otherwise each adapter
    counts by the operating point of its own rank."""

    num_bins: int
    num_adapters: int
    operating_points: Mapping[int, float]
    target: float
    padded: bool
    used: list[float] = field(init=False)
    """The utilisation of each bin."""
    max_ranks: list[int] = field(init=False)
    """The largest rank in each bin; 0 if it is empty."""
    tokens_per_s: list[dict[int, float]] = field(init=False)
    """The tokens/s that each bin has of each adapter: by adapter, then by bin."""

    def __post_init__(self) -> None:
        self.used = [0.0] * self.num_bins
        self.max_ranks = [0] * self.num_bins
        self.tokens_per_s = [{} for _ in range(self.num_adapters)]

    def room(self, index: int, rank: int) -> float:
        """Return how many tokens/s of this rank the bin takes before it is full; 0 if it is."""
        free = self.target - self.used_with(index, rank)
        if free <= _NEGLIGIBLE * self.target:
            return 0.0
        return free * self._point(index, rank)

    def used_with(self, index: int, rank: int) -> float:
        """Return the bin's utilisation if it also had an adapter of this rank, but no tokens of it yet."""
        largest = self.max_ranks[index]
        if not self.padded or rank <= largest or largest == 0:
            return self.used[index]
        return self.used[index] * self.operating_points[largest] / self.operating_points[rank]

    def least_used(self, rank: int) -> int:
        """Return the bin that would be the least used one with an adapter of this rank."""
        slows_none = not self.padded or rank <= min(self.max_ranks)
        used = self.used if slows_none else [self.used_with(each, rank) for each in range(self.num_bins)]
        return used.index(min(used))

    def put(self, index: int, adapter: int, rank: int, tokens_per_s: float) -> None:
        """Add this many tokens/s of the adapter to the bin, whether there is room or not."""
        self.used[index] = self.used_with(index, rank) + tokens_per_s / self._point(index, rank)
        self.max_ranks[index] = max(self.max_ranks[index], rank)
        of_adapter = self.tokens_per_s[adapter]
        of_adapter[index] = of_adapter.get(index, 0.0) + tokens_per_s

    def put_what_fits(self, index: int, adapter: int, rank: int, tokens_per_s: float) -> float:
        """Add as much of the adapter to the bin as fits, and return the tokens/s left over."""
        room = self.room(index, rank)
        if room <= 0:
            return tokens_per_s
        if tokens_per_s <= room * (1 + _NEGLIGIBLE):
            self.put(index, adapter, rank, tokens_per_s)
            return 0.0
        self.put(index, adapter, rank, room)
        return tokens_per_s - room

    def _point(self, index: int, rank: int) -> float:
        return self.operating_points[max(rank, self.max_ranks[index]) if self.padded else rank]
