"""Plots CDFs of a run's latencies as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: a server has no display
import matplotlib.pyplot as plt
import numpy as np

from loraplex.bench.report import Latencies

_MARKED_PERCENTILES = (50, 95, 99)


def plot_cdfs(samples: Latencies, path: Path, *, title: str) -> None:
    """Draw one panel each for TTFT, TPOT and E2E: the share of requests at or below each latency."""
    panels = {
        "Time to first token": samples.ttft_ms,
        "Time per output token": samples.tpot_ms,
        "End to end": samples.e2e_ms,
    }
    figure, all_axes = plt.subplots(1, len(panels), figsize=(12, 3.8), sharey=True, layout="constrained")
    for axes, (name, values_ms) in zip(all_axes, panels.items(), strict=True):
        _draw_cdf(axes, values_ms)
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("milliseconds")
    all_axes[0].set_ylabel("share of requests")
    figure.suptitle(title, fontsize=12)
    try:
        figure.savefig(path, dpi=150, format="png")
    finally:
        plt.close(figure)


def _draw_cdf(axes: plt.Axes, values_ms: Sequence[float]) -> None:
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if not values_ms:
        axes.text(0.5, 0.5, "no successful requests", transform=axes.transAxes, ha="center", color="0.4")
        return
    ordered_ms = np.sort(np.asarray(values_ms))
    shares = np.arange(1, len(ordered_ms) + 1) / len(ordered_ms)
    axes.step(np.concatenate(([ordered_ms[0]], ordered_ms)), np.concatenate(([0.0], shares)), where="post")
    # Percentiles go into a legend, not beside the curve, where close ones would overlap.
    for percentile in _MARKED_PERCENTILES:
        at_ms = float(np.percentile(ordered_ms, percentile))
        axes.plot(at_ms, percentile / 100, "o", markersize=5, label=f"p{percentile}  {at_ms:,.1f}")
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    # Zero on the axis keeps a narrow spread from looking like a wide one.
    axes.set_xlim(left=0, right=float(ordered_ms[-1]) * 1.05 or 1.0)
