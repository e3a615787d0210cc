"""A step's work in the features that the cost model uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, mul

from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.plan import Chunk
from loraplex.scheduling.request_state import RequestState

_adapter = attrgetter("adapter")


def step_features(chunks: Iterable[Chunk], adapter_bytes: Callable[[str], int]) -> StepFeatures:
    """Return the features of a step. `adapter_bytes`: returns the bytes of a version's weights. A chunk of
    one token counts as decoding, as in the kernels."""
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
        if version is not None:
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


def decode_features(requests: Sequence[RequestState], adapter_bytes: Callable[[str], int]) -> StepFeatures:
    """Return the features of a step in which each of these requests decodes, once all its tokens so far are
    computed. `adapter_bytes` as above."""
    counts = Counter(map(_adapter, requests))
    num_on_base = counts.pop(None, 0)
    sizes = [adapter_bytes(version) for version in counts if version is not None]
    num = len(requests)
    return StepFeatures(
        num_decodes=num,
        decode_positions=num + sum([len(each.token_ids) + each.num_unknown for each in requests]),
        num_adapters=len(sizes),
        adapter_bytes=sum(sizes),
        row_adapter_bytes=sum(map(mul, counts.values(), sizes)),
        largest_adapter_bytes=max(sizes, default=0),
        num_adapter_rows=num - num_on_base,
    )
