"""The memory a scheduler manages: KV blocks and adapters, each with a budget or sharing one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loraplex.scheduling.adapter_table import AdapterTable
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.plan import AdapterLoad, Move
from loraplex.scheduling.room import ByteBudget


class Memory(Protocol):
    """KV blocks (`pool`) and adapters (`table`). `shared`: both use one memory of `shared_bytes`. `advice`:
    the end of an error message to a user who needs more memory for requests; `adapter_advice`: the same for
    adapters."""

    pool: BlockPool
    table: AdapterTable
    shared: bool
    shared_bytes: int
    advice: str
    adapter_advice: str

    def max_tokens(self, adapter_bytes: int) -> int:
        """Return the most tokens that one request could have with only its adapter beside it."""
        ...

    def load_of(self, version: str) -> AdapterLoad:
        """Return the load of an acquired version, with the place its weights go to."""
        ...

    @property
    def merged_bytes(self) -> int:
        """Bytes that are taken for merged weights now."""
        ...

    @property
    def merge_place(self) -> int | None:
        """The first byte of the merged weights' memory in the arena; None where they have memory of their
        own, or none is taken."""
        ...

    def take_merged(self, num_bytes: int) -> bool:
        """Have memory of so many bytes for merged weights, whatever was taken for them before. What they hold
        is undefined then. Return False, and change nothing, if there is no room now without anything in use.

        As after each allocation, `take_block_moves` must be called before the next one.
        """
        ...

    def give_back_merged(self) -> None:
        """Give back the memory of merged weights, if any is taken. Steps in flight may still read it."""
        ...

    def step_decided(self) -> None:
        """Record that a step with chunks was decided, and may be in flight from now on."""
        ...

    def step_landed(self) -> None:
        """Record that the oldest step in flight has landed."""
        ...

    def take_moves(self) -> Sequence[Move]:
        """Return the copies decided since the last call, to be made before anything else."""
        ...

    def take_block_moves(self) -> dict[int, int]:
        """Return the blocks that were moved since the last call, old number to new; their holders have to
        follow."""
        ...

    def check_integrity(self) -> None: ...


class SeparateMemory:
    """A fixed number of blocks, and a fixed budget for adapters."""

    shared = False
    shared_bytes = 0
    merge_place = None
    advice = "raise --kv-memory"
    adapter_advice = "raise --host-adapter-memory"

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        adapter_bytes: int,
        pool: type[BlockPool] = BlockPool,
        host_kv: HostKV | None = None,
    ) -> None:
        """`pool`: the class that manages KV blocks. `host_kv`: their host tier."""
        self.pool = (
            pool(num_blocks, block_size) if host_kv is None else pool(num_blocks, block_size, host=host_kv)
        )
        self._budget = ByteBudget(adapter_bytes)
        self.table = AdapterTable(self._budget)

    def max_tokens(self, adapter_bytes: int) -> int:
        return self.pool.num_blocks * self.pool.block_size

    def load_of(self, version: str) -> AdapterLoad:
        return AdapterLoad(version=version)

    @property
    def merged_bytes(self) -> int:
        return self._budget.merged_bytes

    def take_merged(self, num_bytes: int) -> bool:
        return self._budget.take_merged(num_bytes, self.table.serving.idle, self.table.serving.evict)

    def give_back_merged(self) -> None:
        self._budget.merged_bytes = 0

    def step_decided(self) -> None:
        pass

    def step_landed(self) -> None:
        pass

    def take_moves(self) -> Sequence[Move]:
        return ()

    def take_block_moves(self) -> dict[int, int]:
        return {}

    def check_integrity(self) -> None:
        """Assert that adapters and merged weights are within their budget."""
        budget = self._budget
        assert budget.merged_bytes >= 0
        assert budget.used_bytes + budget.merged_bytes <= budget.budget_bytes
