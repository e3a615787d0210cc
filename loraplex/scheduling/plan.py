"""A step as the scheduler decides it and as an executor, real or simulated, carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loraplex.core.request import FinishReason


class Chunk(NamedTuple):
    """Tokens [start, end) of one sequence, to be computed in this step.

    `token_ids` is empty if the chunk's one token is not known yet: the sequence's chunk in the step before
    samples it (`follows`). `block_ids` covers the sequence at least up to the end of the chunk. `samples`:
    the chunk ends at the sequence's last token, so the step samples the next one.
    """

    request_id: str
    adapter: str | None
    start: int
    token_ids: list[int]
    block_ids: list[int]
    samples: bool

    @property
    def follows(self) -> bool:
        return not self.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or 1

    @property
    def end(self) -> int:
        return self.start + (len(self.token_ids) or 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A copy within the arena, of an adapter (`version`) or of a KV block. Source and target may overlap."""

    source_byte: int
    target_byte: int
    num_bytes: int
    version: str | None = None


class AdapterLoad(NamedTuple):
    """A version to load.

    `place`: byte of the arena to load it to; None where each adapter has memory of its own. `source`: byte of
    host memory it was read to; None if it comes straight from disk. `quiet`: no step in flight uses the
    place, so the load need not wait for one. `awaited`: the step decided with it uses it. `behind`: that step
    does not use it and is launched first. `assisted_layers`: number of its first layers that CPU workers
    compute while it loads.
    """

    version: str
    place: int | None = None
    source: int | None = None
    quiet: bool = True
    awaited: bool = False
    behind: bool = False
    assisted_layers: int = 0


class AdapterRead(NamedTuple):
    """A version to read from disk to byte `place` of the host memory for adapters."""

    version: str
    place: int


class BlockCopy(NamedTuple):
    """A copy of a KV block between the device and the host tier. Until its end is reported, neither block is
    used for anything else."""

    device_block: int
    host_block: int


class StepPlan(NamedTuple):
    """One step. Evictions come first, then moves in their order, then reads and loads, which run beside the
    step and are reported when done; likewise `swap_outs`, KV blocks to copy to the host, and `swap_ins`, to
    copy to the device. Both see what the steps before have written. `waits_for`: versions whose reads and
    loads must end before the step begins. `stalls`: the step may have to wait for adapters while it runs.

    `merge`: a version, which is resident, whose merged weights are written after the moves and before the
    step. `merged`: all chunks are of this version and run on its merged weights, without any LoRA product;
    None for the base model's weights plus each row's adapter. `drops_merged`: the memory of the merged
    weights is given back, before evictions and moves use it."""

    chunks: tuple[Chunk, ...] = ()
    adapter_evictions: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    adapter_reads: tuple[AdapterRead, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    waits_for: frozenset[str] = frozenset()
    stalls: bool = False
    preempted: tuple[str, ...] = ()
    merge: str | None = None
    merged: str | None = None
    drops_merged: bool = False
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class TokenUpdate(NamedTuple):
    """The result of a step for one sequence: its new token (None if a stop token or an error ended it), and
    how it ended."""

    request_id: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    adapter_hit: bool | None = None
    error: str | None = None
    error_param: str | None = None
