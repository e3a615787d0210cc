"""A read from a disk that does not answer: who fails, who goes on, and what is left when it answers."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from driving import Finished, step

from loraplex.adapters.slab import slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import BLOCK_SIZE, random_specs
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import AdapterError
from loraplex.core.request import EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.engine.adapter_loader import AdapterLoader, slab_weights
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.engine.torch_executor import TorchExecutor
from loraplex.kernels.lora import LoraWeights
from loraplex.kernels.reference import TorchKernels
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.shapes import config_of_shape, random_weights
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import SeparateMemory

CONFIG = config_of_shape("tiny")
SHAPE = CONFIG.shape
SPECS = random_specs("disk", "tiny", num_adapters=2, ranks=(4,), modules="q,k,v")
DEAD, FINE = (spec.version for spec in SPECS)


class Disk:
    """Answers for one adapter, and for the other when it is `alive`; `in_order`: with its weights."""

    def __init__(self) -> None:
        self.alive = threading.Event()
        self.in_order = True

    def read(self, spec: AdapterSpec) -> LoraWeights:
        if spec.version == DEAD:
            self.alive.wait()
            if not self.in_order:
                raise AdapterError("its file is cut short")
        layout = slab_layout(spec, SHAPE)
        return slab_weights(torch.zeros(layout.num_elements), layout, spec.max_rank)


@contextmanager
def engine_on(
    disk: Disk, cold_start: ColdStart, *, load_deadline_s: float, max_pause_s: float
) -> Iterator[Engine]:
    kernels = TorchKernels()
    engine = Engine(
        config=SchedulerConfig(max_model_len=200, cold_start=cold_start),
        memory=SeparateMemory(num_blocks=64, block_size=BLOCK_SIZE, adapter_bytes=1 << 20),
        executor=TorchExecutor(
            decoder=Decoder(CONFIG, random_weights(CONFIG, torch.float32, torch.device("cpu")), kernels, 200),
            caches=[KVCache.zeros(SHAPE, 64, BLOCK_SIZE, torch.float32) for _ in range(SHAPE.num_layers)],
            builder=BatchBuilder(kernels, BLOCK_SIZE),
            dtype=torch.float32,
            read=disk.read,
        ),
        load_deadline_s=load_deadline_s,
        max_pause_s=max_pause_s,
    )
    for spec in SPECS:
        engine.add_adapter(spec)
    try:
        yield engine
    finally:
        disk.alive.set()
        engine.close()


def ask(engine: Engine, request_id: str, adapter: str | None, *, tokens: int = 3) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.add_request(
        EngineRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], params=params, adapter=adapter)
    )


def run_until(engine: Engine, done: dict[str, Finished], *request_ids: str) -> None:
    """Until these ended; the suite's own time limit ends it if they do not."""
    while not all(name in done and done[name].finish_reason is not None for name in request_ids):
        step(engine, done)


