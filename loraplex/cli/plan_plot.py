"""The picture of a plan: GPUs as columns, adapters as blocks by load, coloured by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from matplotlib import colormaps
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from loraplex.core.words import plural
from loraplex.planner.plan import whole_adapters

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from loraplex.planner.check import PlanCheck
    from loraplex.planner.plan import Plan

_WIDTH: Final = 0.8
_EDGED_ABOVE: Final = 0.01
"""Height of a block, as a share of the highest column, from which it has an edge: of lower ones, edges would
be all that is seen."""
_MOST_TICKS: Final = 20
"""GPUs that are all numbered."""
_FEWEST_COLUMNS: Final = 4
"""Columns that there is room for at least, so that one GPU is not as wide as the picture."""
_ROOM_ABOVE: Final = 1.06
_LIGHTEST: Final = 0.12
"""Place in the colour map of the smallest rank: what is below is too light to be seen on white."""


def draw_plan(plan: Plan, checked: PlanCheck | None = None) -> Figure:
    """Draw the offered tokens per second of each adapter, stacked by GPU with the largest ranks lowest, and
    the most that each GPU serves, if it was simulated."""
    figure = Figure(figsize=(max(6.5, min(0.3 * len(plan.gpus) + 4, 14.0)), 4.8), layout="constrained")
    axes = figure.subplots()
    colours = _colours(sorted({adapter.rank for gpu in plan.gpus for adapter in gpu.adapters}))
    top_tok_s = _draw_blocks(axes, plan, colours)
    most = [] if checked is None else [gpu.most_tok_s for gpu in checked.gpus]
    for number, most_tok_s in enumerate(most):
        if most_tok_s is not None:
            ends = (number - _WIDTH / 2 - 0.05, number + _WIDTH / 2 + 0.05)
            axes.hlines(most_tok_s, *ends, colors="black", linewidth=1.5)
            top_tok_s = max(top_tok_s, most_tok_s)
    num_adapters = len(whole_adapters(plan.gpus))
    axes.set_title(
        f"{num_adapters:,} {plural('adapter', num_adapters)} on {len(plan.gpus):,} "
        f"{plural('GPU', len(plan.gpus))}\n{plan.profile}, packed by {plan.packer}",
        fontsize="medium",
    )
    axes.set_xlabel("GPU")
    axes.set_ylabel("offered tokens/s, prompts and answers")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(0, top_tok_s * _ROOM_ABOVE or 1.0)
    margin = max(_FEWEST_COLUMNS - len(plan.gpus), 0) / 2 + 0.6
    axes.set_xlim(-margin, len(plan.gpus) - 1 + margin)
    if len(plan.gpus) <= _MOST_TICKS:
        axes.set_xticks(range(len(plan.gpus)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [Patch(color=colour, label=f"rank {rank}") for rank, colour in colours.items()]
    if any(each is not None for each in most):
        handles.append(Line2D([], [], color="black", linewidth=1.5, label="most it serves"))
    if handles:
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure


def _colours(ranks: Sequence[int]) -> dict[int, Any]:
    """Return a colour for each rank, the larger the darker."""
    step = (1 - _LIGHTEST) / max(len(ranks) - 1, 1)
    return {rank: colormaps["viridis_r"](_LIGHTEST + step * place) for place, rank in enumerate(ranks)}


def _draw_blocks(axes: Axes, plan: Plan, colours: dict[int, Any]) -> float:
    """Draw the adapters, and return the height of the highest column."""
    tokens = plan.prompt_tokens + plan.output_tokens
    bottoms = [0.0] * len(plan.gpus)
    edged_tok_s = _EDGED_ABOVE * tokens * max((gpu.rate_rps for gpu in plan.gpus), default=0.0)
    for rank in sorted(colours, reverse=True):
        corners: list[list[tuple[float, float]]] = []
        edges: list[float] = []
        for number, gpu in enumerate(plan.gpus):
            left, right = number - _WIDTH / 2, number + _WIDTH / 2
            heights = (each.rate_rps * tokens for each in gpu.adapters if each.rank == rank)
            for height in sorted(heights, reverse=True):
                low, high = bottoms[number], bottoms[number] + height
                corners.append([(left, low), (left, high), (right, high), (right, low)])
                edges.append(0.4 if height > edged_tok_s else 0.0)
                bottoms[number] = high
        # One collection: a patch for each of thousands of adapters would take a minute.
        blocks = PolyCollection(corners, facecolors=[colours[rank]], edgecolors="white", linewidths=edges)
        axes.add_collection(blocks, autolim=False)
    return max(bottoms, default=0.0)
