"""Plot of a simulated run beside a live one: throughput, TTFT and ITL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from loraplex.twin.scores import smape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STATISTICS: Final = ("mean", "p50", "p95", "p99")
_PANELS: Final = (
    ("Throughput", "output tokens/s", "output_tok_s", 1.0),
    ("Time to first token (TTFT)", "milliseconds", "ttft_s", 1e3),
    ("Time between tokens (ITL)", "milliseconds", "itl_s", 1e3),
)
_WIDTH: Final = 0.38
_ROOM_ABOVE: Final = 1.18


def draw_comparison(pairs: dict[str, dict[str, tuple[float, float]]], *, title: str) -> Figure:
    """Draw pairs of what the twin predicts and what was measured. `pairs`: by figure, and by statistic of
    it."""
    shown = [panel for panel in _PANELS if pairs.get(panel[2])]
    widths = [1.0 + len(pairs[name]) for _, _, name, _ in shown]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    all_axes = figure.subplots(1, len(shown), width_ratios=widths, squeeze=False)[0]
    for axes, (heading, unit, name, factor) in zip(all_axes, shown, strict=True):
        scaled = {
            statistic: (twin * factor, live * factor) for statistic, (twin, live) in pairs[name].items()
        }
        _draw_pairs(axes, scaled)
        axes.set_title(heading, fontsize=11)
        axes.set_ylabel(unit)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, fontsize=12)
    return figure


def pairs_of(
    figures: dict[str, dict[str, float]], summary: dict[str, Any], live: Any
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the compared figures as pairs, with percentiles where both runs have them."""
    result = live.get("result", live.get("results", live))
    pairs = {name: {"mean": (row["twin"], row["live"])} for name, row in figures.items()}
    for name in ("ttft_s", "itl_s"):
        ours, measured = summary.get(name), result.get(f"{name[:-2]}_ms")
        if name not in pairs or ours is None or not isinstance(measured, dict):
            continue
        for statistic in _STATISTICS[1:]:
            found = measured.get(statistic)
            if isinstance(found, int | float) and statistic in ours:
                pairs[name][statistic] = (ours[statistic], found / 1e3)
    return pairs


def _draw_pairs(axes: Axes, pairs: dict[str, tuple[float, float]]) -> None:
    """Draw two bars for each statistic, and how far apart they are."""
    for index, (label, colour) in enumerate((("measured", "0.65"), ("predicted by the twin", "C0"))):
        heights = [live if index == 0 else twin for twin, live in pairs.values()]
        places = [place + (index - 0.5) * _WIDTH for place in range(len(pairs))]
        axes.bar(places, heights, width=_WIDTH, label=label, color=colour)
    for place, (twin, live) in enumerate(pairs.values()):
        axes.annotate(
            f"{smape([(twin, live)]):.1f}%", (place, max(twin, live)),
            xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9,
        )  # fmt: skip
    if len(pairs) > 1:
        axes.set_xticks(range(len(pairs)), list(pairs))
    else:
        axes.set_xticks([])
    axes.set_xlabel("above the bars: SMAPE" if len(pairs) > 1 else "")
    axes.set_ylim(0, max(max(pair) for pair in pairs.values()) * _ROOM_ABOVE or 1.0)
    axes.set_xlim(-0.7, len(pairs) - 0.3)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
