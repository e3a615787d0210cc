"""Makes engines with slots for adapters from a profile and options: the counterpart of
`replay.OwnEngines`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin.outcome import Outcome
from loraplex.twin.slot_engine import check_room
from loraplex.twin.slot_simulator import SlotSetup, SlotSimulator
from loraplex.twin.slot_state import BLOCK_SIZE, Limits
from loraplex.workload.jsonl import WorkloadRequest

if TYPE_CHECKING:
    from loraplex.twin.replay import ReplayOptions


class SlotEngines:
    """Makes identical twins of an engine with slots. `ranks`, `sizes` (in bytes): of the adapters, by number.
    `num_slots`, `slot_rank`: number of slots, and the largest rank that each can hold. `kv_tokens`: KV memory
    beside the slots."""

    def __init__(
        self, profile: SlotProfile, options: ReplayOptions, *, longest: int, adapter_bytes: int = 1
    ) -> None:
        """`longest`: tokens of the longest request. Raises CapacityError if it could never run.
        `adapter_bytes`: size of each adapter for copies over links; the engine does not use it."""
        num_adapters = options.num_adapters
        self.ranks = [options.ranks[number % len(options.ranks)] for number in range(num_adapters)]
        self.sizes = [adapter_bytes] * num_adapters
        self.num_slots = (options.num_slots or num_adapters) if num_adapters else 0
        self.slot_rank = (options.slot_rank or max(options.ranks)) if num_adapters else 0
        self.kv_tokens = options.kv_tokens or profile.memory.predict(
            num_slots=self.num_slots, max_rank=self.slot_rank
        )
        self.max_running = profile.max_running
        num_blocks = self.kv_tokens // BLOCK_SIZE
        # Without adapters, there is one that costs nothing and is always resident: the base model.
        num_kinds = max(num_adapters, 1)
        self._setup = SlotSetup(
            limits=Limits(
                num_slots=max(self.num_slots, 1),
                max_rank=self.slot_rank,
                num_blocks=num_blocks,
                spare_blocks=profile.spare_blocks(num_blocks),
                max_running=self.max_running,
                max_step_tokens=profile.max_step_tokens,
                max_open=profile.client.max_open,
                until_s=float(options.until_s),
            ),
            costs=profile.costs if num_adapters else profile.costs.of_base_model,
            ranks=np.array(self.ranks or [0], np.float64),
            positions=np.argsort(np.random.default_rng(options.seed).permutation(num_kinds)),
            latency_s=profile.client.latency_s,
            staged=options.staged,
            resident=not num_adapters,
        )
        check_room(self._setup.limits, longest)

    def make(self) -> SlotSimulator:
        """Return a simulator without adapters."""
        return SlotSimulator(self._setup)

    def run(self, workload: Sequence[WorkloadRequest]) -> Outcome:
        """Simulate a whole workload on one engine."""
        return SlotSimulator(self._setup, num_requests=len(workload)).run(workload)

    def adapter_number(self, version: str) -> int:
        return int(version)

    def register(self, simulator: SlotSimulator, adapter: int) -> None:
        simulator.register(adapter)

    def unstage(self, simulator: SlotSimulator, adapter: int) -> bool:
        simulator.unstage(adapter)
        return True
