"""Durations as people write them, in options and files: 500ms, 2s, 30m, 24h, 7d."""

from __future__ import annotations

import math
import re
from typing import Final

UNITS_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
"""Seconds of each unit."""
DURATION_FORM: Final = "write it like 2s or 500ms"
DURATION_PATTERN: Final = rf"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*({'|'.join(UNITS_S)})?\s*$"
_FORM: Final = re.compile(DURATION_PATTERN)


def duration_s(text: str) -> float | None:
    """Return the seconds of a duration, of which a number alone has as many; None if it is none."""
    found = _FORM.fullmatch(text)
    seconds = float(found[1]) * UNITS_S[found[2] or "s"] if found else math.inf
    return None if seconds == math.inf else seconds
