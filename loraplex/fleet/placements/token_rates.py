"""Estimate how many tokens/s a replica serves, by the rank of the adapters in its batch.

An operating point (`LoRAServePlacement`) is found by simulating a replica under increasing load, which takes
a while. For a placement that needs only the ratios between ranks, a batch of a typical size is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from loraplex.perf.set_costs import RequestSets, SetCosts

_BATCH: Final = 32
_PROMPT_TOKENS: Final = 128.0
_OUTPUT_TOKENS: Final = 155.0


def token_rates(costs: SetCosts, ranks: Iterable[int], batch_size: int = _BATCH) -> Mapping[int, float]:
    """Return the tokens/s, prompt and output, of a replica whose requests all have adapters of one rank."""
    by_rank = sorted(set(ranks))
    rank = np.array(by_rank, np.float64)
    one, batch = np.ones(len(rank)), np.full(len(rank), float(batch_size))
    decoding = RequestSets(
        num_requests=batch,
        sum_ranks=batch * rank,
        max_rank=rank,
        prompt_tokens=batch * _PROMPT_TOKENS,
        kv_tokens=batch * (_PROMPT_TOKENS + _OUTPUT_TOKENS / 2),
        num_adapters=batch,
    )
    reading = RequestSets(
        num_requests=one,
        sum_ranks=rank,
        max_rank=rank,
        prompt_tokens=one * _PROMPT_TOKENS,
        kv_tokens=one * _PROMPT_TOKENS,
        num_adapters=one,
    )
    request_s = costs.prefill_s(reading) + costs.decode_s(decoding) * _OUTPUT_TOKENS / batch_size
    rates = (_PROMPT_TOKENS + _OUTPUT_TOKENS) / request_s
    return dict(zip(by_rank, rates.tolist(), strict=True))
