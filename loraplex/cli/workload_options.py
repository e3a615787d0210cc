"""The options of `loraplex workload make`. They have no defaults here, but in `loraplex.workload.recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from loraplex.workload import recipe
from loraplex.workload.recipe import ArrivalKind, LengthKind, PopularityKind, Source

_PAPER: Final = "From a paper"
_REQUESTS: Final = "How many, and when"
_TRACE: Final = "From a trace"
_RATES: Final = "Each adapter with arrivals of its own"
_ADAPTERS: Final = "Adapters"
_LENGTHS: Final = "Lengths"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


Paper = Annotated[
    str | None,
    _option(
        _PAPER,
        "One of `loraplex workload papers`. Beside it only --data, --rate, --duration-s, --num-adapters and "
        "--seed can be given.",
        metavar="NAME",
    ),
]
Data = Annotated[
    Path | None,
    _option(
        _PAPER,
        "Folder of the published files it is made from. Without it, stand-ins are drawn.",
        metavar="DIR",
    ),
]
Duration = Annotated[
    float | None,
    _option(
        _REQUESTS,
        f"Seconds. Default: {recipe.DEFAULT_DURATION_S:g}, or all of a trace; no limit with --num-requests.",
    ),
]
NumRequests = Annotated[int | None, _option(_REQUESTS, "Stop after this many.")]
Rate = Annotated[
    float | None,
    _option(
        _REQUESTS, f"Requests per second, all in all. Default: {recipe.DEFAULT_RATE_PER_S:g}, or the trace's."
    ),
]
Arrivals = Annotated[ArrivalKind | None, _option(_REQUESTS, "How they are spaced. Default: poisson.")]
Cv = Annotated[
    float | None,
    _option(
        _REQUESTS,
        f"Coefficient of variation of gamma and log-normal gaps. Default: {recipe.DEFAULT_CV:g}; Poisson: 1.",
    ),
]
Replay = Annotated[
    Path | None,
    _option(
        _REQUESTS, "With --arrivals replay: a workload file, or a table with arrival_s, to take times from."
    ),
]
From = Annotated[
    tuple[Source, Path] | None,
    _option(
        _TRACE, "azure, maf, servegen or vtc, and its .csv or .csv.gz file.", "--from", metavar="KIND FILE"
    ),
]
Start = Annotated[float | None, _option(_TRACE, "Begin at this second of the trace.")]
FunctionsPerAdapter = Annotated[
    int | None,
    _option(
        _TRACE,
        "MAF: all functions, so many of the busiest to the first adapter, and so on, round and round "
        "(dLoRA's skewness). Without it, an adapter is a function, --num-adapters of them at random.",
    ),
]
Rates = Annotated[
    str | None, _option(_RATES, "Their rates, with weights if you like: 1.6,0.8,0.4 or 1.6:1,0.4:3.")
]
ChangeEvery = Annotated[
    float | None,
    _option(
        _RATES,
        "Every so many seconds, each rate goes up or down, and gaps turn Poisson or log-normal.",
    ),
]
ChangeFactor = Annotated[
    float | None,
    _option(_RATES, f"By how much rates go up or down. Default: {recipe.DEFAULT_CHANGE_FACTOR:g}."),
]
RateLeast = Annotated[
    float | None, _option(_RATES, "Never lower. Default: the lowest at first, by the factor.")
]
RateMost = Annotated[
    float | None, _option(_RATES, "Never higher. Default: the highest at first, times the factor.")
]
Tenants = Annotated[
    str | None,
    _option(_REQUESTS, "Whose they are, with weights if you like: acme:10,small:1. Default: nobody's."),
]
NumAdapters = Annotated[
    int | None,
    _option(_ADAPTERS, f"Default: {recipe.DEFAULT_NUM_ADAPTERS}, or all that maf, servegen and vtc have."),
]
Ranks = Annotated[
    str | None,
    _option(_ADAPTERS, f"With weights if you like: 8,16,32 or 8:3,64:1. Default: {recipe.DEFAULT_RANKS}."),
]
Popularity = Annotated[
    PopularityKind | None, _option(_ADAPTERS, "Who gets how many of the requests. Default: uniform.")
]
Skew = Annotated[
    float | None,
    _option(
        _ADAPTERS,
        "Exponent of zipf, zipf-within-rank and power-by-rank (default: 1); by how many powers of e "
        "exponentials fall (5).",
    ),
]
PopularityFile = Annotated[
    Path | None,
    _option(_ADAPTERS, "With --popularity trace: a MAF, ServeGen, VTC or workload file to be as skewed as."),
]
Lengths = Annotated[LengthKind | None, _option(_LENGTHS, "Default: log-normal.")]
LengthsFile = Annotated[
    Path | None,
    _option(
        _LENGTHS,
        "With --lengths empirical: a table with prompt_tokens and output_tokens, or outputs alone.",
    ),
]
PromptTokens = Annotated[
    int | None,
    _option(_LENGTHS, f"Fixed, or the median, no mean. Default: {recipe.DEFAULT_PROMPT_TOKENS}."),
]
OutputTokens = Annotated[
    int | None,
    _option(_LENGTHS, f"Fixed, or the median, no mean. Default: {recipe.DEFAULT_OUTPUT_TOKENS}."),
]
PromptSigma = Annotated[
    float | None,
    _option(_LENGTHS, f"Log-normal: of the logarithm. Default: {recipe.DEFAULT_PROMPT_SIGMA:g}."),
]
OutputSigma = Annotated[
    float | None,
    _option(_LENGTHS, f"Log-normal: of the logarithm. Default: {recipe.DEFAULT_OUTPUT_SIGMA:g}."),
]
MaxPromptTokens = Annotated[
    int | None,
    _option(_LENGTHS, f"Longer ones are cut. Default: {recipe.DEFAULT_MAX_PROMPT_TOKENS} if log-normal."),
]
MaxOutputTokens = Annotated[
    int | None,
    _option(_LENGTHS, f"Longer ones are cut. Default: {recipe.DEFAULT_MAX_OUTPUT_TOKENS} if log-normal."),
]
