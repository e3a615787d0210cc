"""Decides whether keys and values are copied to the host and back, or computed again.

Both are predicted in seconds. A copy uses the bus beside the steps, and computing delays every request of the
step, so that a copy that takes as long is preferred.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.perf.cost_model import CostModel
from loraplex.perf.step_cost import StepFeatures


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapSize:
    """A request's keys and values. `out_bytes`, `in_bytes`: to be copied to the host, and back. `num_tokens`:
    tokens to compute if they are not copied, after the first `start`. `adapter_bytes`: of the request's
    adapter, 0 on the base model."""

    out_bytes: int
    in_bytes: int
    num_tokens: int
    start: int = 0
    adapter_bytes: int = 0


def copying_pays(size: SwapSize, costs: CostModel | None) -> bool:
    """Return whether copies take no longer than computing the tokens again; without costs, they do not."""
    if costs is None:
        return True
    copy_s = sum(costs.copy_s(num_bytes) for num_bytes in (size.out_bytes, size.in_bytes) if num_bytes > 0)
    return copy_s <= costs.step_s(_prompt(size))


def _prompt(size: SwapSize) -> StepFeatures:
    """Return the step that computes the tokens."""
    has_adapter = size.adapter_bytes > 0
    return StepFeatures(
        num_prompts=1,
        num_prompt_tokens=size.num_tokens,
        prompt_pairs=size.num_tokens * (size.start + size.num_tokens / 2),
        num_adapters=int(has_adapter),
        adapter_bytes=size.adapter_bytes,
        row_adapter_bytes=size.num_tokens * size.adapter_bytes,
        largest_adapter_bytes=size.adapter_bytes,
        num_adapter_rows=size.num_tokens if has_adapter else 0,
    )