@pytest.mark.parametrize("cold_start", [ColdStart.ON_DEMAND, ColdStart.OVERLAP])
def test_streams_of_others_go_on_while_a_load_hangs(cold_start: ColdStart) -> None:
    disk, done = Disk(), dict[str, Finished]()
    with engine_on(disk, cold_start, load_deadline_s=3600.0, max_pause_s=0.01) as engine:
        ask(engine, "waits", DEAD)
        ask(engine, "base", None)
        run_until(engine, done, "base")
        assert done["base"].finish_reason is FinishReason.LENGTH
        assert "waits" not in done, "nobody said yet that its adapter does not come"
        disk.alive.set()
        run_until(engine, done, "waits")
        assert done["waits"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("cold_start", [ColdStart.ON_DEMAND, ColdStart.OVERLAP])
def test_who_waits_for_a_load_that_hangs_fails_and_the_next_adapter_is_loaded(cold_start: ColdStart) -> None:
    disk, done = Disk(), dict[str, Finished]()
    # Long enough for the adapter that is fine, on a busy machine too.
    with engine_on(disk, cold_start, load_deadline_s=1.0, max_pause_s=0.01) as engine:
        ask(engine, "waits", DEAD)
        ask(engine, "behind it", FINE)  # there is one thread to read both
        ask(engine, "base", None, tokens=50)
        run_until(engine, done, "waits", "behind it", "base")
        assert done["waits"].finish_reason is FinishReason.ERROR
        assert done["waits"].error_param == "model"
        assert DEAD in str(done["waits"].error)
        assert "check the disk" in str(done["waits"].error)
        assert done["behind it"].finish_reason is done["base"].finish_reason is FinishReason.LENGTH
        ask(engine, "comes later", DEAD)
        run_until(engine, done, "comes later")
        assert DEAD in str(done["comes later"].error)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_load_that_ends_after_its_requests_leaves_an_adapter_or_nothing(in_order: bool) -> None:
    disk, done = Disk(), dict[str, Finished]()
    disk.in_order = in_order
    with engine_on(disk, ColdStart.OVERLAP, load_deadline_s=0.02, max_pause_s=0.01) as engine:
        ask(engine, "waits", DEAD)
        run_until(engine, done, "waits")
        assert not engine.has_work(), "a read that may never end keeps the engine from being idle"
        disk.alive.set()
        while not engine.has_work():  # as an idle loop does, more slowly
            pass
        while engine.has_work():
            step(engine, done)
        tiers = {adapter.version: (adapter.tier, adapter.in_flight) for adapter in engine.stats().adapters}
        assert tiers[DEAD] == ("host" if in_order else "disk", 0)
        ask(engine, "asks again", DEAD)
        run_until(engine, done, "asks again")
        expected = FinishReason.LENGTH if in_order else FinishReason.ERROR
        assert done["asks again"].finish_reason is expected


def test_an_engine_is_closed_although_a_load_hangs() -> None:
    disk, done = Disk(), dict[str, Finished]()
    with engine_on(disk, ColdStart.OVERLAP, load_deadline_s=0.02, max_pause_s=0.01) as engine:
        ask(engine, "waits", DEAD)
        run_until(engine, done, "waits")
        engine.close()
        assert not disk.alive.is_set()


def test_a_loader_is_closed_although_a_read_hangs_that_is_not_overdue_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader, begun, alive = AdapterLoader(), threading.Event(), threading.Event()

    def read(spec: AdapterSpec) -> None:
        begun.set()
        alive.wait()

    loader.submit_read(SPECS[:1], read)
    loader.submit_read(SPECS[1:], read)  # it has not begun, and never will
    assert begun.wait(60)
    with caplog.at_level(logging.WARNING):
        loader.close(timeout_s=0.01)
    assert loader.is_reading
    assert f"1 adapter read did not end (version {DEAD})" in caplog.text
    alive.set()
    while loader.is_reading:
        pass
    assert [result.version for result in loader.poll(60.0)] == [DEAD]


def test_a_loader_whose_reads_have_ended_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    loader = AdapterLoader(num_threads=2)
    loader.submit_read(SPECS, lambda spec: None)
    loader.close()
    assert not loader.is_reading
    assert caplog.text == ""


def test_a_read_that_is_overdue_is_not_pending_until_it_has_ended() -> None:
    loader, begun, alive = AdapterLoader(), threading.Event(), threading.Event()

    def read(spec: AdapterSpec) -> None:
        begun.set()
        alive.wait()

    loader.submit_read(SPECS[:1], read)
    assert begun.wait(60)
    assert loader.num_pending == 1
    assert loader.overdue(0.0) == loader.overdue(0.0) == [DEAD]
    assert loader.num_pending == 0
    loader.submit_read(SPECS[1:], lambda spec: None)
    assert loader.num_pending == 1
    assert [result.version for result in loader.poll(60.0)] == [FINE]
    assert loader.num_pending == 0
    alive.set()
    while loader.num_pending == 0:
        pass
    assert [result.version for result in loader.poll(60.0)] == [DEAD]
    assert loader.num_pending == 0
    assert loader.overdue(0.0) == []
    loader.close()


def test_a_process_ends_although_a_helper_hangs() -> None:
    code = (
        "import threading; from loraplex.engine.helper_threads import HelperThreads; "
        "HelperThreads(1).submit(threading.Event().wait)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
