"""The picture of a plan: GPUs as columns, adapters as blocks by load, coloured by rank."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loraplex.planner.plan import whole_adapters

if TYPE_CHECKING:
    from loraplex.planner.check import PlanCheck
    from loraplex.planner.plan import Plan

_WIDTH: Final = 0.8
_EDGE: Final = 0.4
"""Line width between blocks, which vanish into each other if there are too many to tell apart."""
_MANY: Final = 60
"""Adapters of a GPU above which blocks have no edges."""


def draw_plan(plan: Plan, checked: PlanCheck | None = None) -> Figure:
    """Draw the offered tokens per second of each adapter, stacked by GPU with the largest ranks lowest."""
    figure = Figure(figsize=(max(6.0, min(0.5 * len(plan.gpus) + 3, 16.0)), 5), layout="constrained")
    axes = figure.subplots()
    tokens = plan.prompt_tokens + plan.output_tokens
    ranks = sorted({adapter.rank for gpu in plan.gpus for adapter in gpu.adapters})
    colours = {rank: f"C{index % 10}" for index, rank in enumerate(ranks)}
    labelled: set[int] = set()
    for number, gpu in enumerate(plan.gpus):
        bottom = 0.0
        by_rank = defaultdict(list)
        for adapter in gpu.adapters:
            by_rank[adapter.rank].append(adapter.rate_rps * tokens)
        for rank in sorted(by_rank, reverse=True):
            for height in sorted(by_rank[rank], reverse=True):
                axes.bar(
                    number,
                    height,
                    _WIDTH,
                    bottom,
                    color=colours[rank],
                    edgecolor="white",
                    linewidth=0.0 if len(gpu.adapters) > _MANY else _EDGE,
                    label=None if rank in labelled else f"rank {rank}",
                )
                labelled.add(rank)
                bottom += height
    axes.set_title(f"{len(whole_adapters(plan.gpus)):,} adapters on {len(plan.gpus)} GPUs")
    axes.set_xlabel("GPU")
    axes.set_ylabel("offered tokens per second, prompts and answers")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if ranks:
        handles, labels = axes.get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda index: int(labels[index].split()[1]))
        figure.legend(
            [handles[index] for index in order],
            [labels[index] for index in order],
            loc="outside right upper",
        )
    return figure
