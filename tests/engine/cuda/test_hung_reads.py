"""Adapters whose reads to the host's memory do not end; kernels interpreted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_engines import SHAPE, fill_slab, greedy, interpreted, save_base
from driving import Finished, run_to_end, step
from tiny import save_adapter

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.slab import SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import random_specs
from loraplex.core.cold_start import ColdStart
from loraplex.core.request import FinishReason
from loraplex.engine import slab_reader
from loraplex.engine.core import Engine
from loraplex.engine.cuda import host_memory
from loraplex.engine.slab_reader import SlabReaders

SPECS = random_specs("disk", "tiny", num_adapters=3, ranks=[8], modules="q")
DEAD, FINE = SPECS[:2], SPECS[2]


class Disk:
    """Answers for some adapters only when it is `alive`."""

    def __init__(self) -> None:
        self.alive = threading.Event()
        self.slabs: dict[str, torch.Tensor] = {}

    def read(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        if spec in DEAD:
            self.slabs[spec.version] = slab
            self.alive.wait()
        fill_slab(spec, layout, slab)


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.alive.set()


def engine_with_hung_reads(disk: Disk) -> Engine:
    """The requests on both adapters that hang have failed."""
    engine = interpreted(cold_start=ColdStart.PIPELINED, read=disk.read)
    engine._load_deadline_s = 0.05
    for spec in SPECS:
        engine.add_adapter(spec)
    done: dict[str, Finished] = {}
    for spec in DEAD:
        engine.add_request(greedy(spec.version, spec.version))
    while len(done) < len(DEAD):
        step(engine, done)
    assert {found.finish_reason for found in done.values()} == {FinishReason.ERROR}
    engine._load_deadline_s = 3600.0
    return engine


def test_an_adapter_is_served_while_the_reads_of_two_others_hang(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[object] = []
    monkeypatch.setattr(host_memory, "_LEFT", left)
    engine = engine_with_hung_reads(disk)
    assert not engine.has_work()
    engine.add_request(greedy("fine", FINE.version, prompt=1, tokens=1))
    assert run_to_end(engine)["fine"].finish_reason is FinishReason.LENGTH
    disk.alive.set()
    while any(spec.version not in tiers_of(engine, "host") for spec in DEAD):
        engine.step()
    engine.check_integrity()
    assert not engine.has_work()
    engine.add_request(greedy("again", DEAD[0].version, prompt=1, tokens=1))
    assert run_to_end(engine)["again"].finish_reason is FinishReason.LENGTH
    engine.close()
    assert left == [], "no read is under way any more"


def tiers_of(engine: Engine, tier: str) -> set[str]:
    return {adapter.version for adapter in engine.stats().adapters if adapter.tier == tier}


def test_memory_that_a_read_may_still_write_to_outlives_the_engine(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[object] = []
    monkeypatch.setattr(host_memory, "_LEFT", left)
    engine = engine_with_hung_reads(disk)
    engine.close()
    assert len(left) == 1
    assert "2 adapter reads did not end" in caplog.text
    del engine
    disk.alive.set()
    while not all(slab.any() for slab in disk.slabs.values()):  # both write where they were told to
        pass


def test_threads_that_help_with_a_read_that_hangs_are_missed_by_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one helper
    base = save_base(tmp_path / "base")
    for seed, name in enumerate(("dead", "fine")):
        save_adapter(tmp_path / name, base, rank=4, targets=["q_proj"], seed=seed)
    dead, fine = (read_adapter(tmp_path / name, SHAPE) for name in ("dead", "fine"))
    inode, alive, hangs = os.stat(dead.weights_path).st_ino, threading.Event(), threading.Event()
    read_part = slab_reader._read_part

    def wait_and_read(fd: int, *args: object) -> None:
        if os.fstat(fd).st_ino == inode:
            hangs.set()
            alive.wait()
        read_part(fd, *args)

    monkeypatch.setattr(slab_reader, "_read_part", wait_and_read)
    readers, slabs = SlabReaders(), []

    def read(spec: AdapterSpec) -> torch.Tensor:
        layout = slab_layout(spec, SHAPE)
        slabs.append(slab := torch.full((layout.num_elements,), torch.nan))
        readers(spec, layout, slab)
        return slab

    hung = threading.Thread(target=read, args=(dead,))
    hung.start()
    assert hangs.wait(60)
    assert not read(fine).isnan().any()
    readers.close()
    assert hung.is_alive()
    alive.set()
    hung.join()
    assert not slabs[0].isnan().any(), "closing the readers cut off a read that was under way"
