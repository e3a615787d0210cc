"""Inputs of `loraplex fleet`; tests of `loraplex twin` have their own under the same names."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from compiled import compile_slot_engine
from fleet_commands import profile_in, workload_in
from pictures import readable_pictures  # noqa: F401


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_in(tmp_path)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return workload_in(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def compiled_slot_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile the engine with slots in one test worker: all others wait, and read it from disk."""
    # The folder that all test workers have theirs in.
    with (tmp_path_factory.getbasetemp().parent / "slot_engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_slot_engine()
