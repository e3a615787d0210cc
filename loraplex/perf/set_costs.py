"""The cost of serving a set of requests, for many sets at once: PrePerf and DecPerf of routers.

A router asks this of every replica for every request that arrives. Sets are therefore columns of sums and
maxima that are updated with the requests, and one call answers for all replicas. The linear forms are those
of CaraServe and Toppings (Eq. 2); the others are the models that twins compute steps by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.perf.cost_model import CostModel, KernelKind
from loraplex.perf.least_squares import FitQuality, fit_non_negative, quality_of
from loraplex.perf.slot_profile import SlotCosts
from loraplex.perf.step_cost import RowCurve

Column = IntArray | npt.NDArray[np.floating]

SWEPT_BATCHES: Final = (4, 8, 16, 32, 64)
SWEPT_RANKS: Final = (8, 16, 32, 64, 128)
SWEPT_PATTERNS: Final[Mapping[str, tuple[int, ...]]] = {
    **{f"rank {rank}": (rank,) for rank in SWEPT_RANKS},
    "ranks 8 and 64": (8, 64),
    "ranks 8 to 128": SWEPT_RANKS,
    "one in four of rank 128, else 8": (128, 8, 8, 8),
}
"""The sets that linear forms are fitted to: name -> the ranks of their requests' adapters, in turn. Every
request has its own adapter."""
SWEPT_PROMPT_TOKENS: Final = 32
_TAIL_BITS: Final = 20
"""Power of two by which a curve is extended beyond its last size."""


class RequestSets(NamedTuple):
    """One set of requests per replica, as columns of equal length, or several, in rows of such columns.

    `sum_ranks`, `max_rank`: over the requests' adapters; a request for the base model has rank 0.
    `prompt_tokens`: of all prompts, each of which has at least one. `kv_tokens`: tokens that one decode step
    of the set attends to. `num_adapters`: distinct adapters. In an empty set all of these are zero.
    """

    num_requests: Column
    sum_ranks: Column
    max_rank: Column
    prompt_tokens: Column
    kv_tokens: Column
    num_adapters: Column

    def at(self, replicas: IntArray) -> RequestSets:
        """Return the sets of these replicas, which are distinct and ascending; no copy if these are all."""
        if len(replicas) == len(self.num_requests):
            return self
        return RequestSets(*(column[replicas] for column in self))

    def at_most(self, num_requests: Column) -> RequestSets:
        """Return sets of at most this many requests, of the same mix: the part that runs in a step when no
        more fit."""
        share = np.minimum(num_requests / np.maximum(self.num_requests, 1), 1.0)
        return RequestSets(
            num_requests=self.num_requests * share,
            sum_ranks=self.sum_ranks * share,
            max_rank=self.max_rank,
            prompt_tokens=self.prompt_tokens * share,
            kv_tokens=self.kv_tokens * share,
            num_adapters=self.num_adapters * share,
        )


class SetCosts(Protocol):
    """Predicted seconds of each set; zero for an empty set."""

    def prefill_s(self, sets: RequestSets) -> FloatArray:
        """PrePerf: the seconds to read all prompts of each set."""
        ...

    def decode_s(self, sets: RequestSets) -> FloatArray:
        """DecPerf: the seconds of one decode step of each set."""
        ...


class CostForm(StrEnum):
    """The form by which a fleet's policies predict steps: the profile's model of whole steps, or the papers'
    linear form."""

    STEPS = "steps"
    LINEAR = "linear"


class SetSamples(NamedTuple):
    """Sets, none of them empty, and the measured seconds of each."""

    sets: RequestSets
    seconds: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class _LinearSetCosts(ABC):
    """Linear costs. Decode: `decode_rank_s` per unit of rank that the kernels compute with,
    `decode_request_s` per request, which the papers leave out, and `decode_base_s`. Prefill:
    `prefill_token_s` per token, `prefill_token_rank_s` per token and unit of rank, and `prefill_base_s`. The
    qualities are those of the fit; None without one."""

    decode_rank_s: float
    decode_base_s: float
    prefill_token_s: float
    prefill_token_rank_s: float
    prefill_base_s: float
    decode_request_s: float = 0.0
    decode_quality: FitQuality | None = None
    prefill_quality: FitQuality | None = None

    @staticmethod
    @abstractmethod
    def _decode_ranks(sets: RequestSets) -> Column:
        """Return the units of rank that a decode step computes with."""

    @staticmethod
    @abstractmethod
    def _token_ranks(sets: RequestSets) -> Column:
        """Return the same for all prompt tokens: tokens times units of rank."""

    def prefill_s(self, sets: RequestSets) -> FloatArray:
        seconds = (
            self.prefill_token_s * sets.prompt_tokens
            + self.prefill_token_rank_s * self._token_ranks(sets)
            + self.prefill_base_s
        )
        return _where(seconds, sets.prompt_tokens)

    def decode_s(self, sets: RequestSets) -> FloatArray:
        seconds = (
            self.decode_rank_s * self._decode_ranks(sets)
            + self.decode_request_s * sets.num_requests
            + self.decode_base_s
        )
        return _where(seconds, sets.num_requests)

    @classmethod
    def fit(cls, decodes: SetSamples, prefills: SetSamples, *, by_request: bool = False) -> Self:
        """Fit non-negative coefficients to both. `by_request`: include a cost of a decode step for each
        request."""
        sets = prefills.sets
        columns = [cls._decode_ranks(decodes.sets), *([decodes.sets.num_requests] if by_request else [])]
        rank_s, *request_s, decode_base_s = _fit_columns(columns, decodes.seconds)
        token_s, token_rank_s, prefill_base_s = _fit_columns(
            [sets.prompt_tokens, cls._token_ranks(sets)], prefills.seconds
        )
        fitted = cls(
            decode_rank_s=rank_s,
            decode_request_s=sum(request_s),
            decode_base_s=decode_base_s,
            prefill_token_s=token_s,
            prefill_token_rank_s=token_rank_s,
            prefill_base_s=prefill_base_s,
        )
        return replace(
            fitted,
            decode_quality=_quality(fitted.decode_s(decodes.sets), decodes.seconds),
            prefill_quality=_quality(fitted.prefill_s(sets), prefills.seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedSetCosts(_LinearSetCosts):
    """Linear costs with kernels that pad (BGMV): every request costs as much as the largest rank in its
    set."""

    @staticmethod
    def _decode_ranks(sets: RequestSets) -> Column:
        return sets.num_requests * sets.max_rank

    @staticmethod
    def _token_ranks(sets: RequestSets) -> Column:
        return sets.prompt_tokens * sets.max_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetCosts(_LinearSetCosts):
    """Linear costs with kernels that do not pad (MBGMV): every request costs its own rank. Prompts of all
    ranks are assumed to be equally long."""

    @staticmethod
    def _decode_ranks(sets: RequestSets) -> Column:
        return sets.sum_ranks

    @staticmethod
    def _token_ranks(sets: RequestSets) -> Column:
        return _mean_token_ranks(sets)


def linear_costs(costs: SetCosts, *, padded: bool) -> PaddedSetCosts | RankSetCosts:
    """Return the papers' linear form for these kernels, fitted to other costs on sets of 4 to 64 requests
    with ranks 8 to 128."""
    chosen = [
        [ranks[index % len(ranks)] for index in range(batch)]
        for ranks in SWEPT_PATTERNS.values()
        for batch in SWEPT_BATCHES
    ]
    num_requests = np.array([len(ranks) for ranks in chosen])
    sets = RequestSets(
        num_requests=num_requests,
        sum_ranks=np.array([sum(ranks) for ranks in chosen]),
        max_rank=np.array([max(ranks) for ranks in chosen]),
        prompt_tokens=num_requests * SWEPT_PROMPT_TOKENS,
        kv_tokens=num_requests * SWEPT_PROMPT_TOKENS,
        num_adapters=num_requests,
    )
    decodes, prefills = SetSamples(sets, costs.decode_s(sets)), SetSamples(sets, costs.prefill_s(sets))
    return (PaddedSetCosts if padded else RankSetCosts).fit(decodes, prefills)


class StepSetCosts:
    """Costs by the step model of our own engine, for either kind of kernels: `StepCost.seconds` of a step
    that decodes a whole set, or reads all its prompts.

    Two quantities are not in the columns. The sum of the distinct adapters' ranks is taken as the requests'
    sum of ranks, or as the largest rank times the number of adapters if that is less: exact if all adapters
    differ or all ranks are equal, and never less after a set has grown. With padded kernels all requests of a
    set with any adapter count as rows with one.
    """

    def __init__(self, model: CostModel, *, rank_bytes: float, prompt_positions: float = 128.0) -> None:
        """`rank_bytes`: bytes of an adapter per unit of rank (`EngineMemory.bytes_per_rank`).
        `prompt_positions`: mean number of positions that a prompt token attends to."""
        factor, terms = model.corrections.step, model.step.terms
        self._pads = model.kernels is KernelKind.PADDED
        self._decodes = _Curve(model.step.decodes, factor)
        self._prompts = _Curve(
            model.step.prompts, factor, alone_s=terms.alone_s, row_s=terms.prompt_pair_s * prompt_positions
        )
        self._position_s = _factor(terms.decode_position_s * factor)
        self._prompt_s = _factor(terms.prompt_s * factor)
        self._lora_s = _factor(terms.lora_s * factor)
        self._prompt_lora_s = _factor((terms.lora_s + terms.prompt_lora_s) * factor)
        self._adapter_s = _factor(terms.adapter_s * factor)
        self._adapter_rank_s = _factor(terms.adapter_byte_s * rank_bytes * factor)
        self._row_rank_s = _factor(terms.row_adapter_byte_s * rank_bytes * factor)

    def prefill_s(self, sets: RequestSets) -> FloatArray:
        tokens = sets.prompt_tokens
        token_ranks = tokens * sets.max_rank if self._pads else _mean_token_ranks(sets)
        seconds = (
            self._prompts.seconds(tokens)
            + self._prompt_s * sets.num_requests
            + self._adapters_s(sets, self._prompt_lora_s)
            + self._row_rank_s * token_ranks
        )
        return np.asarray(seconds, np.float64)

    def decode_s(self, sets: RequestSets) -> FloatArray:
        row_ranks = sets.num_requests * sets.max_rank if self._pads else sets.sum_ranks
        seconds = (
            self._decodes.seconds(sets.num_requests)
            + self._position_s * sets.kv_tokens
            + self._adapters_s(sets, self._lora_s)
            + self._row_rank_s * row_ranks
        )
        return np.asarray(seconds, np.float64)

    def _adapters_s(self, sets: RequestSets, lora_s: FloatArray) -> FloatArray:
        """Return the seconds for having any adapter, and for each of them."""
        num_adapters = sets.num_adapters
        ranks = num_adapters * sets.max_rank
        if not self._pads:
            ranks = np.minimum(ranks, sets.sum_ranks)
        has_any = np.sign(num_adapters)
        return lora_s * has_any + self._adapter_s * num_adapters + self._adapter_rank_s * ranks


class SlotSetCosts:
    """Costs of a slot engine (vLLM), which pads to the rank its slots are sized for, whatever is in a set.
    The scheduler's cost is not included."""

    def __init__(self, costs: SlotCosts, *, num_slots: int, max_rank: int) -> None:
        """`max_rank` is that of the slots."""
        decode, prefill = costs.decode, costs.prefill
        self._decode_base_s = decode.base_s + num_slots * (decode.slot_s + decode.slot_rank_s * max_rank)
        self._request_s = (
            decode.request_s + decode.request_rank_s * max_rank + decode.request_slot_s * num_slots
        )
        self._adapter_s = decode.adapter_s + decode.adapter_rank_s * max_rank
        self._request_adapter_s = decode.request_adapter_s
        self._kv_token_s = decode.kv_token_s
        self._prefill_base_s = prefill.base_s + prefill.slot_s * num_slots
        self._token_s = prefill.token_s + prefill.token_rank_s * max_rank
        self._prefill_adapter_s = prefill.adapter_s

    def prefill_s(self, sets: RequestSets) -> FloatArray:
        seconds = (
            self._token_s * sets.prompt_tokens
            + self._prefill_adapter_s * sets.num_adapters
            + self._prefill_base_s
        )
        return _where(seconds, sets.prompt_tokens)

    def decode_s(self, sets: RequestSets) -> FloatArray:
        num_requests, num_adapters = sets.num_requests, sets.num_adapters
        seconds = (
            (self._request_adapter_s * num_adapters + self._request_s) * num_requests
            + self._adapter_s * num_adapters
            + self._kv_token_s * sets.kv_tokens
            + self._decode_base_s
        )
        return _where(seconds, num_requests)


