"""The memory a scheduler decides about: KV blocks and adapters, each with a budget or sharing one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.plan import AdapterLoad, Move
from loraplex.scheduling.room import ByteBudget


class Memory(Protocol):
    """`shared`: what adapters give up, KV blocks can have, and the other way round; `shared_bytes`: how much
    that is in all. `advice`: the end of a message to a user who needs more for requests; `adapter_advice`:
    for adapters. `table`: the adapters, and where each of them is."""

    pool: BlockPool
    table: AdapterTable
    shared: bool
    shared_bytes: int
    advice: str
    adapter_advice: str

    def max_tokens(self, adapter_bytes: int) -> int:
        """Return how many tokens of one request there is room for, with nothing beside it but its adapter."""
        ...

    def load_of(self, version: str) -> AdapterLoad:
        """Return the load of a version that was acquired: where its weights go."""
        ...

    def step_decided(self) -> None:
        """A step that computes something was decided, and may be under way from now on."""
        ...

    def step_landed(self) -> None:
        """The oldest of them is done."""
        ...

    def take_moves(self) -> Sequence[Move]:
        """Copies to be made before anything else happens, since the last call."""
        ...

    def take_block_moves(self) -> dict[int, int]:
        """Blocks that have other numbers since the last call; who holds them has to follow."""
        ...

    def check_integrity(self) -> None: ...


class SeparateMemory:
    """A fixed number of blocks, and a fixed budget for adapters."""

    shared = False
    shared_bytes = 0
    advice = "raise --kv-memory"
    adapter_advice = "raise --host-adapter-memory"

    def __init__(
        self, *, num_blocks: int, block_size: int, adapter_bytes: int, pool: type[BlockPool] = BlockPool
    ) -> None:
        """`pool`: what keeps count of KV blocks."""
        self.pool = pool(num_blocks, block_size)
        self.table = AdapterTable(ByteBudget(adapter_bytes))

    def max_tokens(self, adapter_bytes: int) -> int:
        return self.pool.num_blocks * self.pool.block_size

    def load_of(self, version: str) -> AdapterLoad:
        return AdapterLoad(version=version)

    def step_decided(self) -> None:
        pass

    def step_landed(self) -> None:
        pass

    def take_moves(self) -> Sequence[Move]:
        return ()

    def take_block_moves(self) -> dict[int, int]:
        return {}

    def check_integrity(self) -> None:
        pass
