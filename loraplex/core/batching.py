"""Batching policies: which requests run together in a step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from loraplex.core.errors import OptionError

_BOUND: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(%|ms|s)")
_UNITS: Final = {"%": ("share", 0.01), "ms": ("seconds", 0.001), "s": ("seconds", 1.0)}


ADMISSION_SHARE: Final = 0.6
PAUSE_SHARE: Final = 0.3
"""Shares of the bound on delays that admission by adapter and pauses may use up, by prediction. The rest is
for what was not predicted."""


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
    """The order of fcfs, but in a long queue requests are admitted by adapter: a step reads fewer of them."""
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
    def knows_tenants(self) -> bool:
        """Return whether requests are served by the shares and objectives of their tenants. Policies that
        displace running requests need one order of all requests, in which these keep their places."""
        return self not in (Batching.MERGED, Batching.DYNAMIC)

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


def bound_of(text: str | None, batching: Batching) -> DelayBound:
    """Return the bound that a text such as `25%,250ms` stands for; a part that is left out is 0. None is the
    default. Raises OptionError for any other text, and with a policy that knows no bound."""
    if text is None:
        return DelayBound()
    if not batching.groups:
        raise OptionError(
            f"the bound is for batching by grouped or auto, not {batching}; leave it out, or choose one of "
            "these"
        )
    found = [_BOUND.fullmatch(part.strip()) for part in text.split(",")]
    values: dict[str, float] = {}
    for part in found:
        name, scale = _UNITS[part[2]] if part is not None else ("", 0.0)
        if part is None or name in values:
            raise OptionError(f"{text!r} is no bound; write it like 25%,250ms, or one of the two")
        values[name] = float(part[1]) * scale
    return DelayBound(**{"share": 0.0, "seconds": 0.0, **values})