class _Curve:
    """`RowCurve.seconds` for many numbers of rows at once, plus a constant and a cost per row; zero for no
    rows. Numbers of rows are whole, so a stepped curve is made of lines between neighbours."""

    def __init__(self, curve: RowCurve, factor: float, *, alone_s: float = 0.0, row_s: float = 0.0) -> None:
        last = curve.rows[-1]
        # Lines bend at the sizes; a step goes from a size to the next number of rows. Beyond the last size
        # there is one line, up to more rows than any set has.
        bends = {1, *curve.rows, *(rows + 1 for rows in curve.rows if curve.stepped), last << _TAIL_BITS}
        rows = sorted(bends)
        self._rows = np.array([0, *rows], np.float64)
        seconds_at = [(curve.seconds(each) + alone_s + row_s * each) * factor for each in rows]
        self._seconds_at = np.array([0.0, *seconds_at])

    def seconds(self, num_rows: Column) -> FloatArray:
        seconds: FloatArray = np.interp(num_rows, self._rows, self._seconds_at)
        return seconds


def _factor(value: float) -> FloatArray:
    """Return the value as an array without dimensions: multiplying a short column by it takes two thirds of
    the time of a Python number."""
    return np.array(value, np.float64)


def _mean_token_ranks(sets: RequestSets) -> Column:
    """Return tokens times their ranks, assuming that prompts of all ranks are equally long."""
    mean_ranks = sets.sum_ranks / np.maximum(sets.num_requests, 1)
    return mean_ranks * sets.prompt_tokens


def _where(seconds: Column, amounts: Column) -> FloatArray:
    """Return the seconds where there is any work, zero elsewhere."""
    return np.asarray(seconds * (amounts > 0), np.float64)


def _fit_columns(columns: Sequence[Column], seconds: FloatArray) -> list[float]:
    """Return a coefficient for each column, and a constant."""
    table = np.column_stack([*columns, np.ones(len(seconds))])
    return fit_non_negative(table.tolist(), seconds.tolist())


def _quality(predicted_s: FloatArray, measured_s: FloatArray) -> FitQuality:
    return quality_of(predicted_s.tolist(), measured_s.tolist())
