"""The steps that `loraplex profile` measures: those the cost model is fitted to, and held-out ones to check
it.

Fitted steps differ in one thing at a time; held-out ones are drawn at random from the range between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import exp, log
from random import Random
from statistics import NormalDist
from typing import Final

from loraplex.bench.random_engine import BLOCK_SIZE
from loraplex.core.errors import CapacityError
from loraplex.scheduling.work import StepWork

_SHORT: Final = 16
"""Mean context in tokens whose cost is negligible."""
SPREAD: Final = 0.8
"""Sigma of log-normal lengths."""
SETTLE_STEPS: Final = 8
"""Steps to skip after the last prompt was read: the first find little of their data in CPU caches."""
TIMED_STEPS: Final = 16
"""Timed steps that only decode."""
JOINED_SHOTS: Final = 3
"""Measurements of prompts that join decoding requests."""
_STEPS_A_SHOT: Final = 3
"""Steps per measurement if the engine runs ahead: one without prompts, the one that they join, and one that
is in flight when that one lands."""
_ROWS_BEYOND_GRAPHS: Final = (1280, 1536, 2048)
"""Rows of steps beyond the captured graphs, which a GPU runs kernel by kernel."""
_SLOWEST_PREFILL: Final = 512
"""Least prompt tokens that a step reads while others decode: the first request must not end before the last
has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAdapter:
    """An adapter that is registered with the engine."""

    version: str
    rank: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """A step: requests that decode, with a context each, and prompts that are read in the same step. Adapters
    are assigned to requests in turn, decoding ones first; without any, all are for the base model."""

    contexts: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    adapters: tuple[StepAdapter, ...] = ()

    @property
    def num_decodes(self) -> int:
        return len(self.contexts)

    @property
    def decode_tokens(self) -> int:
        """The most tokens that a decoding request generates in one measurement, including those of the first
        step after the last prompt was read and of one more step that is in flight at the end."""
        timed = JOINED_SHOTS * _STEPS_A_SHOT if self.prompts else TIMED_STEPS
        return SETTLE_STEPS + timed + 2 + -(-sum(self.contexts) // _SLOWEST_PREFILL)

    @property
    def num_tokens(self) -> int:
        """The most KV cache tokens that a measurement takes, in whole blocks."""
        return sum(-(-n // BLOCK_SIZE) * BLOCK_SIZE for n in self._lengths())

    @property
    def max_context(self) -> int:
        return max(self._lengths(), default=0)

    def _lengths(self) -> list[int]:
        return [n + self.decode_tokens for n in self.contexts] + [n + 1 for n in self.prompts]

    def adapter_of(self, index: int) -> StepAdapter | None:
        return self.adapters[index % len(self.adapters)] if self.adapters else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseLimits:
    """Limits of the measured engine. `max_tokens`: tokens that its KV cache holds. `work`: a step's work
    limit."""

    on_gpu: bool
    max_context: int
    max_tokens: int
    work: StepWork

    @property
    def decodes(self) -> tuple[int, ...]:
        """Rows of steps that only decode. On a GPU the sizes of graphs: the curve has its steps where the
        engine has them."""
        if self.on_gpu:
            from loraplex.engine.cuda.step_sizes import DECODE_ROWS  # with Triton, which a CPU does not need

            return DECODE_ROWS
        return (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Rows of steps with prompts. On a GPU the most rows of each size of graph, and more. On a CPU no
        round numbers: lengths that fill blocks and tiles are a few per cent faster than all others."""
        if self.on_gpu:
            from loraplex.engine.cuda.step_sizes import MIXED_ROWS

            return (*MIXED_ROWS, *_ROWS_BEYOND_GRAPHS)
        return (5, 9, 18, 33, 47, 65, 99, 131, 197, 259, 389, 509)

    @property
    def mean_contexts(self) -> tuple[int, int]:
        """A moderate and a large mean context, small enough for most of the spread to fit the model's
        context."""
        few, many = (256, 1024) if self.on_gpu else (128, 384)
        return min(few, self.max_context // 8), min(many, self.max_context // 4)

    def contexts(self, number: int, mean: int) -> tuple[int, ...]:
        """Return the contexts of requests that arrived at different times, with prompts of all lengths:
        spread log-normally around the mean, and at most three quarters of the model's context."""
        spread = NormalDist(log(mean) - SPREAD**2 / 2, SPREAD)
        drawn = (exp(spread.inv_cdf((index + 0.5) / number)) for index in range(number))
        return tuple(min(max(round(each), 2), self.max_context * 3 // 4) for each in drawn)

    def contexts_held(self, number: int, mean: int, prompts: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return contexts around this mean, or around a lower one if the engine does not hold as many beside
        these prompts. Even short contexts may not fit: the caller must check."""
        while mean > _SHORT and not self.fits(
            StepCase(contexts=self.contexts(number, mean), prompts=prompts)
        ):
            mean = max(mean * 9 // 10, _SHORT)
        return self.contexts(number, mean)

    def check(self) -> None:
        """Raise CapacityError if not even one request can be measured."""
        if not self.fits(StepCase(contexts=(_SHORT,))):
            raise CapacityError(
                f"a KV cache for {self.max_tokens} tokens is too small to measure one request; free some "
                "memory, or take a smaller model"
            )

    def fits(self, case: StepCase) -> bool:
        if case.max_context > self.max_context or case.num_tokens > self.max_tokens:
            return False
        decodes = sum(self.work.cost(n + case.decode_tokens, 1) for n in case.contexts)
        return decodes + sum(self.work.cost(0, n) for n in case.prompts) <= self.work.max_tokens

    def prompts_of(self, num_tokens: int) -> tuple[int, ...]:
        """Return the lengths of as few prompts as can hold this many tokens together."""
        number = -(-num_tokens // (self.max_context - 1))
        return tuple((num_tokens + index) // number for index in range(number))


def step_cases(adapters: Sequence[StepAdapter], limits: CaseLimits) -> list[StepCase]:
    """Return the steps to fit to: the base model by rows and by context, then with adapters, then with
    decodes and prompts in one step."""
    decodes, prompts = limits.decodes, limits.prompts
    several = (8, 32, 64, 128) if limits.on_gpu else (4, 16, 48, 128)
    many = 128 if limits.on_gpu else 96  # a small CPU engine's cache holds no more with any context
    less, more = limits.mean_contexts
    short = partial(limits.contexts, mean=_SHORT)
    by_rank: dict[int, tuple[StepAdapter, ...]] = {}
    for adapter in adapters:
        by_rank[adapter.rank] = (*by_rank.get(adapter.rank, ()), adapter)
    cases = [
        *(StepCase(contexts=short(n)) for n in decodes),
        *(StepCase(contexts=limits.contexts(n, mean)) for n in (1, *several[:3]) for mean in (less, more)),
        StepCase(contexts=limits.contexts_held(many, less)),
        *(StepCase(prompts=limits.prompts_of(n)) for n in prompts),
        *(StepCase(prompts=_parts(n, parts)) for n in prompts[3::2] for parts in (2, 4)),
    ]
    for mine in by_rank.values():
        cases += [StepCase(contexts=short(n), adapters=mine[:1]) for n in several[:3]]
        cases += [StepCase(contexts=short(n), adapters=mine[:n]) for n in several]
        cases += [StepCase(prompts=limits.prompts_of(n), adapters=mine[:1]) for n in prompts[2::3]]
        cases += [StepCase(prompts=_parts(n, 4), adapters=mine[:4]) for n in (prompts[5], prompts[-3])]
    largest = by_rank[max(by_rank)]
    for n in sorted({1, *several, many}):
        # Prompt rows beside the decodes, such that the total is a knot of the curve.
        knots = [rows for rows in prompts if rows > n + 8]
        for mean, rows in ((_SHORT, knots[0]), (_SHORT, knots[3]), (less, knots[1])):
            cases.append(StepCase(contexts=limits.contexts_held(n, mean, (rows - n,)), prompts=(rows - n,)))
        parts = _parts(knots[2] - n, 3)
        cases.append(StepCase(contexts=limits.contexts_held(n, less, parts), prompts=parts))
        cases.append(StepCase(contexts=short(n), prompts=(knots[1] - n,), adapters=largest[: n + 1]))
        cases.append(StepCase(contexts=short(n), prompts=_parts(knots[2] - n, 3), adapters=largest[:8]))
    return [case for case in dict.fromkeys(cases) if limits.fits(case)]


def held_out_decodes(
    adapters: Sequence[StepAdapter], limits: CaseLimits, number: int, seed: int = 1
) -> list[StepCase]:
    """Return steps that decode: random numbers of requests, adapters and context tokens, within the fitted
    range."""
    random, found = Random(seed), list[StepCase]()
    while len(found) < number:
        num_decodes = _log_uniform(random, 1, limits.decodes[-1])
        mean = _log_uniform(random, _SHORT, limits.mean_contexts[-1])
        contexts = limits.contexts(num_decodes, mean)
        case = StepCase(contexts=contexts, adapters=_draw(random, adapters, num_decodes))
        found += [case] if limits.fits(case) else []
    return found


def held_out_prompts(
    adapters: Sequence[StepAdapter], limits: CaseLimits, number: int, seed: int = 2
) -> list[StepCase]:
    """Return steps that read one to four prompts of random lengths."""
    random, found = Random(seed), list[StepCase]()
    while len(found) < number:
        num_tokens, num_prompts = _log_uniform(random, 16, limits.prompts[-1]), random.randint(1, 4)
        cuts = sorted(random.sample(range(1, num_tokens), num_prompts - 1))
        ends = zip((0, *cuts), (*cuts, num_tokens), strict=True)
        prompts = tuple(max(end - start, 2) for start, end in ends)  # a prompt of one token would be a decode
        case = StepCase(prompts=prompts, adapters=_draw(random, adapters, num_prompts))
        found += [case] if limits.fits(case) else []
    return found


def _draw(random: Random, adapters: Sequence[StepAdapter], most: int) -> tuple[StepAdapter, ...]:
    """Draw adapters; none in one case of three."""
    if random.random() < 1 / 3:
        return ()
    return tuple(random.sample(list(adapters), _log_uniform(random, 1, min(most, len(adapters)))))


def _log_uniform(random: Random, low: int, high: int) -> int:
    return min(int(low * ((high + 1) / low) ** random.random()), high)


def _parts(num_tokens: int, number: int) -> tuple[int, ...]:
    """Split tokens into prompts of growing length: the second has twice the tokens of the first, and so
    on."""
    ends = [num_tokens * k * (k + 1) // (number * (number + 1)) for k in range(number + 1)]
    return tuple(end - start for start, end in pairwise(ends))
