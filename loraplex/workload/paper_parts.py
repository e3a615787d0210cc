"""Parts that the papers' workloads share: published popularity, arrivals and lengths.

A part adds its options to a recipe. Given a folder of data, laid out as docs/workloads.md says, these refer
to a file; without one, to a synthetic stand-in fitted to that file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from loraplex.workload.popularity import zipf_shares
from loraplex.workload.recipe import ArrivalKind, LengthKind, PopularityKind, Recipe, RecipeError, Source

Part = Callable[[Recipe, Path | None], Recipe]

_MAX_PROMPT_TOKENS: Final = 3072
_MAX_OUTPUT_TOKENS: Final = 1024
"""Bounds of lengths in tokens: together the context of Llama 2, which most of the papers serve."""

_MAF_START_S: Final = 12 * 3600
"""Seconds to noon, an hour as skewed as the whole day. In the first hour, two functions make most of the
calls."""
_SERVEGEN_START_S: Final = 10 * 3600
_ADAPTER_CV: Final = 4.0
"""CV of one adapter's gaps: the median of MAF's minutes over a day, 32 adapters at 16 requests per second."""


def maf_popularity(skew: float) -> Part:
    """Make adapters as skewed as the calls of MAF's functions. `skew` is the exponent of the Zipf law
    closest to that curve, used without data."""

    def part(recipe: Recipe, data: Path | None) -> Recipe:
        if data is None:
            return replace(recipe, popularity=PopularityKind.ZIPF, skew=skew)
        file = published(data, "traces/maf2019_1000fn_totals")
        return replace(recipe, popularity=PopularityKind.TRACE, popularity_file=file)

    return part


def maf_calls(recipe: Recipe, data: Path | None) -> Recipe:
    """Make every function of MAF an adapter."""
    if data is None:
        shared = maf_popularity(1.15)(recipe, None)
        return replace(shared, arrivals=ArrivalKind.GAMMA, cv=1.1)
    return replace(
        recipe,
        source=Source.MAF,
        trace=published(data, "traces/maf2019_1000fn_1day_sparse"),
        start_s=_MAF_START_S,
    )


def maf_functions(functions_per_adapter: int, *, skew: float) -> Part:
    """Map all functions of MAF to a few adapters as dLoRA does. `skew`: of the Zipf law closest to the
    result."""

    def part(recipe: Recipe, data: Path | None) -> Recipe:
        if data is not None:
            from_trace = maf_calls(recipe, data)
            return replace(from_trace, functions_per_adapter=functions_per_adapter)
        assert recipe.num_adapters is not None
        assert recipe.rate is not None
        rates = (recipe.rate * zipf_shares(recipe.num_adapters, skew)).tolist()
        # Each adapter has its own arrivals, and so its own bursts.
        return replace(
            recipe,
            rate=None,
            rates=",".join(f"{rate:.6g}" for rate in rates),
            arrivals=ArrivalKind.GAMMA,
            cv=_ADAPTER_CV,
        )

    return part


def servegen_clients(recipe: Recipe, data: Path | None) -> Recipe:
    """Make every client of ServeGen's middle-sized model an adapter, with lengths of its clients."""
    if data is None:
        drawn = replace(recipe, arrivals=ArrivalKind.GAMMA, cv=1.3, popularity=PopularityKind.ZIPF, skew=1.2)
        return _log_normal(drawn, prompt=(540, 1.6), output=(58, 1.9))
    from_trace = replace(
        recipe,
        source=Source.SERVEGEN,
        trace=published(data, "traces/servegen_m-mid_client_rates"),
        start_s=_SERVEGEN_START_S,
    )
    return _empirical(from_trace, published(data, "lengths/servegen_m-mid_client_length_quantiles"))


def azure_lengths(recipe: Recipe, data: Path | None) -> Recipe:
    """Use the lengths of conversations with Azure's services in 2023."""
    if data is None:
        return _log_normal(recipe, prompt=(900, 0.7), output=(129, 1.1))
    return _empirical(recipe, published(data, "traces/azure_llm_2023_conv"))


def lmsys_lengths(recipe: Recipe, data: Path | None) -> Recipe:
    """Use output lengths of LMSYS-Chat-1M; no file has its prompts' lengths, so these are drawn."""
    if data is None:
        return replace(recipe, output_tokens=140, output_sigma=0.8)
    file = published(data, "lengths/lmsys_vicuna13b_output_lengths")
    return replace(recipe, lengths=LengthKind.EMPIRICAL, lengths_file=file)


def alpaca_lengths(recipe: Recipe, data: Path | None) -> Recipe:
    """Use short prompts and answers, with Alpaca's means of 19 and 58 tokens. There is no file of them."""
    return _log_normal(recipe, prompt=(16, 0.6), output=(35, 1.0))


def sharegpt_lengths(recipe: Recipe, data: Path | None) -> Recipe:
    """Use lengths of ShareGPT's single turns, with means of 250 and 231 tokens.

    The published file has the whole history in the prompt, unlike any of the papers.
    """
    return _log_normal(recipe, prompt=(120, 1.25), output=(150, 1.0))


def published(data: Path, name: str) -> Path:
    """Return the file of this name in the folder; RecipeError if it is not there."""
    for suffix in (".csv.gz", ".csv"):
        if (path := data / f"{name}{suffix}").is_file():
            return path
    raise RecipeError(
        "data", f"{data} has no {name}.csv.gz; leave it out, and a synthetic stand-in is drawn instead"
    )


def _empirical(recipe: Recipe, file: Path) -> Recipe:
    return replace(
        recipe,
        lengths=LengthKind.EMPIRICAL,
        lengths_file=file,
        max_prompt_tokens=_MAX_PROMPT_TOKENS,
        max_output_tokens=_MAX_OUTPUT_TOKENS,
    )


def _log_normal(recipe: Recipe, *, prompt: tuple[int, float], output: tuple[int, float]) -> Recipe:
    """Set log-normal lengths; `prompt` and `output` are (median, sigma of the logarithm)."""
    return replace(
        recipe,
        prompt_tokens=prompt[0],
        prompt_sigma=prompt[1],
        output_tokens=output[0],
        output_sigma=output[1],
        max_prompt_tokens=_MAX_PROMPT_TOKENS,
        max_output_tokens=_MAX_OUTPUT_TOKENS,
    )
