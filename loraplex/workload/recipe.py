"""The options that define a workload. `build.make_workload` makes it.

None means "not given": the defaults are below, and options that are given but would have no effect are
refused, because a workload other than the one asked for would spoil any measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Final

from loraplex.workload.errors import WorkloadError
from loraplex.workload.request import Scalar

DEFAULT_DURATION_S: Final = 60.0
DEFAULT_RATE_PER_S: Final = 10.0
DEFAULT_NUM_ADAPTERS: Final = 32
DEFAULT_RANKS: Final = "16"
DEFAULT_CV: Final = 2.0
DEFAULT_PROMPT_TOKENS: Final = 75
DEFAULT_OUTPUT_TOKENS: Final = 117
DEFAULT_PROMPT_SIGMA: Final = 1.0
DEFAULT_OUTPUT_SIGMA: Final = 0.8
# Bounds of drawn lengths; a median above them needs its own bounds.
DEFAULT_MIN_TOKENS: Final = 8
DEFAULT_MAX_PROMPT_TOKENS: Final = 1024
DEFAULT_MAX_OUTPUT_TOKENS: Final = 512
DEFAULT_CHANGE_FACTOR: Final = 2.0


class RecipeError(WorkloadError):
    """An option is wrong, or does not go with the others."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message


class Source(StrEnum):
    """The trace that a workload is taken from, if it is not drawn."""

    AZURE = "azure"
    MAF = "maf"
    SERVEGEN = "servegen"
    VTC = "vtc"


class ArrivalKind(StrEnum):
    POISSON = "poisson"
    GAMMA = "gamma"
    LOG_NORMAL = "log-normal"
    REGULAR = "regular"
    REPLAY = "replay"


class PopularityKind(StrEnum):
    UNIFORM = "uniform"
    IN_TURN = "in-turn"
    ZIPF = "zipf"
    EXPONENTIAL = "exponential"
    ZIPF_WITHIN_RANK = "zipf-within-rank"
    POWER_BY_RANK = "power-by-rank"
    EXPONENTIAL_BY_RANK = "exponential-by-rank"
    SHIFTING = "shifting"
    TRACE = "trace"


# Exponent of Zipf's and the power law; for an exponential, by how many powers of e it falls from first to
# last.
DEFAULT_SKEWS: Final = {
    PopularityKind.ZIPF: 1.0,
    PopularityKind.ZIPF_WITHIN_RANK: 1.0,
    PopularityKind.EXPONENTIAL: 5.0,
    PopularityKind.POWER_BY_RANK: 1.0,
    PopularityKind.EXPONENTIAL_BY_RANK: 5.0,
}


class LengthKind(StrEnum):
    FIXED = "fixed"
    LOG_NORMAL = "log-normal"
    EMPIRICAL = "empirical"


class MadeFrom(StrEnum):
    """The data that a paper's workload is made from."""

    PUBLISHED = "published files"
    STAND_INS = "synthetic stand-ins"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All options; see docs/workloads.md.

    `rate` is of all adapters together; `rates` are of single adapters, with weights, as `ranks` are. A trace
    keeps its own rate if none is given. `start_s` is in the trace's time, `duration_s` in the workload's.
    `paper` and `made_from` are for people: its name in `papers`, and what it is made from.
    """

    paper: str | None = None
    made_from: MadeFrom | None = None
    seed: int = 0
    duration_s: float | None = None
    num_requests: int | None = None
    rate: float | None = None
    source: Source | None = None
    trace: Path | None = None
    start_s: float | None = None
    functions_per_adapter: int | None = None
    arrivals: ArrivalKind | None = None
    cv: float | None = None
    replay: Path | None = None
    rates: str | None = None
    change_every_s: float | None = None
    change_factor: float | None = None
    rate_least: float | None = None
    rate_most: float | None = None
    num_adapters: int | None = None
    ranks: str | None = None
    popularity: PopularityKind | None = None
    skew: float | None = None
    popularity_file: Path | None = None
    lengths: LengthKind | None = None
    lengths_file: Path | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prompt_sigma: float | None = None
    output_sigma: float | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    tenants: str | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        given = set(self.given())
        for field, needs, has_effect in _effects(self):
            if field in given and not has_effect:
                raise RecipeError(field, f"has an effect only with {needs}")
        for field, why in _needed(self):
            if field not in given:
                raise RecipeError(field, f"is needed with {why}")

    def given(self) -> dict[str, Scalar]:
        """Return the options that are not None, and the seed; files by name only, since folders are
        private."""
        found: dict[str, Scalar] = {"seed": self.seed}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                found[field.name] = value.name if isinstance(value, Path) else value
        return found

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that it reads."""
        named = (self.trace, self.replay, self.popularity_file, self.lengths_file)
        return tuple(path for path in named if path is not None)

    @property
    def arrival_kind(self) -> ArrivalKind:
        return self.arrivals or ArrivalKind.POISSON

    @property
    def popularity_kind(self) -> PopularityKind:
        return self.popularity or PopularityKind.UNIFORM

    @property
    def length_kind(self) -> LengthKind:
        return self.lengths or LengthKind.LOG_NORMAL

    @property
    def is_per_adapter(self) -> bool:
        """True if each adapter has its own arrivals."""
        return self.rates is not None or self.change_every_s is not None

    @property
    def has_own_lengths(self) -> bool:
        return self.source in (Source.AZURE, Source.VTC)


