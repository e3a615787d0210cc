"""Plots of simulated fleets: requests over time, in total and by replica, and comparisons of policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from loraplex.twin.fleet import FleetOutcome
    from loraplex.twin.fleet_compare import Capacity, PolicyRun
    from loraplex.twin.outcome import Timeline
    from loraplex.twin.slo import Slo

_NUM_INTERVALS: Final = 100
_NUM_DRAWN: Final = 100
"""Number of the 101 quantiles to draw: all but the slowest request."""
_LOG_ABOVE: Final = 15.0
"""An axis is logarithmic if its largest value exceeds its smallest by more than this factor."""
_FEW_DECADES: Final = 100.0
"""Up to this ratio of the largest to the smallest value there is room for labels at 2 and 5."""
_MISSES_SHOWN: Final = 6.0
"""Attainments are shown down to this many times the share of requests that may miss the SLO."""

_NUM_COLOURS: Final = 10
_LINES: Final = ("-", "--", ":", "-.")
_MARKERS: Final = ("o", "s", "^", "D")
_HATCHES: Final = ("", "//", "..", "xx")
"""Lines, markers and bars of the first ten policies, the next ten and so on."""
_ROWS: Final = 6
"""Policies for which the default height has room."""
_LEAST_SPAN: Final = 1.0
"""Width in per cent of the axis if all attainments are equal."""


class _Style(NamedTuple):
    """The style of a policy in all panels; unique among some forty."""

    colour: str
    line: str
    marker: str
    hatch: str

    @classmethod
    def of(cls, row: int) -> _Style:
        turn = row // _NUM_COLOURS % len(_LINES)
        return cls(f"C{row % _NUM_COLOURS}", _LINES[turn], _MARKERS[turn], _HATCHES[turn])


def draw_outcome(outcome: FleetOutcome, *, title: str) -> Figure:
    """Draw running and waiting requests over time, in total and by replica, and each replica's share of
    requests and adapters."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    (over_time, by_replica), (requests, adapters) = figure.subplots(2, 2)
    _draw_totals(over_time, outcome.all.timeline(num_intervals=_NUM_INTERVALS))
    _draw_replicas(by_replica, outcome.timelines(num_intervals=_NUM_INTERVALS))
    _draw_bars(requests, [each.num_requests for each in outcome.replicas], "requests")
    _draw_bars(adapters, [each.num_adapters for each in outcome.replicas], "adapters asked for")
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_totals(over_time: Axes, timeline: Timeline) -> None:
    edges_s = [timeline.interval_s * index for index in range(len(timeline.running) + 1)]
    for name, values in (("running", timeline.running), ("waiting", timeline.waiting)):
        over_time.stairs(values, edges_s, label=name, linewidth=1.5, baseline=None)
    over_time.set_xlabel("simulated seconds")
    over_time.set_ylabel(f"requests, mean over {timeline.interval_s:.3g} s")
    over_time.set_ylim(bottom=0)
    over_time.set_xlim(0, edges_s[-1] or 1.0)
    over_time.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _draw_replicas(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """Draw a row for each replica, darker where more requests run and wait."""
    present = [np.add(each.running, each.waiting) for each in timelines]
    interval_s, num_intervals = timelines[0].interval_s or 1.0 / _NUM_INTERVALS, len(present[0])
    edges_s = interval_s * np.arange(num_intervals + 1)
    edges = np.arange(len(timelines) + 1) - 0.5
    heat = axes.pcolormesh(edges_s, edges, np.array(present), cmap="Blues", vmin=0)
    axes.set_xlabel("simulated seconds")
    axes.set_ylabel("replica")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    assert axes.figure is not None
    axes.figure.colorbar(heat, ax=axes, label="requests that run and wait")


def draw_policies(found: Mapping[str, Sequence[PolicyRun]], *, slo: Slo, title: str) -> Figure:
    """Draw the distributions of the first seed's latencies with the SLO's limits, and the attainment of every
    seed with its mean."""
    figure = Figure(figsize=(12, 7.5 + 0.4 * max(len(found) - _ROWS, 0)), layout="constrained")
    of_seed = " of seed 0" if any(len(runs) > 1 for runs in found.values()) else ""
    (ttft, tpot), (tpt, attained) = figure.subplots(2, 2)
    for axes, name, limit_s, label in (
        (ttft, "ttft_s", slo.ttft_s, "time to first token (TTFT), ms"),
        (tpot, "tpot_s", slo.tpot_s, "time per output token after the first (TPOT), ms"),
        (tpt, "tpt_s", slo.tpt_s, "whole time over output tokens (TPT), ms"),
    ):
        quantiles_ms = {policy: [1e3 * s for s in getattr(runs[0], name)] for policy, runs in found.items()}
        _draw_distributions(axes, quantiles_ms, label, None if limit_s is None else limit_s * 1e3)
        axes.set_ylabel(f"requests{of_seed} within it, %")
    shares = {name: [run.figures.attainment for run in runs] for name, runs in found.items()}
    _draw_attainments(
        attained, {name: [share for share in each if share is not None] for name, each in shares.items()}
    )
    handles, labels = ttft.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(found) if len(found) <= 4 else 3, frameon=False
    )
    figure.suptitle(title)
    return figure


