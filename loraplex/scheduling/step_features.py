"""What a step computes, as the cost model counts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.plan import Chunk


def step_features(chunks: Sequence[Chunk], adapter_bytes: Callable[[str], int]) -> StepFeatures:
    """`adapter_bytes`: of a version's weights. A chunk of one token decodes, as it does to the kernels."""
    decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
    prompts = [chunk for chunk in chunks if chunk.num_tokens > 1]
    sizes = {chunk.adapter: adapter_bytes(chunk.adapter) for chunk in chunks if chunk.adapter is not None}
    return StepFeatures(
        num_decodes=len(decodes),
        num_prompts=len(prompts),
        num_prompt_tokens=sum(chunk.num_tokens for chunk in prompts),
        decode_positions=sum(chunk.end for chunk in decodes),
        prompt_pairs=sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in prompts),
        num_adapters=len(sizes),
        adapter_bytes=sum(sizes.values()),
        row_adapter_bytes=sum(
            chunk.num_tokens * sizes[chunk.adapter] for chunk in chunks if chunk.adapter is not None
        ),
    )