def _effects(recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """Yield (option, what it requires, whether that holds)."""
    drawn = recipe.source is None
    for name in ("arrivals", "rates", "change_every_s"):
        yield name, "arrivals that are drawn, not those of a trace", drawn
    yield "trace", "a source", not drawn
    yield "start_s", "a trace", not drawn
    yield "functions_per_adapter", "source maf", recipe.source is Source.MAF
    yield (
        "cv",
        "gamma or log-normal arrivals, or with rates that change",
        (recipe.arrivals in (ArrivalKind.GAMMA, ArrivalKind.LOG_NORMAL) or recipe.change_every_s is not None),
    )
    yield "replay", "arrivals replay", recipe.arrivals is ArrivalKind.REPLAY
    yield "rate", "adapters without rates of their own", recipe.rates is None
    is_replay = recipe.arrivals is ArrivalKind.REPLAY
    yield "rates", "arrivals that are drawn, not a replay", not is_replay
    yield "change_every_s", "Poisson arrivals at first", recipe.arrival_kind is ArrivalKind.POISSON
    for name in ("change_factor", "rate_least", "rate_most"):
        yield name, "change_every_s", recipe.change_every_s is not None
    picks = recipe.source in (None, Source.AZURE) and recipe.rates is None
    yield "popularity", "arrivals that do not say whose they are (none or azure)", picks
    stays = recipe.popularity not in (PopularityKind.SHIFTING, PopularityKind.IN_TURN)
    yield "change_every_s", "a popularity of fixed shares", stays
    yield "skew", f"popularity {', '.join(DEFAULT_SKEWS)}", recipe.popularity in DEFAULT_SKEWS
    yield "popularity_file", "popularity trace", recipe.popularity is PopularityKind.TRACE
    for name in ("lengths", "prompt_tokens", "output_tokens", "prompt_sigma", "output_sigma"):
        why = "a trace without lengths; to keep its times alone, take arrivals replay"
        yield name, why, not recipe.has_own_lengths
    yield "lengths_file", "lengths empirical", recipe.lengths is LengthKind.EMPIRICAL
    for name in ("prompt_sigma", "output_sigma"):
        yield name, "lengths log-normal", recipe.length_kind is not LengthKind.FIXED
    yield "output_tokens", "lengths fixed or log-normal", recipe.lengths is not LengthKind.EMPIRICAL
    yield "output_sigma", "lengths log-normal", recipe.lengths is not LengthKind.EMPIRICAL


def _needed(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.source is not None:
        yield "trace", f"source {recipe.source}"
    if recipe.arrivals is ArrivalKind.REPLAY:
        yield "replay", "arrivals replay"
    if recipe.popularity is PopularityKind.TRACE:
        yield "popularity_file", "popularity trace"
    if recipe.lengths is LengthKind.EMPIRICAL:
        yield "lengths_file", "lengths empirical"
    if recipe.functions_per_adapter is not None:
        yield "num_adapters", "functions_per_adapter"


def _check_numbers(recipe: Recipe) -> None:
    for name in ("duration_s", "rate", "change_every_s", "rate_least", "rate_most"):
        value = getattr(recipe, name)
        if value is not None and not 0 < value < math.inf:
            raise RecipeError(name, f"must be finite and more than 0, not {value:g}")
    for name in ("start_s", "skew", "seed"):
        value = getattr(recipe, name)
        if value is not None and not 0 <= value < math.inf:
            raise RecipeError(name, f"must be finite and not negative, not {value:g}")
    for name in (
        "num_requests", "num_adapters", "functions_per_adapter", "prompt_tokens", "output_tokens",
        "max_prompt_tokens", "max_output_tokens",
    ):  # fmt: skip
        value = getattr(recipe, name)
        if value is not None and value < 1:
            raise RecipeError(name, f"must be at least 1, not {value}")