def _draw_distributions(
    axes: Axes, quantiles_ms: Mapping[str, Sequence[float]], label: str, limit_ms: float | None
) -> None:
    """Draw a line for each policy, up to the 99th percentile: a single slow request would squeeze the
    rest."""
    drawn = {policy: values[:_NUM_DRAWN] for policy, values in quantiles_ms.items()}
    for row, (policy, values) in enumerate(drawn.items()):
        style = _Style.of(row)
        axes.plot(
            values, range(len(values)), label=policy, linewidth=1.6, color=style.colour, linestyle=style.line
        )
    known = [value for values in drawn.values() for value in values]
    if known and max(known) > _LOG_ABOVE * min(known) > 0:
        axes.set_xscale("log")
        few = max(known) < _FEW_DECADES * min(known)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if limit_ms is not None:
        axes.axvline(limit_ms, color="0.4", linestyle="--", linewidth=1)
        axes.annotate(
            "SLO", (limit_ms, 2), xytext=(3, 0), textcoords="offset points", color="0.4", fontsize=9
        )
    axes.set_xlabel(label)
    axes.set_ylim(0, 100)
    _tidy(axes)


def _draw_attainments(axes: Axes, attainments: Mapping[str, Sequence[float]]) -> None:
    """Draw a row for each policy, the first on top: a mark for each seed, a bar at their mean, and the mean
    as text."""
    for row, shares in enumerate(attainments.values()):
        if not shares:
            continue
        values = [100 * share for share in shares]
        style = _Style.of(row)
        axes.plot(values, [row] * len(values), style.marker, color=style.colour, alpha=0.55, markersize=6)
        mean = sum(values) / len(values)
        axes.plot([mean], [row], "|", color=style.colour, markersize=14, markeredgewidth=2)
        axes.annotate(
            f"{mean:.2f}", (1.0, row), xycoords=("axes fraction", "data"),
            xytext=(6, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    axes.set_yticks(range(len(attainments)), list(attainments))
    axes.set_ylim(len(attainments) - 0.4, -0.6)
    axes.margins(x=0.08)
    known = {100 * share for shares in attainments.values() for share in shares}
    if len(known) == 1:
        (value,) = known
        pad = 0.08 * _LEAST_SPAN
        axes.set_xlim(max(value - _LEAST_SPAN / 2, 0.0) - pad, min(value + _LEAST_SPAN / 2, 100.0) + pad)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_xlabel("requests within the SLO, %: each seed, and the mean")
    _tidy(axes)


def draw_capacities(found: Mapping[str, Capacity], *, attainment: float, title: str) -> Figure:
    """Draw each policy's capacity, and its attainment over the tried rates, near the target."""
    figure = Figure(figsize=(12, 1.6 + max(0.45 * len(found), 3.0)), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
    for row, each in enumerate(found.values()):
        style = _Style.of(row)
        is_known = each.rps is not None and math.isfinite(each.rps)
        bars.barh(
            [row],
            [each.rps if is_known else 0.0],
            height=0.6,
            color=style.colour,
            hatch=style.hatch,
            edgecolor="white",
        )
        bars.annotate(
            _rate(each.rps), (each.rps or 0.0 if is_known else 0.0, row),
            xytext=(4, 0), textcoords="offset points", va="center",
        )  # fmt: skip
        rates = [rate for rate, _ in each.tried]
        curves.plot(
            rates, [100 * share for _, share in each.tried],
            color=style.colour, linestyle=style.line, marker=style.marker, markersize=4,
        )  # fmt: skip
    bars.set_yticks(range(len(found)), list(found))
    bars.set_ylim(len(found) - 0.5, -0.5)
    bars.margins(x=0.18)
    bars.set_xlabel("capacity, requests/s")
    _draw_wanted(curves, found, attainment)
    for axes in (bars, curves):
        _tidy(axes)
    figure.suptitle(title)
    return figure


def _draw_wanted(axes: Axes, found: Mapping[str, Capacity], attainment: float) -> None:
    """Set the range around the target attainment, where policies differ, and mark it."""
    least = max(0.0, 1.0 - _MISSES_SHOWN * max(1.0 - attainment, 0.002))
    shown = [rate for each in found.values() for rate, share in each.tried if share >= least]
    beyond = [
        min((rate for rate, share in each.tried if share < least), default=max(shown, default=1.0))
        for each in found.values()
    ]
    if shown:
        pad = 0.04 * (max(beyond) - min(shown)) or 0.04 * max(shown)
        axes.set_xlim(min(shown) - pad, max(*beyond, *shown) + pad)
        axes.set_ylim(100 * least, 100 + 5 * (1 - least))
    axes.axhline(100 * attainment, color="0.4", linestyle="--", linewidth=1)
    axes.annotate(
        f"{100 * attainment:g}% wanted", (1.0, 100 * attainment), xycoords=("axes fraction", "data"),
        xytext=(-4, 4), textcoords="offset points", ha="right", color="0.4", fontsize=9,
    )  # fmt: skip
    axes.set_xlabel("requests/s")
    axes.set_ylabel("requests within the SLO, %")


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _rate(rps: float | None) -> str:
    if rps is None:
        return "at no rate"
    if not math.isfinite(rps):
        return "no limit found"
    return f"{rps:,.0f}" if rps >= 100 else f"{rps:.3g}"


def _draw_bars(axes: Axes, values: Sequence[int], label: str) -> None:
    axes.bar(range(len(values)), values, width=1.0 if len(values) > 20 else 0.8)
    axes.set_xlabel("replica")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.25, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
