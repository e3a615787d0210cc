"""Options that the commands of simulated fleets share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from loraplex.cli.durations import Duration, duration_option

_SHORTEST_PERIOD_S: Final = 0.1

Replicas = Annotated[int, typer.Option("--replicas", help="How many replicas, all alike.")]
Policies = Annotated[
    str,
    typer.Option(
        help="Names with commas between them, each ROUTING[+PLACEMENT][+migrate]: "
        "random,routing-table+loraserve. `loraplex fleet policies` lists the parts."
    ),
]
Period = Annotated[
    Duration,
    duration_option(
        "--period", least=_SHORTEST_PERIOD_S, text="The time between plans of where adapters are placed."
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="Speed at which replicas copy adapters from each other, such as 25GB/s; default: each replica "
        "reads them from its own disk.",
    ),
]
Costs = Annotated[
    str,
    typer.Option(
        "--costs",
        help="How policies predict the time of a step: `steps`, by the profile, or `linear`, by the papers' "
        "straight line fitted to it.",
    ),
]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm",
        help="As if the fleet had served before: its first plan knows the demand of the first minute.",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures to this .png file.")]
