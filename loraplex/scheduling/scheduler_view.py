"""A scheduler's stats, and the invariants of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.request_state import RequestState


def engine_stats(
    memory: Memory,
    *,
    num_steps: int,
    num_running: int,
    num_waiting: int,
    num_preemptions: int,
    batching: Mapping[str, Any],
    adapters: tuple[AdapterStats, ...],
) -> EngineStats:
    pool, room = memory.pool, memory.table.serving.room
    host = memory.table.host.room if room.on_device else room
    swap = {} if pool.host is None else _host_kv_stats(pool.host, pool.block_size)
    return EngineStats(
        num_running=num_running,
        num_waiting=num_waiting,
        num_kv_blocks=pool.num_blocks - pool.num_free + pool.num_obtainable,
        num_kv_blocks_used=pool.num_blocks - pool.num_free,
        prefix_cache_queries=pool.prefix_queries * pool.block_size,
        prefix_cache_hits=pool.prefix_hits * pool.block_size,
        num_preemptions=num_preemptions,
        num_steps=num_steps,
        **batching,
        host_adapter_bytes=host.used_bytes + (0 if room.on_device else memory.merged_bytes),
        host_adapter_budget_bytes=host.budget_bytes,
        device_adapter_bytes=room.used_bytes + memory.merged_bytes if room.on_device else 0,
        device_arena_bytes=memory.shared_bytes,
        adapters=adapters,
        **swap,
    )


def _host_kv_stats(host: HostKV, block_size: int) -> dict[str, int]:
    return {
        "host_kv_bytes": host.num_used * host.block_bytes,
        "host_kv_budget_bytes": host.num_blocks * host.block_bytes,
        "kv_blocks_swapped_out": host.num_copied_out,
        "kv_blocks_swapped_in": host.num_copied_in,
        "host_kv_hits": host.num_hits * block_size,
    }


def check_integrity(
    waiting: Collection[RequestState],
    running: Collection[RequestState],
    memory: Memory,
    unknown: Mapping[int, int],
    returning: Collection[RequestState] = (),
) -> None:
    """Assert the invariants of queues, blocks and pins. `unknown`: by a sequence's identity, the number of
    its tokens that steps in flight sample. `returning`: waiting requests whose keys and values come back from
    the host."""
    assert all(sequence in waiting for sequence in returning)
    queued = [*waiting, *running]
    memory.pool.check_integrity(s.block_ids for s in queued)
    assert all(s.num_unknown == unknown.get(id(s), 0) for s in queued), (
        "a token is counted on that nobody samples"
    )
    for sequence in waiting:
        assert not sequence.block_ids or sequence in returning, "a waiting request holds blocks"
    for sequence in running:
        assert sequence.adapter is None or sequence.pinned, "a running request's adapter may vanish"
        assert 0 <= sequence.num_computed < sequence.num_tokens
        assert len(sequence.block_ids) >= memory.pool.blocks_for(sequence.num_computed)
    memory.check_integrity()
    memory.table.check_integrity(
        pins=Counter(s.adapter for s in queued if s.adapter is not None and s.pinned),
        in_flight=Counter(s.adapter for s in queued if s.adapter is not None),
    )
