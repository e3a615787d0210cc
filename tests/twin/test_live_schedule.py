"""Fed with the times that a live engine took, the twin decides what that engine decided, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cheap_merges import costs_that_merge
from live_runs import Traffic, run_both
from tiny import save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.core.batching import Batching
from loraplex.engine import cpu_build
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config
from loraplex.perf.drift import DriftWatch


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("base")
    return folder, save_model(folder)


def live_engine(
    base: tuple[Path, Any],
    folder: Path,
    batching: Batching = Batching.FCFS,
    adapter_bytes: int = 100 << 10,
    kv_bytes: int = 120 << 10,
) -> tuple[Engine, list[str]]:
    """Memory for a few requests at a time, and by default for two to four adapters of five, whose victims are
    chosen by what reloads cost."""
    shape = load_config(base[0]).shape
    options = EngineOptions(
        model=str(base[0]),
        kv_memory_bytes=kv_bytes,
        host_adapter_memory_bytes=adapter_bytes,
        max_step_tokens=48,
        max_running=256 if batching is Batching.FCFS else 4,
        batching=batching,
    )
    engine = build_core(options)
    versions = []
    for number, rank in enumerate((4, 8, 6, 4, 2)):
        path = folder / f"adapter-{number}"
        save_adapter(path, base[1], rank=rank, seed=number)
        spec = read_adapter(path, shape)
        engine.add_adapter(spec)
        versions.append(spec.version)
    return engine, versions


def test_the_twin_decides_what_the_live_engine_decided(base: tuple[Path, Any], tmp_path: Path) -> None:
    engine, versions = live_engine(base, tmp_path)
    live, replayed, _ = run_both(engine, versions)
    assert replayed == live
    # What the run has to show, or the test shows little.
    assert sum(len(each.preempted) for each in live) > 0
    assert sum(len(each.loads) for each in live) > 5


@pytest.mark.parametrize(
    "batching",
    [
        Batching.AUTO,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in Batching
            if each not in (Batching.FCFS, Batching.AUTO)
        ),
    ],
)
def test_the_twin_decides_the_same_under_every_batching_policy(
    base: tuple[Path, Any], tmp_path: Path, batching: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured times would correct the live engine's predictions, which the twin does not measure."""
    monkeypatch.setattr(DriftWatch, "observe", lambda *_, **__: False)
    engine, versions = live_engine(base, tmp_path, batching, adapter_bytes=2 << 20)
    live, replayed, _ = run_both(engine, versions)
    assert replayed == live
    are_merged = any(each.merge for each in live)
    assert are_merged or batching is not Batching.MERGED
    assert batching.merges or not are_merged


def test_the_twin_pauses_the_same_requests_for_a_hot_adapter(
    base: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DriftWatch, "observe", lambda *_, **__: False)
    monkeypatch.setattr(cpu_build, "known_costs", costs_that_merge)
    engine, versions = live_engine(base, tmp_path, Batching.AUTO, adapter_bytes=2 << 20, kv_bytes=1 << 20)
    live, replayed, _ = run_both(engine, versions, Traffic(hot=0.8))
    assert replayed == live
    assert any(each.merge for each in live), "nothing was merged"
    assert engine.stats().num_pauses > 0, "nothing was paused"
