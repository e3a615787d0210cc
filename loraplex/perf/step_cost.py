"""The duration of one engine step, predicted from its contents.

Small steps are bound by reading the weights, large ones by arithmetic; where and how sharply the curve bends
in between depends on device and kernels. So the cost of rows is a curve through the measured sizes, one for
steps that only decode and one for steps with prompts, which other kernels compute. Only costs that are truly
proportional are coefficients: attended positions, adapters, bytes of their weights. Every increment of a
curve and every coefficient is at least zero: more work is never predicted to take less, except that a step
that only reads prompts costs extra, because the engine was idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from loraplex.perf.least_squares import FitQuality, fit_non_negative, quality_of


class StepFeatures(NamedTuple):
    """The contents of a step.

    `decode_positions`: positions that all decoding rows attend to. `prompt_pairs`: (token, earlier position)
    pairs of all prompt chunks, n * (start + n / 2) each. `adapter_bytes`: weights of the distinct adapters,
    once each. `row_adapter_bytes`: the weights of each row's adapter, summed over rows; proportional to
    LoRA's arithmetic. `largest_adapter_bytes`: weights of the largest adapter. `num_adapter_rows`: rows that
    have an adapter.
    """

    num_decodes: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    decode_positions: float = 0
    prompt_pairs: float = 0
    num_adapters: int = 0
    adapter_bytes: float = 0
    row_adapter_bytes: float = 0
    largest_adapter_bytes: float = 0
    num_adapter_rows: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prompt_tokens

    def padded(self) -> StepFeatures:
        """Return the same step for kernels that treat every adapter of a batch as if it were the largest one
        in it."""
        largest = self.largest_adapter_bytes
        bytes_of_all = (self.num_adapters * largest, self.num_adapter_rows * largest)
        return StepFeatures(*self[:6], *bytes_of_all, *self[8:])

    def on_merged_weights(self) -> StepFeatures:
        """Return the same step on weights into which its adapter is merged: none is added."""
        return StepFeatures(*self[:5])


class StepSample(NamedTuple):
    """The contents of a step, and its measured seconds."""

    step: StepFeatures
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCurve:
    """Seconds by number of rows: linear between the measured sizes, constant below the first, and
    proportional to the rows above the last, where arithmetic dominates. `stepped`: the engine pads steps to
    these sizes, so that all numbers of rows between two of them cost as much as the larger."""

    rows: tuple[int, ...]
    seconds_at: tuple[float, ...]
    stepped: bool = False

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.seconds_at) > 0
        assert all(low < high for low, high in pairwise((0, *self.rows)))
        assert all(low <= high for low, high in pairwise((0.0, *self.seconds_at)))

    def seconds(self, num_rows: int) -> float:
        rows, seconds_at = self.rows, self.seconds_at
        if num_rows >= rows[-1]:
            return seconds_at[-1] * num_rows / rows[-1]
        index = bisect_left(rows, num_rows)
        if index == 0 or self.stepped:
            return seconds_at[index]
        share = (num_rows - rows[index - 1]) / (rows[index] - rows[index - 1])
        return seconds_at[index - 1] + share * (seconds_at[index] - seconds_at[index - 1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTerms:
    """Seconds of a step beside the cost of its rows.

    `prompt_s`: per prompt. `alone_s`: for a step that only reads prompts; the engine was idle, so nothing
    hides its launch or has filled its caches. `beside_prompts_s`: per decode in a step with prompts; in other
    steps the curve includes it. `beside_prompts_position_s`: extra seconds there per position that decodes
    attend to. `lora_s`: for having any adapter, `prompt_lora_s`: extra for having any in a step with prompts.
    """

    prompt_s: float = 0.0
    alone_s: float = 0.0
    beside_prompts_s: float = 0.0
    beside_prompts_position_s: float = 0.0
    decode_position_s: float = 0.0
    prompt_pair_s: float = 0.0
    lora_s: float = 0.0
    prompt_lora_s: float = 0.0
    adapter_s: float = 0.0
    adapter_byte_s: float = 0.0
    row_adapter_byte_s: float = 0.0


TERM_NAMES = tuple(field.name for field in fields(StepTerms))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """The cost of steps. `decodes`: curve of steps that only decode, `prompts`: curve of all rows of a step
    with prompts. `quality`: None if not measured."""

    decodes: RowCurve
    prompts: RowCurve
    terms: StepTerms
    quality: FitQuality | None = None

    def seconds(self, step: StepFeatures) -> float:
        """Return the seconds of a step; zero for one without rows. Written out for speed, as simulations call
        it all the time."""
        terms = self.terms
        num_decodes, num_prompts, num_tokens, positions, pairs, num_adapters, num_bytes, row_bytes, _, _ = (
            step
        )
        rows_s = self.decodes.seconds(num_decodes) if num_decodes > 0 else 0.0
        if num_tokens > 0:
            joined_s = (
                self.prompts.seconds(num_decodes + num_tokens)
                + terms.prompt_s * num_prompts
                + (terms.alone_s if num_decodes == 0 else 0.0)
                + terms.beside_prompts_s * num_decodes
                + terms.beside_prompts_position_s * positions
            )
            # The two curves were measured separately: joining a step must not seem to make it shorter.
            rows_s = max(rows_s, joined_s)
        if rows_s == 0:
            return 0.0
        lora_s = 0.0
        if num_adapters > 0:
            lora_s = (
                terms.lora_s
                + (terms.prompt_lora_s if num_tokens > 0 else 0.0)
                + terms.adapter_s * num_adapters
                + terms.adapter_byte_s * num_bytes
                + terms.row_adapter_byte_s * row_bytes
            )
        return rows_s + (terms.decode_position_s * positions + terms.prompt_pair_s * pairs + lora_s)


def fit_step_cost(
    samples: Sequence[StepSample], served: Sequence[StepSample] = (), *, stepped: bool = False
) -> StepCost:
    """Fit a step cost. The curves bend at the sizes of samples without adapters that only decode or only read
    prompts. `served`: more samples to fit to, without bends. `stepped`: steps are padded to those sizes."""
    base = [step for step, _ in samples if step.num_adapters == 0]
    decodes = sorted({step.num_rows for step in base if step.num_prompt_tokens == 0})
    prompts = sorted({step.num_rows for step in base if step.num_decodes == 0})
    assert decodes, "no decoding step of the base model alone among the samples"
    assert prompts, "no prompt of the base model alone among the samples"
    every = [*samples, *served]
    table = [_columns(step, decodes, prompts, stepped) for step, _ in every]
    seconds = [each for _, each in every]
    found = fit_non_negative(table, seconds)
    border, end = len(decodes), len(decodes) + len(prompts)
    cost = StepCost(
        decodes=RowCurve(rows=tuple(decodes), seconds_at=tuple(accumulate(found[:border])), stepped=stepped),
        prompts=RowCurve(
            rows=tuple(prompts), seconds_at=tuple(accumulate(found[border:end])), stepped=stepped
        ),
        terms=StepTerms(**dict(zip(TERM_NAMES, found[end:], strict=True))),
    )
    return replace(cost, quality=quality_of([cost.seconds(step) for step, _ in every], seconds))


def _columns(
    step: StepFeatures, decodes: Sequence[int], prompts: Sequence[int], stepped: bool
) -> list[float]:
    """Return the increments of both curves, of which a step uses one, then the amounts of the terms."""
    if step.num_prompt_tokens > 0:
        ramps = [*[0.0] * len(decodes), *_ramps(step.num_rows, prompts, stepped)]
    else:
        ramps = [*_ramps(step.num_rows, decodes, stepped), *[0.0] * len(prompts)]
    return [*ramps, *_amounts(step)]


def _amounts(step: StepFeatures) -> tuple[float, ...]:
    """Return the factor of each of `StepTerms`, in their order."""
    has_prompts, has_lora = step.num_prompt_tokens > 0, step.num_adapters > 0
    return (
        float(step.num_prompts),
        float(has_prompts and step.num_decodes == 0),
        float(step.num_decodes if has_prompts else 0),
        step.decode_positions if has_prompts else 0.0,
        step.decode_positions,
        step.prompt_pairs,
        float(has_lora),
        float(has_lora and has_prompts),
        step.num_adapters,
        step.adapter_bytes,
        step.row_adapter_bytes,
    )


def _ramps(num_rows: int, knots: Sequence[int], stepped: bool) -> list[float]:
    """Return how much of each increment of a curve a step has; consistent with `RowCurve.seconds`."""
    if num_rows >= knots[-1]:
        return [num_rows / knots[-1]] * len(knots)
    pieces = pairwise(knots)
    if stepped:
        return [1.0, *(float(num_rows > low) for low, _ in pieces)]
    return [1.0, *(min(max((num_rows - low) / (high - low), 0.0), 1.0) for low, high in pieces)]
