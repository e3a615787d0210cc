"""What `loraplex fleet` is given; tests of `loraplex twin` have their own under the same names."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from fleet_commands import profile_in, workload_in
from recorded import TRUTH
from twins import random_workload

from loraplex.twin.replay import ReplayOptions
from loraplex.twin.slot_engines import SlotEngines


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_in(tmp_path)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return workload_in(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def compiled_slot_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile the engine with slots in one test worker: all others wait, and read it from disk."""
    one, other = random_workload(0, num_requests=2, num_adapters=1)
    options = ReplayOptions(num_adapters=1, num_slots=1, kv_tokens=4000)
    simulator = SlotEngines(TRUTH, options, longest=1000).make()
    simulator.watch([], [])
    simulator.register(0)
    # The folder that all test workers have theirs in.
    with (tmp_path_factory.getbasetemp().parent / "slot_engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        simulator.offer(one)
        simulator.offer(other)
        simulator.run_to(other.arrival_s)
        simulator.hand_over("1")
