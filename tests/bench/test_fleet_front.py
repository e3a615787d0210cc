"""The benchmark of a fleet's front, at a size that a test can take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import fleet_front, paced_core


@pytest.mark.slow
def test_what_is_seen_of_paced_tokens_is_counted(tmp_path: Path) -> None:
    found = fleet_front.measure(2, rate=10.0, duration_s=1.0, scratch=tmp_path)
    assert (found["replicas"], found["requests"], found["failed"]) == (2, 10, 0)
    for name in ("ttft_added_ms", "token_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p95"] <= found[name]["p99"]


def test_a_token_tells_when_it_was_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1.6383
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    token = paced_core.token_now()
    assert 0 <= token < paced_core.NUM_TIMES
    now_s += 0.05  # beyond the largest id
    assert paced_core.age_s(token) == pytest.approx(0.05, abs=2 * paced_core.TICK_S)
