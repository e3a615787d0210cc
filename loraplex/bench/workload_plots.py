"""Plots a workload as a PNG: arrivals over time, lengths, and popularity of adapters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: a server has no display
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatter

from loraplex.workload.summary import WorkloadCounts


class _Plain(LogFormatter):
    """Labels the ticks that a logarithmic axis would label by powers of ten."""

    def __init__(self, text: str, scale: float = 1.0) -> None:
        super().__init__(labelOnlyBase=False)
        self._text, self._scale = text, scale

    def __call__(self, x: float, pos: int | None = None) -> str:
        return self._text.format(x * self._scale) if super().__call__(x, pos) else ""


def _label_plainly(axis: Axis, text: str, scale: float = 1.0) -> None:
    axis.set_major_formatter(_Plain(text, scale))
    axis.set_minor_formatter(_Plain(text, scale))


def plot_workload(counts: WorkloadCounts, path: Path, *, title: str) -> None:
    figure, (arrivals, lengths, popularity) = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    _draw_arrivals(arrivals, counts)
    _draw_lengths(lengths, {"prompt": counts.prompts, "output": counts.outputs})
    _draw_popularity(popularity, counts.adapters)
    for axes in (arrivals, lengths, popularity):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    try:
        figure.savefig(path, dpi=150, format="png")
    finally:
        plt.close(figure)


def _draw_arrivals(axes: plt.Axes, counts: WorkloadCounts) -> None:
    width_s = counts.times.width_s
    rates = np.asarray(counts.times.counts) / width_s
    edges_s = np.arange(rates.size + 1) * width_s
    axes.stairs(rates, edges_s, fill=True, alpha=0.35)
    axes.axhline(counts.num_requests / float(edges_s[-1]), color="0.3", linewidth=1, linestyle="--")
    axes.set_title("Arrivals", fontsize=11)
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"requests per second, over {width_s:g} s")
    axes.set_xlim(0, float(edges_s[-1]))
    axes.set_ylim(bottom=0)


def _draw_lengths(axes: plt.Axes, seen: dict[str, Counter[int]]) -> None:
    for name, counter in seen.items():
        values = np.array(sorted(counter))
        shares = np.cumsum([counter[value] for value in values.tolist()]) / counter.total()
        axes.step(np.append(values[:1], values), np.append([0.0], shares), where="post", label=name)
    axes.set_xscale("log")
    _label_plainly(axes.xaxis, "{:,.0f}")
    axes.set_title("Lengths", fontsize=11)
    axes.set_xlabel("tokens")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right", fontsize=9, frameon=False)


def _draw_popularity(axes: plt.Axes, adapters: Counter[int]) -> None:
    shares = np.sort(np.array(list(adapters.values())))[::-1] / adapters.total()
    # Zipf's law is a straight line.
    axes.loglog(np.arange(1, shares.size + 1), shares, ".-", markersize=4, linewidth=1)
    _label_plainly(axes.xaxis, "{:,.0f}")
    _label_plainly(axes.yaxis, "{:.3g}%", 100)
    axes.set_title("Adapters", fontsize=11)
    axes.set_xlabel("adapter, by popularity")
    axes.set_ylabel("share of requests")
