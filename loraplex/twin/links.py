"""The network between replicas: each has one link, which transfers one copy at a time in each direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraplex.core.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """Bytes per second of a replica's link, and seconds until the first byte arrives."""

    bytes_per_s: float
    latency_s: float = 20e-6

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise UserError(f"a link of {self.bytes_per_s:g} bytes/s never delivers an adapter; give more")
        if self.bytes_per_s == math.inf:
            raise UserError("a link cannot be without end in its bytes/s; give a number")
        if not 0 <= self.latency_s < math.inf:
            raise UserError(f"a link's latency must be 0 seconds or more, and finite, not {self.latency_s:g}")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a copy over idle links."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Links:
    """The links of all replicas, and when copies over them end."""

    def __init__(self, speed: LinkSpeed, num_replicas: int) -> None:
        self._speed = speed
        self._sends_until_s = [0.0] * num_replicas
        self._receives_until_s = [0.0] * num_replicas

    def free_at_s(self, replica: int) -> float:
        """Return when a replica has sent everything requested of it."""
        return self._sends_until_s[replica]

    def copy(self, *, source: int, target: int, num_bytes: int, now_s: float) -> float:
        """Begin a copy as soon as both links are free; return when it ends."""
        begin_s = max(now_s, self._sends_until_s[source], self._receives_until_s[target])
        end_s = begin_s + self._speed.seconds(num_bytes)
        self._sends_until_s[source] = self._receives_until_s[target] = end_s
        return end_s
