"""Limits what one step computes, so that a long prompt does not delay the next token of other requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final

PREFILL_SHARE = 0.25
"""Share of every step reserved for prompts however much decoding there is, so that new requests do not
starve."""
_PART_TOKENS: Final = 64
"""Parts of a prompt are multiples of this, as the kernels' tiles are."""
_CONTEXT_ALLOWANCE: Final = 1.25
"""Factor by which a part of a prompt may exceed its budget because of its context: steps with fewer rows
compute less per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """A step's limit, counted in tokens that have no context.

    `position_cost`: cost of attending to one earlier position, as a share of such a token's. A token behind
    ten thousand others may cost several times the first.
    """

    max_tokens: int = 2048
    position_cost: float = 0.0

    def cost(self, start: int, num_tokens: int) -> float:
        """Return the cost of computing tokens [start, start + num_tokens) of a sequence."""
        return num_tokens + self.position_cost * num_tokens * (start + num_tokens / 2)

    def tokens_within(self, budget: float, start: int) -> int:
        """Return the most tokens from `start` on whose cost is within the budget; at least one if the budget
        is at least 1."""
        if budget < 1:
            return 0
        # Solves cost(start, n) = budget, a quadratic in n, in the form that also holds at position_cost 0.
        linear = 1 + self.position_cost * start
        solution = 2 * budget / (linear + sqrt(linear * linear + 2 * self.position_cost * budget))
        return max(1, int(solution + 1e-9))

    def chunk(self, num_tokens: int, start: int, budget: float) -> int:
        """Return how many of `num_tokens` tokens from `start` on to compute next: all of them, or one of as
        few equal parts as fit. Equal parts avoid a last step for a few tokens, which costs far more than
        their share. The number of tokens is within the budget; the cost of their context may exceed it a
        little."""
        allowed = budget * _CONTEXT_ALLOWANCE
        most = min(self.tokens_within(allowed, start), int(budget))
        if num_tokens <= most or most <= 0:
            return min(num_tokens, max(most, 0))
        cost = self.cost(start, num_tokens)
        num_parts = max(ceil(cost / allowed), ceil(num_tokens / int(budget)))
        part = self.tokens_within(max(cost / num_parts, 1), start)
        return min(-(-part // _PART_TOKENS) * _PART_TOKENS, most)

    def prefill_budget(self, decode_cost: float) -> float:
        """Return the tokens of prompts that a step may compute beside its decoding, which always runs."""
        return max(self.max_tokens - decode_cost, self.max_tokens * PREFILL_SHARE, 1)
