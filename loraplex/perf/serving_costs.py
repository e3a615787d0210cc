"""Costs of a step on a slot engine: small models that predict seconds.

A slot engine (vLLM) gives every adapter a slot of the largest rank, reads prompts in separate steps, and
loads adapters within a step. Its kernels do as much for rank 8 as for the rank that slots are sized for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from loraplex.perf.least_squares import fit_non_negative


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFeatures:
    """The contents of a step, as these models count them. `max_rank`: the rank that slots are sized for.
    `num_tokens`: prompt tokens. `num_waiting`: requests that the scheduler considered but did not admit."""

    num_requests: int = 0
    num_adapters: int = 0
    max_rank: int = 0
    num_slots: int = 0
    kv_tokens: int = 0
    num_tokens: int = 0
    num_waiting: int = 0


class _Linear(ABC):
    """Coefficients times amounts. Subclasses are dataclasses of coefficients, in the order of `amounts`, with
    the units of each in `UNITS`."""

    __slots__ = ()

    @staticmethod
    @abstractmethod
    def amounts(batch: BatchFeatures) -> tuple[float, ...]: ...

    def predict(self, batch: BatchFeatures) -> float:
        """Return the predicted seconds."""
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return float(sum(value * amount for value, amount in zip(values, self.amounts(batch), strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDecode(_Linear):
    """The cost of a decode step by requests, distinct adapters, attended KV tokens, and slots, which kernels
    are launched over whether they are in use or not."""

    UNITS: ClassVar[dict[str, str]] = {
        "base_s": "s",
        "request_s": "s per request",
        "adapter_s": "s per distinct adapter",
        "adapter_rank_s": "s per distinct adapter and unit of the largest rank",
        "kv_token_s": "s per KV token",
        "slot_s": "s per slot",
        "slot_rank_s": "s per slot and unit of the largest rank",
        "request_rank_s": "s per request and unit of the largest rank",
        "request_adapter_s": "s per request and distinct adapter",
        "request_slot_s": "s per request and slot",
    }

    base_s: float
    request_s: float = 0.0
    adapter_s: float = 0.0
    adapter_rank_s: float = 0.0
    kv_token_s: float = 0.0
    slot_s: float = 0.0
    slot_rank_s: float = 0.0
    request_rank_s: float = 0.0
    request_adapter_s: float = 0.0
    request_slot_s: float = 0.0

    @staticmethod
    def amounts(batch: BatchFeatures) -> tuple[float, ...]:
        return (
            1.0,
            batch.num_requests,
            batch.num_adapters,
            batch.num_adapters * batch.max_rank,
            batch.kv_tokens,
            batch.num_slots,
            batch.num_slots * batch.max_rank,
            batch.num_requests * batch.max_rank,
            batch.num_requests * batch.num_adapters,
            batch.num_requests * batch.num_slots,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill(_Linear):
    """The cost of a prefill step by prompt tokens, largest rank, and slots, which kernels are launched over
    in any case."""

    UNITS: ClassVar[dict[str, str]] = {
        "base_s": "s",
        "token_s": "s per prompt token",
        "adapter_s": "s per distinct adapter",
        "token_rank_s": "s per prompt token and unit of the largest rank",
        "slot_s": "s per slot",
    }

    base_s: float
    token_s: float = 0.0
    adapter_s: float = 0.0
    token_rank_s: float = 0.0
    slot_s: float = 0.0

    @staticmethod
    def amounts(batch: BatchFeatures) -> tuple[float, ...]:
        return (
            1.0,
            batch.num_tokens,
            batch.num_adapters,
            batch.num_tokens * batch.max_rank,
            batch.num_slots,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerCost(_Linear):
    """The cost of scheduling by running requests, and by waiting ones considered in vain."""

    UNITS: ClassVar[dict[str, str]] = {"request_s": "s per running request", "waiting_s": "s per waiting one"}

    request_s: float = 0.0
    waiting_s: float = 0.0

    @staticmethod
    def amounts(batch: BatchFeatures) -> tuple[float, ...]:
        return batch.num_requests, batch.num_waiting


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterLoadCost:
    """The cost of a load by tier and rank. `slot_*`: from host memory to a slot. `disk_*`: before that, on
    first use."""

    UNITS: ClassVar[dict[str, str]] = {
        "slot_s": "s",
        "slot_rank_s": "s per unit of rank",
        "disk_s": "s",
        "disk_rank_s": "s per unit of rank",
    }

    slot_s: float
    slot_rank_s: float = 0.0
    disk_s: float = 0.0
    disk_rank_s: float = 0.0

    def predict(self, *, rank: float, from_disk: bool) -> float:
        """Return the seconds until the adapter is in its slot."""
        disk_s = self.disk_s + self.disk_rank_s * rank if from_disk else 0.0
        return self.slot_s + self.slot_rank_s * rank + disk_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotMemory:
    """KV tokens that remain beside the adapter slots, each of the largest rank, used or not."""

    UNITS: ClassVar[dict[str, str]] = {
        "tokens": "KV tokens without slots",
        "slot_tokens": "KV tokens per slot",
        "slot_rank_tokens": "KV tokens per slot and unit of the largest rank",
    }

    tokens: float
    slot_tokens: float
    slot_rank_tokens: float

    def predict(self, *, num_slots: int, max_rank: int) -> int:
        """Return the KV tokens; zero if the slots alone fill the memory."""
        taken = num_slots * (self.slot_tokens + self.slot_rank_tokens * max_rank)
        return max(int(self.tokens - taken), 0)

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]]) -> SlotMemory:
        """Fit to samples of (slots, largest rank, KV tokens)."""
        most = max(tokens for _, _, tokens in samples)
        # Fit the tokens that slots take, relative to a value above the largest sample: positive, like costs.
        top = most * 1.05
        table = [(1.0, num_slots, num_slots * max_rank) for num_slots, max_rank, _ in samples]
        base, per_slot, per_rank = fit_non_negative(table, [top - tokens for _, _, tokens in samples])
        return cls(tokens=top - base, slot_tokens=per_slot, slot_rank_tokens=per_rank)
