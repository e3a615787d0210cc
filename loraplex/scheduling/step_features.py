"""What a step plan computes, as the cost model counts it."""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.plan import StepPlan


def step_features(plan: StepPlan, adapter_bytes: Mapping[str, int]) -> StepFeatures:
    """`adapter_bytes`: of each version's weights. A chunk of one token decodes, as it does to the kernels."""
    decodes = [chunk for chunk in plan.chunks if chunk.num_tokens == 1]
    prompts = [chunk for chunk in plan.chunks if chunk.num_tokens > 1]
    versions = {chunk.adapter for chunk in plan.chunks if chunk.adapter is not None}
    return StepFeatures(
        num_decodes=len(decodes),
        num_prompts=len(prompts),
        num_prompt_tokens=sum(chunk.num_tokens for chunk in prompts),
        decode_positions=sum(chunk.end for chunk in decodes),
        prompt_pairs=sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in prompts),
        num_adapters=len(versions),
        adapter_bytes=sum(adapter_bytes[version] for version in versions),
        row_adapter_bytes=sum(
            chunk.num_tokens * adapter_bytes[chunk.adapter]
            for chunk in plan.chunks
            if chunk.adapter is not None
        ),
    )
