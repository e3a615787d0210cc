"""The cost of LoRA on CPU workers, for layers whose weights have not arrived on the device.

A group of linears that share an input is one task, with a part for each linear; it is split among the workers
as `assist_split` says. A worker reads the weights of its parts once and multiplies each of its rows with all
of them. Inputs and outputs go over the bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from loraplex.perf.assist_split import ROWS_EACH, split_task
from loraplex.perf.least_squares import FitQuality, fit_non_negative, quality_of

UNKNOWN_ERROR: Final = 0.25
"""The error of a fit of which no quality is known: that of a poor one."""
_PARTS_OF_GROUP: Final = 3
"""Parts of a task whose linears are not known: those of q, k and v."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistSample:
    """The measured time of one task, without the transfer of its inputs and outputs. `weights`: of each part,
    elements of A and B. `rows_each`: number of rows that were worth a core (`assist_split`)."""

    num_tokens: int
    weights: tuple[int, ...]
    num_workers: int
    seconds: float
    rows_each: int = ROWS_EACH


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistCost:
    """`round_trip_s`: from the device's signal to its seeing the result. `token_s`: to transfer a token's
    inputs and outputs of q, k and v. On a worker, `call_s`: for a task of any size; `weight_s`: for each
    weight; `row_s`: for each weight and row. `rows_each`: number of rows that are worth a core, by which the
    pool splits tasks. `quality`: None if not measured."""

    round_trip_s: float
    token_s: float
    call_s: float
    weight_s: float
    row_s: float
    rows_each: int = ROWS_EACH
    quality: FitQuality | None = None

    @property
    def error(self) -> float:
        """The share by which a prediction is off, on average."""
        return UNKNOWN_ERROR if self.quality is None else self.quality.mean_error

    def task_s(self, weights: Sequence[int], *, num_tokens: int, num_workers: int) -> float:
        """Return the seconds of a task on the workers, until the last of them is done. `weights`: by part."""
        num_weights, products = _largest_share(weights, num_tokens, num_workers, self.rows_each)
        return self.call_s + num_weights * self.weight_s + products * self.row_s

    def layer_s(self, num_weights: int, *, num_groups: int, num_tokens: int, num_workers: int) -> float:
        """Return the seconds of one layer's LoRA with its transfers. `num_groups`: tasks that the weights are
        split among."""
        part = num_weights // (num_groups * _PARTS_OF_GROUP)
        task_s = self.task_s([part] * _PARTS_OF_GROUP, num_tokens=num_tokens, num_workers=num_workers)
        return num_groups * (self.round_trip_s + num_tokens * self.token_s + task_s)


def fit_assist_cost(samples: Sequence[AssistSample], *, round_trip_s: float, token_s: float) -> AssistCost:
    """Fit the cost to samples of one pool's split: all have the same `rows_each`."""
    (rows_each,) = {sample.rows_each for sample in samples}
    table = [
        (1.0, *_largest_share(each.weights, each.num_tokens, each.num_workers, rows_each)) for each in samples
    ]
    seconds = [sample.seconds for sample in samples]
    call_s, weight_s, row_s = fit_non_negative(table, seconds)
    cost = AssistCost(
        round_trip_s=round_trip_s,
        token_s=token_s,
        call_s=call_s,
        weight_s=weight_s,
        row_s=row_s,
        rows_each=rows_each,
    )
    predicted = [
        cost.task_s(each.weights, num_tokens=each.num_tokens, num_workers=each.num_workers)
        for each in samples
    ]
    return replace(cost, quality=quality_of(predicted, seconds))


def _largest_share(
    weights: Sequence[int], num_tokens: int, num_workers: int, rows_each: int
) -> tuple[float, float]:
    """Return the weights, and the products of weights and rows, of the worker that has most to do."""
    parts = [part for part, num_weights in enumerate(weights) if num_weights > 0]
    most = 0.0, 0.0
    for share in split_task(num_tokens, parts, [True] * num_workers, rows_each):
        num_weights = float(sum(weights[share.first_part : share.end_part]))
        most = max(most, (num_weights * (share.end - share.start), num_weights))
    return most[1], most[0]
