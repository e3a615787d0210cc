"""Batching policies: which requests run together in a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Batching(StrEnum):
    """A batching policy of one engine."""

    FCFS = "fcfs"
    """First come, first served: requests of all adapters share every batch."""
    MERGED = "merged"
    """One adapter at a time, merged into the base weights: that of the oldest request."""
    DYNAMIC = "dynamic"
    """dLoRA's: an adapter with many requests runs merged while the others pause, by thresholds that adapt to
    the traffic, and by credits, so that no adapter starves."""
    GROUPED = "grouped"
    """As fcfs, but in a long queue requests are admitted by adapter, so that a step reads fewer of them."""
    AUTO = "auto"
    """Grouped admission, and merged steps where they are predicted to give more tokens per second, both
    within `DelayBound`."""

    @property
    def merges(self) -> bool:
        """Return whether steps may run on weights into which an adapter is merged."""
        return self in (Batching.MERGED, Batching.DYNAMIC, Batching.AUTO)

    @property
    def needs_costs(self) -> bool:
        """Return whether the policy decides by predicted costs."""
        return self not in (Batching.FCFS, Batching.MERGED)

    @property
    def groups(self) -> bool:
        """Return whether waiting requests may be admitted by adapter."""
        return self in (Batching.GROUPED, Batching.AUTO)


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayBound:
    """The longest delay that batching may cause a request, compared with first come, first served: `share`
    of its time so far, or `seconds` if that is more."""

    share: float = 0.25
    seconds: float = 0.25

    def allowed_s(self, so_far_s: float) -> float:
        """Return the most seconds of delay for a request whose time so far is `so_far_s`."""
        return max(self.share * so_far_s, self.seconds)
