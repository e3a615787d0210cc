"""Policies for a request whose adapter is not on the device yet."""

from __future__ import annotations

from enum import StrEnum


class ColdStart(StrEnum):
    """A cold start policy: what happens between the arrival of such a request and its first step."""

    CACHED = "cached"
    """Every adapter is loaded when it is registered, and stays resident."""
    ON_DEMAND = "on-demand"
    """All steps wait until the adapter is loaded."""
    OVERLAP = "overlap"
    """The adapter is loaded while other requests run; the request waits until it is resident."""
    PIPELINED = "pipelined"
    """The request runs at once; each layer waits for its own weights."""
    CPU_ASSIST = "cpu-assist"
    """The same as auto, with CPU workers on any bus: they compute LoRA of layers that have not arrived."""
    AUTO = "auto"
    """Pipelined if that delays the others in the step by no more than waiting for the next step would delay
    the request; with CPU workers where the bus is slow enough for them to pay."""
