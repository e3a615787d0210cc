"""A step's work in the features that the cost model uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.plan import Chunk


def step_features(
    chunks: Iterable[Chunk], adapter_bytes: Callable[[str], int], *, merged: bool = False
) -> StepFeatures:
    """Return the features of a step. `adapter_bytes`: returns the bytes of a version's weights. `merged`: the
    step runs on merged weights and reads no adapter. A chunk of one token counts as decoding, as in the
    kernels."""
    num_decodes = num_prompts = num_tokens = positions = row_bytes = largest = num_rows = 0
    pairs = 0.0
    sizes: dict[str, int] = {}
    # One pass over plain fields: this runs for every step that is decided.
    for _, version, start, token_ids, _, _ in chunks:
        count = len(token_ids) or 1
        if count == 1:
            num_decodes += 1
            positions += start + 1
        else:
            num_prompts += 1
            num_tokens += count
            pairs += count * (start + count / 2)
        if version is not None and not merged:
            size = sizes.get(version)
            if size is None:
                size = sizes[version] = adapter_bytes(version)
                if size > largest:
                    largest = size
            num_rows += count
            row_bytes += count * size
    # Positional arguments: keywords take twice as long.
    return StepFeatures(
        num_decodes,
        num_prompts,
        num_tokens,
        positions,
        pairs,
        len(sizes),
        sum(sizes.values()),
        row_bytes,
        largest,
        num_rows,
    )
