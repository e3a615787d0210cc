"""The delays of first tokens by a batching policy, compared with first come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.batching import DelayBound
from loraplex.twin.outcome import RequestOutcome


def beyond_bound_s(
    requests: Sequence[RequestOutcome], fcfs: Sequence[RequestOutcome], bound: DelayBound
) -> float | None:
    """Return by how many seconds the worst first token came later than the bound allows; below 0 if it was
    within. `fcfs`: the same requests, first come, first served. None if no request has a first token in
    both."""
    pairs = ((one.ttft_s, other.ttft_s) for one, other in zip(requests, fcfs, strict=True))
    return max(
        (
            ttft_s - fcfs_s - bound.allowed_s(fcfs_s)
            for ttft_s, fcfs_s in pairs
            if ttft_s is not None and fcfs_s is not None
        ),
        default=None,
    )
