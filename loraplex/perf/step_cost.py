"""How long one step of an engine takes, from what is in it.

Small steps are bound by reading the weights, large ones by arithmetic, with a bend between them whose place
and sharpness depend on device and kernels. So the cost of rows is a curve through the sizes that were
measured, and only what is truly in proportion is a coefficient: attended positions, adapters, bytes of their
weights. Every increment of the curve and every coefficient is at least zero: more work is never predicted to
take less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from loraplex.perf.least_squares import FitQuality, fit_non_negative, quality_of


class StepFeatures(NamedTuple):
    """What a step computes.

    `decode_positions`: what all decoding rows attend to. `prompt_pairs`: (token, earlier position) pairs of
    all prompt chunks, n * (start + n / 2) each. `adapter_bytes`: weights of the distinct adapters, once each.
    `row_adapter_bytes`: for every row, the weights of its adapter; in proportion to LoRA's arithmetic.
    """

    num_decodes: int = 0
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    decode_positions: float = 0
    prompt_pairs: float = 0
    num_adapters: int = 0
    adapter_bytes: float = 0
    row_adapter_bytes: float = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prompt_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCurve:
    """Seconds by number of rows: lines between the sizes measured, flat below the first, and in proportion to
    the rows above the last, where arithmetic is all there is."""

    rows: tuple[int, ...]
    seconds_at: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.seconds_at) > 0
        assert all(low < high for low, high in pairwise((0, *self.rows)))
        assert all(low <= high for low, high in pairwise((0.0, *self.seconds_at)))

    def seconds(self, num_rows: int) -> float:
        rows, seconds_at = self.rows, self.seconds_at
        if num_rows >= rows[-1]:
            return seconds_at[-1] * num_rows / rows[-1]
        index = bisect_left(rows, num_rows)
        if index == 0:
            return seconds_at[0]
        share = (num_rows - rows[index - 1]) / (rows[index] - rows[index - 1])
        return seconds_at[index - 1] + share * (seconds_at[index] - seconds_at[index - 1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTerms:
    """Seconds that a step takes beside its rows. `prompt_s`: for having any prompt, `lora_s`: any adapter.
    `request_s`: of each decode and prompt, for its logits and its sampling."""

    prompt_s: float = 0.0
    request_s: float = 0.0
    decode_position_s: float = 0.0
    prompt_pair_s: float = 0.0
    lora_s: float = 0.0
    adapter_s: float = 0.0
    adapter_byte_s: float = 0.0
    row_adapter_byte_s: float = 0.0

    def seconds(self, step: StepFeatures) -> float:
        """The sum of all; written out, as simulations ask for it all the time."""
        return (
            (self.prompt_s if step.num_prompt_tokens > 0 else 0.0)
            + self.request_s * (step.num_decodes + step.num_prompts)
            + self.decode_position_s * step.decode_positions
            + self.prompt_pair_s * step.prompt_pairs
            + (self.lora_s if step.num_adapters > 0 else 0.0)
            + self.adapter_s * step.num_adapters
            + self.adapter_byte_s * step.adapter_bytes
            + self.row_adapter_byte_s * step.row_adapter_bytes
        )


TERM_NAMES = tuple(field.name for field in fields(StepTerms))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """`quality`: None if nobody measured."""

    curve: RowCurve
    terms: StepTerms
    quality: FitQuality | None = None

    def seconds(self, step: StepFeatures) -> float:
        """Of a step without rows: none."""
        num_rows = step.num_decodes + step.num_prompt_tokens
        if num_rows == 0:
            return 0.0
        return self.curve.seconds(num_rows) + self.terms.seconds(step)


def fit_step_cost(samples: Sequence[tuple[StepFeatures, float]]) -> StepCost:
    """From (what was in a step, its seconds). The curve bends where steps without adapters were measured that
    only decode or only read prompts."""
    knots = sorted({step.num_rows for step, _ in samples if step.num_adapters == 0 and not _is_mixed(step)})
    assert knots, "no step of the base model alone among the samples"
    table = [(*_ramps(step.num_rows, knots), *_amounts(step)) for step, _ in samples]
    seconds = [each for _, each in samples]
    found = fit_non_negative(table, seconds)
    increments, terms = found[: len(knots)], found[len(knots) :]
    cost = StepCost(
        curve=RowCurve(rows=tuple(knots), seconds_at=tuple(accumulate(increments))),
        terms=StepTerms(**dict(zip(TERM_NAMES, terms, strict=True))),
    )
    quality = quality_of([cost.seconds(step) for step, _ in samples], seconds)
    return replace(cost, quality=quality)


def _is_mixed(step: StepFeatures) -> bool:
    return step.num_decodes > 0 and step.num_prompt_tokens > 0


def _amounts(step: StepFeatures) -> tuple[float, ...]:
    """What each of `StepTerms` is multiplied with, in their order."""
    return (
        float(step.num_prompt_tokens > 0),
        step.num_decodes + step.num_prompts,
        step.decode_positions,
        step.prompt_pairs,
        float(step.num_adapters > 0),
        step.num_adapters,
        step.adapter_bytes,
        step.row_adapter_bytes,
    )


def _ramps(num_rows: int, knots: Sequence[int]) -> list[float]:
    """How much of each of the curve's increments a step has; the same curve as `RowCurve.seconds`."""
    if num_rows >= knots[-1]:
        return [num_rows / knots[-1]] * len(knots)
    pieces = pairwise(knots)
    return [1.0, *(min(max((num_rows - low) / (high - low), 0.0), 1.0) for low, high in pieces)]
