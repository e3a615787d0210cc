"""Plot of a simulated run: running and waiting requests over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from loraplex.twin.outcome import Outcome

_NUM_INTERVALS: Final = 100
"""Number of intervals that can be told apart in the picture."""


def draw_outcome(outcome: Outcome, *, workload: str, profile: str) -> Figure:
    """Return the figure: means over intervals, titled with workload and profile."""
    from matplotlib.figure import Figure

    timeline = outcome.timeline(num_intervals=_NUM_INTERVALS)
    interval_s = timeline.interval_s
    edges_s = [interval_s * index for index in range(len(timeline.running) + 1)]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in (("running", timeline.running), ("waiting", timeline.waiting)):
        axes.stairs(values, edges_s, label=name, linewidth=1.5, baseline=None)
    axes.set_title(f"{workload} on {profile}")
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel(f"requests, mean over {interval_s:.3g} s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, edges_s[-1] or 1.0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure
