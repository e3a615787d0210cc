"""Steps that `loraplex profile` measures: those that the cost model is fitted to, and others to check it by.

Fitted ones differ in one thing at a time; those held out are drawn at random from what lies between.
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
"""Tokens behind a request, on the mean, that hardly cost anything."""
SPREAD: Final = 0.8
"""Of log-normal lengths."""
SETTLE_STEPS: Final = 8
"""After the last prompt was read: the first find little of theirs in a processor's caches."""
TIMED_STEPS: Final = 16
"""That only decode."""
JOINED_SHOTS: Final = 3
"""Of prompts that join others."""
_STEPS_A_SHOT: Final = 3
"""Where the engine runs ahead: one without prompts, the one that they join, and one that is under way by the
time that one lands."""
_ROWS_BEYOND_GRAPHS: Final = (1280, 1536, 2048)
"""Of steps that a GPU runs kernel by kernel."""
_SLOWEST_PREFILL: Final = 512
"""Prompt tokens that a step reads at the least while others decode: the first must not end before the last
has begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAdapter:
    """An adapter that the engine knows."""

    version: str
    rank: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """Requests that decode after so many tokens each, and prompts that are read in the same step. Adapters go
    to the requests in turn, decoding ones first; with none, all are for the base model."""

    contexts: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    adapters: tuple[StepAdapter, ...] = ()

    @property
    def num_decodes(self) -> int:
        return len(self.contexts)

    @property
    def decode_tokens(self) -> int:
        """Return the most tokens that a decoding request makes in one measurement, those of the first step
        after the last prompt was read and of one more that is under way at the end among them."""
        timed = JOINED_SHOTS * _STEPS_A_SHOT if self.prompts else TIMED_STEPS
        return SETTLE_STEPS + timed + 2 + -(-sum(self.contexts) // _SLOWEST_PREFILL)

    @property
    def num_tokens(self) -> int:
        """Room in the KV cache, in whole blocks, that a measurement takes at the most."""
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
    """Of the engine that is measured. `max_tokens`: that it holds at a time. `work`: what a step may do."""

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
        """Rows of steps with prompts. On a GPU the most that each size of graph takes, and more. On a CPU
        nothing round: lengths that fill blocks and tiles are some per cent faster than all others."""
        if self.on_gpu:
            from loraplex.engine.cuda.step_sizes import MIXED_ROWS

            return (*MIXED_ROWS, *_ROWS_BEYOND_GRAPHS)
        return (5, 9, 18, 33, 47, 65, 99, 131, 197, 259, 389, 509)

    @property
    def mean_contexts(self) -> tuple[int, int]:
        """Some, and many; but most of the spread about them is within what the model takes."""
        few, many = (256, 1024) if self.on_gpu else (128, 384)
        return min(few, self.max_context // 8), min(many, self.max_context // 4)

    def contexts(self, number: int, mean: int) -> tuple[int, ...]:
        """Return the contexts of requests that came at different times, with prompts of all lengths: spread
        log-normally about the mean, and no longer than three quarters of what the model takes."""
        spread = NormalDist(log(mean) - SPREAD**2 / 2, SPREAD)
        drawn = (exp(spread.inv_cdf((index + 0.5) / number)) for index in range(number))
        return tuple(min(max(round(each), 2), self.max_context * 3 // 4) for each in drawn)

    def contexts_held(self, number: int, mean: int, prompts: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Contexts about this mean, or about a lower one if the engine does not hold as many beside these
        prompts. Whether it holds short ones is for the caller to see."""
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
        """Return the lengths of as few prompts as hold so many tokens together."""
        number = -(-num_tokens // (self.max_context - 1))
        return tuple((num_tokens + index) // number for index in range(number))


def step_cases(adapters: Sequence[StepAdapter], limits: CaseLimits) -> list[StepCase]:
    """Return the steps to fit to: the base model by rows and by context, then what adapters add, then both
    kinds of rows in one step."""
    decodes, prompts = limits.decodes, limits.prompts
    several = (8, 32, 64, 128) if limits.on_gpu else (4, 16, 48, 128)
    many = 128 if limits.on_gpu else 96  # the cache of a small CPU engine holds no more with anything behind
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
        # Rows of prompts beside them, where the curve of all rows has a knot.
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
    """Steps that decode: any number of requests, of adapters and of tokens behind them, within what was
    fitted."""
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
    """Steps that read prompts: one to four, of any length."""
    random, found = Random(seed), list[StepCase]()
    while len(found) < number:
        num_tokens, num_prompts = _log_uniform(random, 16, limits.prompts[-1]), random.randint(1, 4)
        cuts = sorted(random.sample(range(1, num_tokens), num_prompts - 1))
        ends = zip((0, *cuts), (*cuts, num_tokens), strict=True)
        prompts = tuple(max(end - start, 2) for start, end in ends)  # of one token it would be a decode
        case = StepCase(prompts=prompts, adapters=_draw(random, adapters, num_prompts))
        found += [case] if limits.fits(case) else []
    return found


def _draw(random: Random, adapters: Sequence[StepAdapter], most: int) -> tuple[StepAdapter, ...]:
    """None in one case of three."""
    if random.random() < 1 / 3:
        return ()
    return tuple(random.sample(list(adapters), _log_uniform(random, 1, min(most, len(adapters)))))


def _log_uniform(random: Random, low: int, high: int) -> int:
    return min(int(low * ((high + 1) / low) ** random.random()), high)


def _parts(num_tokens: int, number: int) -> tuple[int, ...]:
    """So many tokens in prompts that grow: the second has twice the tokens of the first, and so on."""
    ends = [num_tokens * k * (k + 1) // (number * (number + 1)) for k in range(number + 1)]
    return tuple(end - start for start, end in pairwise(ends))
