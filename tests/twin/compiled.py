"""The engine with slots, compiled by numba: `make test` does so before the tests, beside mypy."""

from __future__ import annotations

from recorded import TRUTH
from twins import random_workload

from loraplex.twin.replay import ReplayOptions
from loraplex.twin.slot_engines import SlotEngines


def compile_slot_engine() -> None:
    """Compile all of it, or read it from disk where it has been compiled."""
    one, other = random_workload(0, num_requests=2, num_adapters=1)
    options = ReplayOptions(num_adapters=1, num_slots=1, kv_tokens=4000)
    simulator = SlotEngines(TRUTH, options, longest=1000).make()
    simulator.watch([], [])
    simulator.register(0)
    simulator.offer(one)
    simulator.offer(other)
    simulator.run_to(other.arrival_s)
    simulator.hand_over("1")
