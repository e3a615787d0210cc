"""Parts of a workload that a recipe asks for, used for drawn and replayed requests alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from loraplex.workload import popularity as shares_of
from loraplex.workload import recipe as defaults
from loraplex.workload.errors import WorkloadError
from loraplex.workload.length_files import read_lengths
from loraplex.workload.lengths import (
    BoundedLengths,
    EmpiricalTokens,
    FixedTokens,
    IndependentLengths,
    Lengths,
    LogNormalTokens,
    TokenCounts,
)
from loraplex.workload.mix import parse_mix
from loraplex.workload.popularity import InTurn, Popularity, Shares
from loraplex.workload.popularity_files import read_totals
from loraplex.workload.recipe import LengthKind, PopularityKind, Recipe, RecipeError
from loraplex.workload.streams import Purpose, stream


def ranks_of(recipe: Recipe, num_adapters: int) -> tuple[int, ...]:
    with blaming("ranks"):
        mix = parse_mix(recipe.ranks or defaults.DEFAULT_RANKS, least=1, whole=True)
    assigned = mix.assign(num_adapters, stream(recipe.seed, Purpose.RANKS))
    return tuple(int(rank) for rank in assigned)


def popularity_of(recipe: Recipe, ranks: tuple[int, ...]) -> Popularity:
    kind, count = recipe.popularity_kind, len(ranks)
    skew = recipe.skew if recipe.skew is not None else defaults.DEFAULT_SKEWS.get(kind, 0.0)
    match kind:
        case PopularityKind.IN_TURN:
            return InTurn(num_adapters=count)
        case PopularityKind.SHIFTING:
            with blaming("ranks"):
                return shares_of.shifting_skew(ranks)
        case PopularityKind.UNIFORM:
            shares = shares_of.uniform_shares(count)
        case PopularityKind.ZIPF:
            shares = shares_of.zipf_shares(count, skew)
        case PopularityKind.EXPONENTIAL:
            shares = shares_of.exponential_shares(count, skew)
        case PopularityKind.ZIPF_WITHIN_RANK:
            shares = shares_of.zipf_within_rank(ranks, skew)
        case PopularityKind.POWER_BY_RANK:
            shares = shares_of.power_by_rank(ranks, skew)
        case PopularityKind.EXPONENTIAL_BY_RANK:
            shares = shares_of.exponential_by_rank(ranks, skew)
        case PopularityKind.TRACE:
            assert recipe.popularity_file is not None, "checked by the recipe"
            shares = shares_of.shares_like(read_totals(recipe.popularity_file), count)
    return Shares(shares=shares)


def lengths_of(recipe: Recipe) -> Lengths:
    match recipe.length_kind:
        case LengthKind.FIXED:
            prompt_tokens = recipe.prompt_tokens or defaults.DEFAULT_PROMPT_TOKENS
            output_tokens = recipe.output_tokens or defaults.DEFAULT_OUTPUT_TOKENS
            found: Lengths = IndependentLengths(
                prompt=FixedTokens(tokens=prompt_tokens), output=FixedTokens(tokens=output_tokens)
            )
        case LengthKind.LOG_NORMAL:
            found = IndependentLengths(prompt=_drawn_prompt(recipe), output=_drawn_output(recipe))
        case LengthKind.EMPIRICAL:
            found = _seen_lengths(recipe)
    return BoundedLengths(
        lengths=found,
        max_prompt_tokens=recipe.max_prompt_tokens,
        max_output_tokens=recipe.max_output_tokens,
    )


def _seen_lengths(recipe: Recipe) -> Lengths:
    assert recipe.lengths_file is not None, "checked by the recipe"
    seen = read_lengths(recipe.lengths_file)
    if isinstance(seen, EmpiricalTokens):
        return IndependentLengths(prompt=_drawn_prompt(recipe), output=seen)
    for field in ("prompt_tokens", "prompt_sigma"):
        if getattr(recipe, field) is not None:
            raise RecipeError(field, f"has no effect: {recipe.lengths_file.name} has prompts, too")
    return seen


def _drawn_prompt(recipe: Recipe) -> TokenCounts:
    sigma = defaults.DEFAULT_PROMPT_SIGMA if recipe.prompt_sigma is None else recipe.prompt_sigma
    median, most = recipe.prompt_tokens, recipe.max_prompt_tokens
    return _log_normal(
        _Tokens("prompt_tokens", median, defaults.DEFAULT_PROMPT_TOKENS),
        _Tokens("max_prompt_tokens", most, defaults.DEFAULT_MAX_PROMPT_TOKENS),
        sigma,
    )


def _drawn_output(recipe: Recipe) -> TokenCounts:
    sigma = defaults.DEFAULT_OUTPUT_SIGMA if recipe.output_sigma is None else recipe.output_sigma
    median, most = recipe.output_tokens, recipe.max_output_tokens
    return _log_normal(
        _Tokens("output_tokens", median, defaults.DEFAULT_OUTPUT_TOKENS),
        _Tokens("max_output_tokens", most, defaults.DEFAULT_MAX_OUTPUT_TOKENS),
        sigma,
    )


class _Tokens(NamedTuple):
    """A number of tokens that was given as an option, or its default."""

    field: str
    asked: int | None
    default: int

    @property
    def tokens(self) -> int:
        return self.default if self.asked is None else self.asked

    def in_words(self) -> str:
        by_default = ", its default" if self.asked is None else ""
        return f"--{self.field.replace('_', '-')} {self.tokens}{by_default}"


def _log_normal(median: _Tokens, most: _Tokens, sigma: float) -> TokenCounts:
    if most.tokens < median.tokens:
        # Report the option that was given as wrong, and name the other.
        if median.asked is None:
            raise RecipeError(
                most.field, f"{most.tokens} is below the median, {median.in_words()}; give that as well"
            )
        raise RecipeError(median.field, f"a median of {median.tokens} is above {most.in_words()}")
    with blaming(median.field.replace("tokens", "sigma")):
        return LogNormalTokens(
            median=median.tokens,
            sigma=sigma,
            least=min(defaults.DEFAULT_MIN_TOKENS, median.tokens),
            most=most.tokens,
        )


def speed_for(rate: float | None, times_s: Callable[[], Iterator[float]]) -> tuple[float, float]:
    """Return the factor to divide times by so that they arrive at this rate, and the last time, undivided."""
    count, last_s = 0, 0.0
    for count, last_s in enumerate(times_s(), start=1):  # noqa: B007
        pass
    if not count:
        raise RecipeError("start_s", "is after the last request of the trace")
    if rate is None:
        return 1.0, last_s
    if last_s <= 0:
        raise RecipeError("rate", "cannot be had from a trace whose requests all come at once")
    return rate / (count / last_s), last_s


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """Raise a WorkloadError from the block as a RecipeError that names this option."""
    try:
        yield
    except RecipeError:
        raise
    except WorkloadError as error:
        raise RecipeError(field, str(error)) from error
