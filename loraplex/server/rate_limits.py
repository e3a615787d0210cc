"""OpenAI's headers that say how much more a client may ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

Header = tuple[bytes, bytes]


class RateLimit(NamedTuple):
    """A limit on requests or tokens (`kind`), what is left of it, and the seconds until all of it is."""

    kind: str
    limit: int
    remaining: int
    reset_s: float


def rate_limit_headers(limits: Iterable[RateLimit]) -> list[Header]:
    """Return x-ratelimit-limit-requests and so on."""
    found: list[Header] = []
    for kind, limit, remaining, reset_s in limits:
        values = {"limit": str(limit), "remaining": str(max(remaining, 0)), "reset": duration(reset_s)}
        found += [(f"x-ratelimit-{name}-{kind}".encode(), text.encode()) for name, text in values.items()]
    return found


def duration(seconds: float) -> str:
    """Return a duration as in these headers: 17ms, 8.6s, 6m0s."""
    if seconds <= 0:
        return "0s"
    milliseconds, tenths = math.ceil(seconds * 1e3), math.ceil(seconds * 10)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if tenths < 600:
        return f"{tenths / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
