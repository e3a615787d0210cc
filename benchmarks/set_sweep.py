"""Measures the costs of sets of requests, by the number of requests and the ranks of their adapters.

These are the sections `sets` and `padded_sets` of gpu_engine: every set is decoded and its prompts are read,
by kernels that compute with each adapter's own rank and by kernels that pad to the largest rank of the batch.
The linear forms of CaraServe and Toppings (`loraplex.perf.set_costs`) are fitted to the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from loraplex.bench.engine_scenarios import Load, measure_decode, measure_prefill
from loraplex.engine.core import Engine
from loraplex.perf.cost_model import KernelKind
from loraplex.perf.set_costs import (
    SWEPT_BATCHES,
    SWEPT_PATTERNS,
    SWEPT_PROMPT_TOKENS,
    SWEPT_RANKS,
    PaddedSetCosts,
    RankSetCosts,
    RequestSets,
    SetSamples,
)

BATCHES: Final = SWEPT_BATCHES
RANKS: Final = SWEPT_RANKS
ADAPTERS: Final = dict.fromkeys(RANKS, max(BATCHES))
"""Rank -> number of adapters."""
PADDED_ADAPTERS: Final = {8: 64, 16: 16, 32: 16, 64: 32, 128: 64}
"""Rank -> number of adapters for padding. A padded adapter is kept in a copy for every rank above its own:
60 GB for these, and as much again on the device. Sets that need more are left out."""
_OUTPUT_TOKENS: Final = 40
_PREFILLS: Final = 4
FORMS: Final = {KernelKind.RANK: RankSetCosts, KernelKind.PADDED: PaddedSetCosts}


def measure_sets(
    engine: Engine,
    by_rank: Mapping[int, Sequence[str]],
    vocab_size: int,
    *,
    batches: Sequence[int] = BATCHES,
    patterns: Mapping[str, tuple[int, ...]] = SWEPT_PATTERNS,
) -> list[dict[str, Any]]:
    """Measure every set for which there are enough adapters. `by_rank`: registered adapters by rank."""
    found: list[dict[str, Any]] = []
    for name, ranks in patterns.items():
        for batch in batches:
            chosen = [ranks[index % len(ranks)] for index in range(batch)]
            adapters = _take(by_rank, chosen)
            if adapters is None:
                continue
            load = Load(
                batch=batch,
                prompt_tokens=SWEPT_PROMPT_TOKENS,
                output_tokens=_OUTPUT_TOKENS,
                adapters=adapters,
                vocab_size=vocab_size,
                seed=2 * len(found),
            )
            other = replace(load, seed=load.seed + 1)
            found.append(
                {
                    "set": name,
                    "num_requests": batch,
                    "sum_ranks": sum(chosen),
                    "max_rank": max(chosen),
                    "prompt_tokens": batch * SWEPT_PROMPT_TOKENS,
                    "decode_ms": round(measure_decode(engine, load, 1).p50, 4),
                    "prefill_ms": round(measure_prefill(engine, other, _PREFILLS).p50, 4),
                }
            )
            print(found[-1], flush=True)
    return found


def _take(by_rank: Mapping[int, Sequence[str]], ranks: Sequence[int]) -> tuple[str, ...] | None:
    """Return a different adapter for each of these ranks; None if there are too few."""
    left = {rank: iter(versions) for rank, versions in by_rank.items()}
    taken = tuple(version for rank in ranks if (version := next(left[rank], None)) is not None)
    return taken if len(taken) == len(ranks) else None


def fit(rows: Sequence[Mapping[str, Any]], kernels: KernelKind) -> dict[str, Any]:
    """Fit the linear forms of these kernels to the measured sets, and return them with their qualities: as in
    the papers, and with a cost for each request of a decode step."""
    sets = RequestSets(
        num_requests=_column(rows, "num_requests"),
        sum_ranks=_column(rows, "sum_ranks"),
        max_rank=_column(rows, "max_rank"),
        prompt_tokens=_column(rows, "prompt_tokens"),
        kv_tokens=_column(rows, "prompt_tokens"),
        num_adapters=_column(rows, "num_requests"),
    )
    decodes = SetSamples(sets, _column(rows, "decode_ms") / 1e3)
    prefills = SetSamples(sets, _column(rows, "prefill_ms") / 1e3)
    form = FORMS[kernels]
    return {
        name: asdict(form.fit(decodes, prefills, by_request=by_request))
        for name, by_request in (("papers", False), ("by_request", True))
    }


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray[Any, np.dtype[Any]]:
    return np.array([row[name] for row in rows])
