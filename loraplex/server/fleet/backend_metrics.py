"""Parse a server's /metrics page into engine stats. loraplex exports vLLM's names, and some of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loraplex.core.stats import AdapterStats, EngineStats

BLOCK_TOKENS: Final = 16
"""Tokens of a KV block as counted here; servers may use other sizes (vLLM has 128 on a CPU)."""
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_KV_USAGE: Final = "vllm:kv_cache_usage_perc"
_KV_SIZE: Final = "vllm:cache_config_info"
_QUERIES: Final = "vllm:prefix_cache_queries_total"
_HITS: Final = "vllm:prefix_cache_hits_total"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"
_STEPS: Final = "loraplex:engine_steps_total"
_HOST_BYTES: Final = "loraplex:host_adapter_bytes"
_HOST_BUDGET: Final = "loraplex:host_adapter_budget_bytes"
_DEVICE_BYTES: Final = "loraplex:device_adapter_bytes"
_ARENA_BYTES: Final = "loraplex:device_arena_bytes"
_HOST_KV_BYTES: Final = "loraplex:host_kv_bytes"
_HOST_KV_BUDGET: Final = "loraplex:host_kv_budget_bytes"
_SWAPPED_OUT: Final = "loraplex:kv_blocks_swapped_out_total"
_SWAPPED_IN: Final = "loraplex:kv_blocks_swapped_in_total"
_HOST_KV_HITS: Final = "loraplex:host_kv_hits_total"
_MERGED: Final = "loraplex:merged"
_MERGED_STEPS: Final = "loraplex:merged_steps_total"
_MERGES: Final = "loraplex:merges_total"
_SWITCHES: Final = "loraplex:batching_switches_total"
_PAUSES: Final = "loraplex:pauses_total"
_STEP_ADAPTERS: Final = "loraplex:step_adapters_total"
_OWED_CREDIT: Final = "loraplex:owed_credit_seconds"
_RESIDENT: Final = "loraplex:adapter_resident"
_LOADS: Final = "loraplex:adapter_loads_total"
_WANTED: Final = (
    _RUNNING, _WAITING, _KV_USAGE, _KV_SIZE, _QUERIES, _HITS, _PREEMPTIONS, _STEPS,
    _HOST_BYTES, _HOST_BUDGET, _DEVICE_BYTES, _ARENA_BYTES, _RESIDENT, _LOADS,
    _HOST_KV_BYTES, _HOST_KV_BUDGET, _SWAPPED_OUT, _SWAPPED_IN, _HOST_KV_HITS,
    _MERGED, _MERGED_STEPS, _MERGES, _SWITCHES, _PAUSES, _STEP_ADAPTERS, _OWED_CREDIT,
)  # fmt: skip


def parse_stats(page: str, in_flight: Mapping[str, int]) -> EngineStats:
    """Return the figures of a page, summed over the engines of one server. KV blocks are of `BLOCK_TOKENS`.

    `in_flight` has the caller's own requests by adapter version. Only adapters whose tier the server reports
    are listed; vLLM does not report it. No server reports their bytes.
    """
    samples: dict[str, list[Sample]] = defaultdict(list)
    for sample in _samples(page):
        samples[sample.name].append(sample)

    def total(name: str) -> int:
        return int(sum(sample.value for sample in samples[name]))

    usages = [sample.value for sample in samples[_KV_USAGE]]
    num_blocks = sum(_num_blocks(sample.labels) for sample in samples[_KV_SIZE])
    loads = {sample.labels.get("version", ""): int(sample.value) for sample in samples[_LOADS]}
    tiers = {s.labels.get("version", ""): s.labels.get("tier", "") for s in samples[_RESIDENT]}
    return EngineStats(
        num_running=total(_RUNNING),
        num_waiting=total(_WAITING),
        num_kv_blocks=num_blocks,
        num_kv_blocks_used=round(num_blocks * sum(usages) / len(usages)) if usages else 0,
        prefix_cache_queries=total(_QUERIES),
        prefix_cache_hits=total(_HITS),
        num_preemptions=total(_PREEMPTIONS),
        num_steps=total(_STEPS),
        host_adapter_bytes=total(_HOST_BYTES),
        host_adapter_budget_bytes=total(_HOST_BUDGET),
        device_adapter_bytes=total(_DEVICE_BYTES),
        device_arena_bytes=total(_ARENA_BYTES),
        host_kv_bytes=total(_HOST_KV_BYTES),
        host_kv_budget_bytes=total(_HOST_KV_BUDGET),
        kv_blocks_swapped_out=total(_SWAPPED_OUT),
        kv_blocks_swapped_in=total(_SWAPPED_IN),
        host_kv_hits=total(_HOST_KV_HITS),
        is_merged=total(_MERGED),
        num_merged_steps=total(_MERGED_STEPS),
        num_merges=total(_MERGES),
        num_switches=total(_SWITCHES),
        num_pauses=total(_PAUSES),
        num_step_adapters=total(_STEP_ADAPTERS),
        owed_credit_s=sum(sample.value for sample in samples[_OWED_CREDIT]),
        adapters=tuple(
            AdapterStats(
                version=version,
                tier=tier,
                num_bytes=0,
                in_flight=in_flight.get(version, 0),
                loads=loads.get(version, 0),
            )
            for version, tier in tiers.items()
        ),
    )


def _samples(page: str) -> Iterator[Sample]:
    # Only the wanted lines: the parser would take a tenth of a second for a page with histograms of a
    # thousand adapters.
    wanted = "\n".join(line for line in page.splitlines() if line.startswith(_WANTED))
    for family in text_string_to_metric_families(wanted + "\n"):
        yield from family.samples


def _num_blocks(labels: Mapping[str, str]) -> int:
    own_tokens = _count(labels.get("block_size", "")) or BLOCK_TOKENS
    return _count(labels.get("num_gpu_blocks", "")) * own_tokens // BLOCK_TOKENS


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
