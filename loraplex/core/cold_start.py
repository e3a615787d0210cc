"""How a request starts whose adapter is not on the device yet."""

from __future__ import annotations

from enum import StrEnum


class ColdStart(StrEnum):
    """What happens between the arrival of such a request and its first step."""

    CACHED = "cached"
    """Every adapter is brought in when it is registered, and stays."""
    ON_DEMAND = "on-demand"
    """All steps wait until it is there."""
    OVERLAP = "overlap"
    """It is brought in beside the steps of others; the request waits until it is there."""
    PIPELINED = "pipelined"
    """The request runs at once; each layer waits for its own weights."""
    CPU_ASSIST = "cpu-assist"
    """Pipelined, and CPU workers compute the first layers, for as long as they are not there."""
    AUTO = "auto"
    """Pipelined where others in the step do not wait for it longer than it would for the next step."""
