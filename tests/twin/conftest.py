"""What `loraplex fleet` is given; tests of `loraplex twin` have their own under the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_commands import profile_in, workload_in


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_in(tmp_path)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return workload_in(tmp_path)
