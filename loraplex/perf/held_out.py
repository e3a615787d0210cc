"""The quality of a cost model on samples that it was not fitted to, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.perf.least_squares import FitQuality


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Quality on held-out samples. `decode`, `prefill`: steps drawn at random. `load`: reads of adapters, and
    copies if there is a bus, of sizes between those fitted. `serving`: steps under changing load, on a
    GPU."""

    decode: FitQuality
    prefill: FitQuality
    load: FitQuality
    serving: FitQuality | None = None
