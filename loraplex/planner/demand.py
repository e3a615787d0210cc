"""The demand: adapters with their ranks and rates, and how long requests are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import UserError

MAX_RATE_RPS: Final = 1e9
"""Requests per second of an adapter that are surely a mistake."""


class PlanError(UserError):
    """A demand, a plan or a packing cannot be used; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDemand:
    """One adapter, or in a plan its copy on one GPU. `rate_rps`: its requests per second; of a copy, those
    that its GPU gets."""

    name: str
    rank: int
    rate_rps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """All adapters, and the mean tokens of a request's prompt and answer."""

    adapters: tuple[AdapterDemand, ...]
    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        names = [each.name for each in self.adapters]
        assert len(set(names)) == len(names), "an adapter is there twice"

    @property
    def request_tokens(self) -> float:
        """Mean tokens of a request, prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    def offered_tok_s(self, adapters: Iterable[AdapterDemand]) -> float:
        """Return the tokens per second, of prompts and answers, that requests on these adapters are."""
        return sum(each.rate_rps for each in adapters) * self.request_tokens
