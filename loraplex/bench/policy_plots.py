"""Plots cold-start policies side by side as a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import matplotlib

matplotlib.use("Agg")  # before pyplot: a server has no display
import matplotlib.pyplot as plt
import numpy as np

from loraplex.bench.cold_scenarios import PolicyFigures
from loraplex.core.cold_start import ColdStart

_COMPARED: Final = {"ttft_ms": "TTFT", "tpt_ms": "TPT", "e2e_ms": "E2E"}
_COLOURS: Final = {
    policy: "0.35" if policy is ColdStart.CACHED else f"C{number}" for number, policy in enumerate(ColdStart)
}
"""Colours of policies: the same in every panel and picture, whatever a policy is compared with."""


def plot_policies(figures: Mapping[ColdStart, PolicyFigures], path: Path, *, title: str) -> None:
    """Draw what each policy adds to the latencies with all adapters cached, and the CDF of TTFT."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    others = {policy: found for policy, found in figures.items() if policy is not ColdStart.CACHED}
    width = 0.8 / max(len(others), 1)
    for number, (policy, found) in enumerate(others.items()):
        places = np.arange(len(_COMPARED)) + (number - (len(others) - 1) / 2) * width
        heights = [100 * found.overheads[metric]["mean"] for metric in _COMPARED]
        drawn = bars.bar(places, heights, width=0.9 * width, label=str(policy), color=_COLOURS[policy])
        bars.bar_label(drawn, fmt="%+.1f", fontsize=8, padding=2)
    bars.set_xticks(range(len(_COMPARED)), list(_COMPARED.values()))
    bars.set_ylabel("% over cached, mean")
    bars.axhline(0, color="0.4", linewidth=0.8)
    bars.margins(y=0.15)
    for each, found in figures.items():
        ordered_ms = np.sort(np.asarray(found.latencies.ttft_ms))
        shares = np.arange(1, len(ordered_ms) + 1) / len(ordered_ms)
        curves.step(ordered_ms, shares, where="post", label=str(each), color=_COLOURS[each])
    curves.set_xlabel("time to first token, milliseconds")
    curves.set_ylabel("share of requests")
    curves.set_xlim(left=0)
    for axes in (bars, curves):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    # A fixed place: matplotlib's search for the best one warns when a busy machine makes it slow.
    figure.legend(
        *curves.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(figures),
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(title, fontsize=12)
    try:
        figure.savefig(path, dpi=150, format="png")
    finally:
        plt.close(figure)
