"""The options of `loraplex plan make`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

COMPARED_GPUS: Final = 8
"""A plan of more GPUs is compared with others only where it is asked for."""
_MOST_GPUS: Final = 10_000
_MOST_TOKENS: Final = 10_000_000

Out = Annotated[
    Path | None, typer.Option(help="Write the plan to this file; default: only print its tables.")
]
WorkloadFile = Annotated[
    Path | None, typer.Option(help="A .jsonl file whose requests show rates and lengths.")
]
AdapterTable = Annotated[
    Path | None,
    typer.Option(help="A .csv file with the columns name, rank and rate_rps, instead of a workload."),
]
FromUrl = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="URL", help="Plan for what this running server or fleet was asked for lately."
    ),
]
MeanPromptTokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=_MOST_TOKENS,
        help="Mean tokens of a prompt, with --adapters; --prompt-tokens of `workload make` is a median.",
    ),
]
MeanOutputTokens = Annotated[
    float | None, typer.Option(min=1, max=_MOST_TOKENS, help="Mean tokens of an answer, with --adapters.")
]
Gpus = Annotated[
    int | None,
    typer.Option(min=1, max=_MOST_GPUS, help="How many GPUs there are; default: as few as will do."),
]
SurrogateFile = Annotated[
    Path | None,
    typer.Option(help="Ask a file of `plan train` instead of the twin: faster, and less exact."),
]
Packer = Annotated[
    str,
    typer.Option(
        help="What divides the adapters: max-pack, improved, least-rate, max-base, max-base-half, random "
        "or dlora."
    ),
]
SloTtft = Annotated[
    str | None,
    typer.Option(help="Limit on each GPU's mean time to the first token: 10s or 500ms; default: none."),
]
SloItl = Annotated[
    str | None,
    typer.Option(help="Limit on each GPU's mean time between tokens: 30ms or 0.03s; default: none."),
]
Headroom = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=10,
        help="Share by which each GPU shall be able to serve more than is asked for; default: 0.05 for "
        "engines with slots. The judge of our own engine leaves room itself. Baselines leave none.",
    ),
]
Compare = Annotated[
    bool | None,
    typer.Option(
        "--compare/--no-compare",
        help="Simulate one GPU more and one less, and the plans of the baselines; default: for up to "
        f"{COMPARED_GPUS} GPUs.",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw the plan to this .png.")]
