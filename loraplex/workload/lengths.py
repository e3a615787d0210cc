"""Lengths of prompts and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.workload.errors import WorkloadError


class Lengths(Protocol):
    """A distribution of prompt and output tokens, each at least 1."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]: ...


class TokenCounts(Protocol):
    """A distribution of prompt tokens or of output tokens."""

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
    """A log-normal length with `sigma` of the logarithm. Values out of bounds are clipped, so the median
    stays."""

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
    """A length drawn from observed ones, with their frequencies."""

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
    """Lengths drawn from observed requests: a prompt keeps the output that belongs to it."""

    prompts: IntArray
    outputs: IntArray

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
        chosen = rng.integers(self.prompts.size, size=count)
        return self.prompts[chosen], self.outputs[chosen]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantileLengths:
    """Lengths for which only quantiles were published, one row for each client and time.

    A row is drawn at random, then both lengths by linear interpolation between its quantiles.
    """

    levels: FloatArray  # levels of the quantiles, rising, the last one 1
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
    """Lengths of another distribution, cut to what a model or memory can take."""

    lengths: Lengths
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def draw(self, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
        prompts, outputs = self.lengths.draw(rng, count)
        return cut(prompts, self.max_prompt_tokens), cut(outputs, self.max_output_tokens)


def cut(tokens: IntArray, most: int | None) -> IntArray:
    return tokens if most is None else np.minimum(tokens, most)
