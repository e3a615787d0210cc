"""Simulated fleets as pictures: requests over time, in all and by replica, and policies beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from loraplex.twin.fleet import FleetOutcome
    from loraplex.twin.fleet_compare import Capacity, PolicyRun
    from loraplex.twin.outcome import Timeline
    from loraplex.twin.slo import Slo

_NUM_INTERVALS: Final = 100


def draw_outcome(outcome: FleetOutcome, *, title: str) -> Figure:
    """Draw requests that run and wait over time, those of each replica over time, and each replica's share of
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
    """Draw a row for each replica, the darker the more requests run and wait there."""
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
    """Draw the distributions of the first seed's times and the SLO's limits, and attainments."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    ttft, tpt, attained = figure.subplots(1, 3)
    for axes, name, limit_s, label in (
        (ttft, "ttft_s", slo.ttft_s, "time to first token, ms"),
        (tpt, "tpt_s", slo.tpt_s, "time per token, ms"),
    ):
        for policy, runs in found.items():
            values_ms = [1e3 * each for each in getattr(runs[0], name)]
            shares = [index / max(len(values_ms) - 1, 1) for index in range(len(values_ms))]
            axes.step(values_ms, shares, where="post", label=policy)
        axes.set_xlabel(label)
        axes.set_ylabel("share of requests")
        axes.set_xscale("log")
        axes.grid(alpha=0.25)
        if limit_s is not None:
            axes.axvline(limit_s * 1e3, color="0.4", linestyle="--", linewidth=1)
    names = list(found)
    for index, runs in enumerate(found.values()):
        values = [100 * each.figures.attainment for each in runs]
        attained.plot(values, [index] * len(values), "o")
    attained.set_yticks(range(len(names)), names, fontsize=8)
    attained.set_xlabel("requests within the SLO, %, each seed")
    attained.grid(alpha=0.25)
    handles, labels = ttft.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_capacities(found: Mapping[str, Capacity], *, attainment: float, title: str) -> Figure:
    """Draw the attainment of each policy over the rates that were tried."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, each in found.items():
        rates = [rate for rate, _ in each.tried]
        shares = [100 * share for _, share in each.tried]
        axes.plot(rates, shares, "o-", markersize=3, label=f"{name}, {_rate(each.rps)}")
    axes.axhline(100 * attainment, color="0.4", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("requests within the SLO, %")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False, fontsize=8)
    axes.set_title(title, fontsize=11)
    return figure


def _rate(rps: float | None) -> str:
    if rps is None:
        return "at no rate"
    return f"{rps:,.1f}/s" if math.isfinite(rps) else "no limit found"


def _draw_bars(axes: Axes, values: Sequence[int], label: str) -> None:
    axes.bar(range(len(values)), values, width=1.0 if len(values) > 20 else 0.8)
    axes.set_xlabel("replica")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel(label)
    axes.grid(alpha=0.25, axis="y")
