"""Draw the capacity of each fleet policy, and its time per token on sixty servers.

    python -m benchmarks.draw_fleet

Reads results/fleet.json, writes docs/images/fleet-policies.svg.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.fleet_tables import AUTO, KERNELS, Mean, capacities, figures, runs_of

RESULTS: Final = Path(__file__).parent / "results"
PICTURE: Final = Path(__file__).parents[1] / "docs" / "images" / "fleet-policies.svg"
COLORS: Final = {
    "random": "#b0b0b0",
    "most-idle": "#7f7f7f",
    "first-fit": "#8c6d31",
    "pending-time": "#9467bd",
    "pending-time+burst-tolerance+migrate": "#9467bd",
    "rank-aware": "#e08214",
    "routing-table+loraserve": "#2ca02c",
    "affinity": "#17a2b8",
    "rendezvous": "#c0504d",
    "oracle": "#000000",
    "auto": "#3b6fb6",
}


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw two panels: capacity relative to `auto` by workload, and mean time per token of sixty servers."""
    matplotlib.rcParams["svg.hashsalt"] = "fleet"  # equal results make equal files
    drawing = Figure(figsize=(12, 5.0), layout="constrained")
    sustained, token = drawing.subplots(1, 2, width_ratios=(1.5, 1))
    _draw_capacities(sustained, capacities(runs_of(result, "auto")))
    _draw_times(token, figures(runs_of(result, "sixty"), "tpt_mean_s"))
    drawing.savefig(picture, metadata={"Date": None})


def _draw_capacities(axes: Axes, found: Mapping[str, Mapping[str, Mean]]) -> None:
    fleets = {name: each for name, each in found.items() if AUTO in each}
    for policy, color in COLORS.items():
        places = [place for place, each in enumerate(fleets.values()) if policy in each]
        ratios = [each[policy].mean / each[AUTO].mean for each in fleets.values() if policy in each]
        if places:
            marker = "D" if policy == AUTO else "o"
            axes.plot(ratios, places, marker, color=color, label=policy, markersize=6, alpha=0.85)
    axes.set_yticks(range(len(fleets)), list(fleets), fontsize=8)
    axes.invert_yaxis()
    axes.set_title("capacity by policy", fontsize=10)
    axes.set_xlabel("requests/s sustained, over those of auto")
    axes.grid(axis="x", alpha=0.25)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.13), ncols=3)


def _draw_times(axes: Axes, found: Mapping[str, Mapping[str, Mean]]) -> None:
    policies = list(dict.fromkeys(policy for each in found.values() for policy in each))
    for kernels, marker in zip(KERNELS, "os", strict=True):
        each = found.get(kernels, {})
        for place, policy in enumerate(policies):
            if policy in each:
                mean, half = each[policy]
                axes.errorbar(
                    mean * 1e3,
                    place,
                    xerr=None if half is None else half * 1e3,
                    fmt=marker,
                    color=COLORS.get(policy, "#7f7f7f"),
                    fillstyle="full" if kernels == KERNELS[0] else "none",
                )
    axes.set_yticks(range(len(policies)), policies, fontsize=8)
    axes.invert_yaxis()
    legend = f"(filled: {KERNELS[0]}, hollow: {KERNELS[1]})"
    axes.set_title("60 servers", fontsize=10)
    axes.set_xlabel(f"mean time per token, ms\n{legend}", fontsize=9)
    axes.grid(axis="x", alpha=0.25)


def main() -> None:
    draw(json.loads((RESULTS / "fleet.json").read_text()), PICTURE)


if __name__ == "__main__":
    main()
