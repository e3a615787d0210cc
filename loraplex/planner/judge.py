"""Judges how well one GPU would serve some adapters, for packers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from loraplex.planner.demand import AdapterDemand


class Verdict(NamedTuple):
    """Prediction for one GPU. `throughput_tok_s`: prompt and answer tokens that it serves; `is_starved`: that
    is less than 0.9 of what is offered, or the adapters do not fit its memory, or it misses a limit of the
    objective; `missed`: these limits, in words."""

    throughput_tok_s: float
    is_starved: bool
    missed: tuple[str, ...] = ()


class Judge(Protocol):
    """Predicts GPUs of one kind, by a surrogate or by the twin."""

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        """Predict one GPU with these adapters and slots; None for an engine without slots."""
        ...

    def fits(self, max_rank: int, num_slots: int) -> bool:
        """Return whether a GPU has memory for so many slots of this rank, and for requests beside them."""
        ...
