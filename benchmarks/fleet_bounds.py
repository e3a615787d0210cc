"""The most that a fleet with padded kernels can gain by keeping ranks apart, without simulating it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet_sections import AUTO, PADDED
from loraplex.fleet.placements.token_rates import token_rates
from loraplex.perf.named_profiles import find_profile
from loraplex.twin.fleet_engines import fleet_engines
from loraplex.twin.replay import ReplayOptions, longest_of
from loraplex.workload.jsonl import WorkloadRequest
from loraplex.workload.papers import paper_workload

BATCHES: Final = (32, 64, 128, 256)
_RPS: Final = 50.0
_SECONDS: Final = 120.0


def measure_bounds(data: Path | None) -> dict[str, Any]:
    """Return for each workload of the section `auto`, by batch size, the time of all its tokens in batches
    that contain the largest rank, over their time in batches of one rank each."""
    found = {}
    for paper, *_ in AUTO:
        made = paper_workload(paper, data=data, rate=_RPS, duration_s=_SECONDS)
        requests, header = list(made), made.header
        assert header is not None
        replay = ReplayOptions(num_adapters=header.num_adapters, ranks=header.ranks)
        engines = fleet_engines(
            find_profile(Path(PADDED)), replay, longest=longest_of(requests), link=None, adapter_bytes=None
        )
        ranks = engines.adapters.ranks.tolist()
        tokens = _tokens_by_rank(requests, ranks)
        found[paper] = {
            str(batch): _bound(token_rates(engines.costs, ranks, batch), tokens) for batch in BATCHES
        }
    return found


def _bound(rates: Mapping[int, float], tokens: Mapping[int, int]) -> dict[str, Any]:
    mixed_s = sum(tokens.values()) / min(rates.values())
    apart_s = sum(each / rates[rank] for rank, each in tokens.items())
    return {
        "tokens_per_s_by_rank": {str(rank): round(rate) for rank, rate in sorted(rates.items())},
        "gain_at_most": round(mixed_s / apart_s, 3),
    }


def _tokens_by_rank(requests: Sequence[WorkloadRequest], ranks: Sequence[int]) -> dict[int, int]:
    found = dict.fromkeys(ranks, 0)
    for each in requests:
        found[ranks[each.adapter]] += each.prompt_tokens + each.output_tokens
    return found
