"""How long prompts and answers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.workload.errors import WorkloadError


class Lengths(Protocol):
    """Prompt and output tokens, each at least 1."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]: ...


class TokenCounts(Protocol):
    """One of the two."""

    def draw(self, rng: np.random.Generator, count: int) -> IntArray: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTokens:
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise WorkloadError(f"a length must be at least 1 token, not {self.tokens}")

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormalTokens:
    """`sigma` is that of the logarithm. What is out of bounds is set to the bound, so the median stays."""

    median: float
    sigma: float
    least: int = 1
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.median <= self.most:
            raise WorkloadError(
                f"a median of {self.median:g} tokens must be within its bounds, {self.least} to {self.most}"
            )
        if not 0 <= self.sigma <= 10:
            raise WorkloadError(f"sigma must be from 0 to 10, not {self.sigma:g}")

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        tokens = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(tokens), self.least, self.most).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmpiricalTokens:
    """Any of the lengths that were seen, as often as they were."""

    seen: IntArray

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        return self.seen[rng.integers(self.seen.size, size=count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndependentLengths:
    prompt: TokenCounts
    output: TokenCounts

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
        return self.prompt.draw(rng, count), self.output.draw(rng, count)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairedLengths:
    """Any of the requests that were seen: long prompts keep the answers that belong to them."""

    prompts: IntArray
    outputs: IntArray

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
        chosen = rng.integers(self.prompts.size, size=count)
        return self.prompts[chosen], self.outputs[chosen]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantileLengths:
    """Lengths of which only quantiles were published, a row for each client and time.

    A row is taken at random, then both lengths from straight lines through its quantiles.
    """

    levels: FloatArray  # of the quantiles, rising, the last one 1
    prompts: FloatArray  # rows x levels
    outputs: FloatArray

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
        rows = rng.integers(len(self.prompts), size=count)
        return self._at(self.prompts[rows], rng.random(count)), self._at(
            self.outputs[rows], rng.random(count)
        )

    def _at(self, quantiles: FloatArray, shares: FloatArray) -> IntArray:
        above = np.searchsorted(self.levels, shares)
        below = np.maximum(above - 1, 0)
        width = np.where(above > below, self.levels[above] - self.levels[below], 1.0)
        way = np.clip((shares - self.levels[below]) / width, 0.0, 1.0)
        each = np.arange(shares.size)
        low, high = quantiles[each, below], quantiles[each, above]
        return np.maximum(np.rint(low + way * (high - low)), 1).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedLengths:
    """Others, cut to what a model or a memory can take."""

    lengths: Lengths
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
        prompts, outputs = self.lengths.draw(rng, count)
        return cut(prompts, self.max_prompt_tokens), cut(outputs, self.max_output_tokens)


def cut(tokens: IntArray, most: int | None) -> IntArray:
    return tokens if most is None else np.minimum(tokens, most)
