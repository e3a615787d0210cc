"""A snapshot of an engine for metrics and the admin API: counters since start, gauges as of now."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterStats:
    """One adapter version as the engine sees it. tier: "disk", "host", "loading" or "device"."""

    version: str
    tier: str
    num_bytes: int
    in_flight: int
    loads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Engine gauges and counters.

    Without a GPU, adapters in host memory are ready for use and the device's figures are 0; with one, KV
    blocks and adapters share `device_arena_bytes`. `adapter_file_reads`: how often weights files were opened.
    `adapter_fetches`: adapters that were copied from other replicas. `predicted_step_s`, `measured_step_s`:
    predicted and measured seconds of about the last thousand steps, and likewise for copies of adapters to
    the device; 0 if nothing is predicted.

    Of the batching policy: `is_merged`: 1 while merged weights of a version are held. `num_switches`: changes
    from or to such a step, or to another version; `num_merges`: how often merged weights were written.
    `num_pauses`: running requests that a step left out, summed over all steps; `num_step_adapters`: adapters
    that a step read, likewise. `owed_credit_s`: what adapters have gained by waiting, with `dynamic`.

    `host_kv_bytes`, `host_kv_budget_bytes`: the host tier of KV blocks, 0 without one.
    `kv_blocks_swapped_out`, `kv_blocks_swapped_in`: KV blocks copied there and back. `host_kv_hits`: prompt
    tokens found in the prefix cache because the host held them.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    host_adapter_bytes: int = 0
    host_adapter_budget_bytes: int = 0
    device_adapter_bytes: int = 0
    device_arena_bytes: int = 0
    host_kv_bytes: int = 0
    host_kv_budget_bytes: int = 0
    kv_blocks_swapped_out: int = 0
    kv_blocks_swapped_in: int = 0
    host_kv_hits: int = 0
    adapter_file_reads: int = 0
    adapter_fetches: int = 0
    adapter_bytes_fetched: int = 0
    adapter_fetch_failures: int = 0
    predicted_step_s: float = 0.0
    measured_step_s: float = 0.0
    predicted_copy_s: float = 0.0
    measured_copy_s: float = 0.0
    is_merged: int = 0
    num_switches: int = 0
    num_merges: int = 0
    num_merged_steps: int = 0
    num_pauses: int = 0
    num_step_adapters: int = 0
    owed_credit_s: float = 0.0
    adapters: tuple[AdapterStats, ...] = field(default=())
