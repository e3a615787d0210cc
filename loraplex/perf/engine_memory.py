"""An engine's memory for KV tokens and adapters, the sizes of both, and the limits of requests and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Memory sizes and limits. `max_context`: most tokens of a request, prompt and answer. `token_bytes`:
    bytes of a token in the KV cache, which is allocated in blocks of `block_tokens`.

    `arena_bytes`: memory that KV blocks and adapters share on a device; None on a CPU, where they are
    separate and the KV cache holds `kv_tokens` (None with an arena). `host_bytes`: the budget for adapters in
    host memory. `table_bytes`: bytes of an adapter beside its weights. `rank_bytes`: module -> bytes of one
    rank of its A and B in all layers. `step_tokens`, `position_cost`: as in `StepWork`.
    """

    max_context: int
    token_bytes: int
    block_tokens: int
    arena_bytes: int | None
    kv_tokens: int | None
    host_bytes: int
    table_bytes: int
    rank_bytes: Mapping[str, int]
    step_tokens: int = 2048
    position_cost: float = 0.0

    def __post_init__(self) -> None:
        assert (self.arena_bytes is None) != (self.kv_tokens is None), "shared memory, or memory apart"

    def adapter_bytes(self, rank: int, modules: Iterable[str]) -> int:
        """Return the bytes of an adapter of this rank on these modules of every layer, without the alignment
        of its parts."""
        return self.table_bytes + rank * self.bytes_per_rank(modules)

    def bytes_per_rank(self, modules: Iterable[str]) -> int:
        """Return the bytes of an adapter on these modules per unit of rank."""
        return sum(self.rank_bytes[module] for module in modules)
