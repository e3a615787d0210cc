"""Requests whose adapter is not on the device yet, in every way they can start; kernels interpreted."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterable, Sequence

import pytest
import torch
from cuda_engines import SHAPE, fill_slab, greedy, interpreted
from driving import run_to_end

from loraplex.adapters.slab import SlabLayout, slab_layout
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import random_specs
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.engine.cuda import host_memory
from loraplex.engine.cuda.adapter_block import block_bytes
from loraplex.engine.cuda.bus import Bus, Copy
from loraplex.engine.cuda.device_arena import page_bytes
from loraplex.engine.cuda.executor import CudaExecutor
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.streams import Moment
from loraplex.kernels.triton.gate import Gate

WARM = random_specs("warm", "tiny", num_adapters=1, ranks=[4], modules="q")[0]
COLD = random_specs("cold", "tiny", num_adapters=3, ranks=[8, 3, 16], modules="q")


def text(engine_for: ColdStart, specs: Sequence[AdapterSpec] = COLD[:2]) -> dict[str, list[int]]:
    """One request for each adapter, all at once."""
    engine = interpreted(cold_start=engine_for)
    for spec in specs:
        engine.add_adapter(spec)
        engine.add_request(greedy(spec.version, spec.version))
    done = run_to_end(engine)
    engine.close()
    return {name: found.token_ids for name, found in done.items()}


class LateBus:
    """Copies that begin when a step has begun to wait for them, on a thread of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bus: Bus | None = None
        self.pending: list[tuple[Sequence[Copy], int]] = []
        self.threads: list[threading.Thread] = []
        self._number = 0
        await_tables = Gate.await_tables
        monkeypatch.setattr(Bus, "carry", lambda bus, copies: self.carry(bus, copies))

        def begin_and_wait(gate: Gate) -> None:
            self.begin()
            await_tables(gate)

        monkeypatch.setattr(Gate, "await_tables", begin_and_wait)

    def carry(self, bus: Bus, copies: Iterable[Copy]) -> int:
        self.bus = bus
        self._number += 1
        self.pending.append((list(copies), self._number))
        return self._number

    def begin(self) -> None:
        pending, self.pending = self.pending, []
        if pending:
            self.threads.append(threading.Thread(target=self._copy, args=(pending,)))
            self.threads[-1].start()

    def _copy(self, pending: Sequence[tuple[Sequence[Copy], int]]) -> None:
        assert self.bus is not None
        for copies, number in pending:
            for copy in copies:
                ctypes.memmove(copy.target, copy.source.address, copy.source.num_bytes)
            self.bus.ticket_1.fill_(number)


def test_layers_wait_for_weights_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = text(ColdStart.OVERLAP)
    late = LateBus(monkeypatch)
    assert text(ColdStart.PIPELINED) == expected
    assert late.threads, "nothing was late"


@pytest.mark.slow
def test_without_the_wait_the_text_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = text(ColdStart.OVERLAP)
    late = LateBus(monkeypatch)
    monkeypatch.setattr(Gate, "await_tables", lambda gate: None)
    monkeypatch.setattr(Gate, "await_layer", lambda gate, layer: None)
    assert text(ColdStart.PIPELINED) != expected
    assert late.pending


def staged(cold_start: ColdStart) -> tuple[object, AdapterSpec]:
    """An engine with one adapter in the host's memory."""
    engine = interpreted(cold_start=cold_start)
    engine.add_adapter(COLD[0])
    engine.stage_adapter(COLD[0].version)
    run_to_end(engine)
    assert [adapter.tier for adapter in engine.stats().adapters] == ["host"]
    return engine, COLD[0]


def test_adapters_are_read_while_the_engine_prepares() -> None:
    engine = interpreted(cold_start=ColdStart.OVERLAP)
    for spec in COLD:
        engine.add_adapter(spec)
        engine.stage_adapter(spec.version)
    while engine._scheduler.adapters.has_work():  # until the last read has begun
        engine.prepare()
    run_to_end(engine)
    assert {adapter.tier for adapter in engine.stats().adapters} == {"host"}
    assert engine.stats().num_steps == 0
    engine.close()


def test_nobody_is_served_while_the_engine_prepares() -> None:
    engine = interpreted(cold_start=ColdStart.OVERLAP)
    engine.add_adapter(COLD[0])
    engine.stage_adapter(COLD[0].version)
    engine.add_request(greedy("a", COLD[0].version))
    engine.prepare()
    assert engine.stats().num_waiting == 1
    assert [adapter.tier for adapter in engine.stats().adapters] == ["disk"]
    run_to_end(engine)
    engine.close()


@pytest.mark.parametrize("cold_start", [ColdStart.PIPELINED, ColdStart.OVERLAP])
def test_who_may_start_before_its_adapter_is_there(cold_start: ColdStart) -> None:
    engine, spec = staged(cold_start)
    engine.add_request(greedy("a", spec.version))
    engine.step()
    assert engine.stats().num_steps == (1 if cold_start is ColdStart.PIPELINED else 0)
    run_to_end(engine)
    engine.close()


class SlowDisk:
    """Reads that end when they are told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()

    def __call__(self, spec: AdapterSpec, layout: SlabLayout, slab: torch.Tensor) -> None:
        if spec.version != WARM.version:
            self.begun.set()
            assert self.go.wait(300)
        fill_slab(spec, layout, slab)


@pytest.mark.slow
def test_others_go_on_while_an_adapter_is_read() -> None:
    disk = SlowDisk()
    engine = interpreted(cold_start=ColdStart.OVERLAP, read=disk)
    for spec in (WARM, COLD[0]):
        engine.add_adapter(spec)
    engine.add_request(greedy("cold", COLD[0].version))
    engine.add_request(greedy("warm", WARM.version, tokens=4))
    done: dict[str, list[int]] = {}
    while len(done.get("warm", ())) < 4:
        for output in engine.step():
            done.setdefault(output.request_id, []).extend(output.token_ids)
    assert disk.begun.is_set()
    assert "cold" not in done
    disk.go.set()
    assert len(run_to_end(engine)["cold"].token_ids) == 2
    engine.close()


@pytest.mark.slow
def test_on_demand_nobody_goes_on_before_the_adapter_is_there() -> None:
    disk = SlowDisk()
    engine = interpreted(cold_start=ColdStart.ON_DEMAND, read=disk)
    for spec in (WARM, COLD[0]):
        engine.add_adapter(spec)
    engine.add_request(greedy("warm", WARM.version, tokens=5))
    while engine.stats().num_steps < 2:
        engine.step()
    engine.add_request(greedy("cold", COLD[0].version))
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert disk.begun.wait(60)
    num_steps = engine.stats().num_steps
    assert thread.is_alive()
    disk.go.set()
    thread.join(60)
    assert engine.stats().num_steps == num_steps + 1
    run_to_end(engine)
    engine.close()


def test_what_a_step_does_not_need_is_copied_behind_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spec = staged(ColdStart.OVERLAP)
    order: list[str] = []
    for owner, name in ((Bus, "carry"), (StepRunner, "run")):
        real = getattr(owner, name)

        def noted(*args, real=real, name=name, **options):
            order.append(name)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, noted)
    engine.add_request(greedy("base", tokens=4))
    engine.step()
    order.clear()
    engine.add_request(greedy("cold", spec.version))
    engine.step()
    assert order[0] == "run"
    assert set(order[1:]) == {"carry"}
    run_to_end(engine)
    engine.close()


def test_without_a_step_to_launch_a_copy_begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spec = staged(ColdStart.OVERLAP)
    carried: list[Bus] = []
    carry = Bus.carry
    monkeypatch.setattr(Bus, "carry", lambda bus, copies: (carried.append(bus), carry(bus, copies))[1])
    monkeypatch.setattr(CudaExecutor, "poll_adapters", lambda executor, timeout_s: [])
    engine.add_request(greedy("cold", spec.version))
    engine.step()
    assert carried
    monkeypatch.undo()
    run_to_end(engine)
    engine.close()


def test_cached_adapters_are_there_before_anybody_asks_and_stay() -> None:
    engine = interpreted(cold_start=ColdStart.CACHED)
    for spec in COLD:
        engine.add_adapter(spec)
    run_to_end(engine)
    assert [adapter.tier for adapter in engine.stats().adapters] == ["device"] * 3
    engine.add_request(greedy("a", COLD[1].version))
    engine.remove_adapter(COLD[0].version)
    done = run_to_end(engine)
    assert len(done["a"].token_ids) == 2
    assert {adapter.version for adapter in engine.stats().adapters} == {spec.version for spec in COLD[1:]}
    assert all(adapter.tier == "device" for adapter in engine.stats().adapters)
    engine.close()


def test_cached_needs_memory_for_all() -> None:
    num_bytes = sum(
        block_bytes(slab_layout(spec, SHAPE), SHAPE, torch.float32) for spec in (COLD[0], COLD[2])
    )
    num_pages = num_bytes // page_bytes(SHAPE, 16, torch.float32) + 2
    engine = interpreted(cold_start=ColdStart.CACHED, num_pages=num_pages)
    engine.add_adapter(COLD[0])
    with pytest.raises(CapacityError, match="--cold-start cached needs"):
        engine.add_adapter(COLD[2])
    assert len(run_to_end(engine)) == 0
    engine.close()


def test_an_adapter_too_large_for_the_hosts_memory_passes_through() -> None:
    expected = text(ColdStart.OVERLAP, COLD[:1])
    engine = interpreted(cold_start=ColdStart.PIPELINED, host_bytes=4096)
    engine.add_adapter(COLD[0])
    engine.add_request(greedy(COLD[0].version, COLD[0].version))
    done = run_to_end(engine)
    assert {name: found.token_ids for name, found in done.items()} == expected
    assert engine.stats().host_adapter_bytes == 0
    engine.close()


def test_a_request_cancelled_during_the_read_leaves_nothing_held() -> None:
    disk = SlowDisk()
    engine = interpreted(cold_start=ColdStart.PIPELINED, read=disk)
    engine.add_adapter(COLD[0])
    engine.add_request(greedy("a", COLD[0].version))
    engine.step()
    assert disk.begun.wait(60)
    engine.cancel("a")
    engine.remove_adapter(COLD[0].version)
    engine.take_removed_adapters()
    engine.check_integrity()
    disk.go.set()
    run_to_end(engine)
    assert engine.stats().host_adapter_bytes == 0
    assert engine.stats().device_adapter_bytes == 0
    engine.close()


class Underway:
    """Copies that are not complete before it is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.complete = False
        monkeypatch.setattr(Moment, "passed", property(lambda moment: self.complete))


def test_while_copies_are_under_way_everything_they_touch_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spec = staged(ColdStart.PIPELINED)
    underway = Underway(monkeypatch)
    engine.add_request(greedy("a", spec.version, tokens=1))
    engine.add_request(greedy("b", spec.version, tokens=1))
    while engine.stats().num_running + engine.stats().num_waiting > 0:
        engine.step()
    (stats,) = engine.stats().adapters
    assert (stats.tier, stats.in_flight) == ("loading", 0)
    engine.check_integrity()
    assert engine.has_work(), "nobody would learn of its end"
    engine.remove_adapter(spec.version)
    engine.take_removed_adapters()
    engine.step()
    engine.check_integrity()
    assert engine.stats().device_adapter_bytes > 0, "memory that is being written to was given away"
    underway.complete = True
    run_to_end(engine)
    assert engine.stats().device_adapter_bytes == engine.stats().host_adapter_bytes == 0
    engine.close()


def test_a_request_cancelled_during_the_copy_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spec = staged(ColdStart.PIPELINED)
    underway = Underway(monkeypatch)
    engine.add_request(greedy("a", spec.version, tokens=5))
    engine.step()
    engine.cancel("a")
    engine.check_integrity()
    underway.complete = True
    run_to_end(engine)
    (stats,) = engine.stats().adapters
    assert (stats.tier, stats.in_flight) == ("device", 0)
    engine.add_request(greedy("again", spec.version))
    assert len(run_to_end(engine)["again"].token_ids) == 2
    engine.close()


def test_what_a_step_was_told_is_kept_until_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flight is kept here either, as in the processes of other shards."""
    told = []
    fill = StepRunner._fill

    def noted(runner, *args):
        block = fill(runner, *args)
        told.append(weakref.ref(block))
        return block

    monkeypatch.setattr(StepRunner, "_fill", noted)
    engine = interpreted(cold_start=ColdStart.OVERLAP)
    underway = Underway(monkeypatch)
    engine.add_request(greedy("a", tokens=3))
    run_to_end(engine)
    assert len(told) == 3
    assert all(block() is not None for block in told)
    underway.complete = True
    engine.add_request(greedy("b", tokens=2))
    run_to_end(engine)
    assert not any(block() for block in told[:3])
    engine.close()


def test_a_step_of_single_tokens_waits_for_the_whole_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, spec = staged(ColdStart.PIPELINED)
    underway = Underway(monkeypatch)
    held_back = []
    monkeypatch.setattr(Moment, "hold_back", lambda moment: held_back.append(moment))
    engine.add_request(greedy("a", spec.version, prompt=1, tokens=1))
    engine.step()
    assert len(held_back) == 1
    underway.complete = True
    run_to_end(engine)
    engine.close()


def test_without_memory_on_the_host_only_those_who_need_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = interpreted(cold_start=ColdStart.PIPELINED)
    engine.add_adapter(COLD[0])
    engine.add_request(greedy("base", tokens=3))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    engine.add_request(greedy("cold", COLD[0].version))
    done = run_to_end(engine)
    assert "lower --host-adapter-memory" in (done["cold"].error or "")
    assert len(done["base"].token_ids) == 3
    assert engine.stats().host_adapter_bytes == 0
    monkeypatch.undo()
    engine.add_request(greedy("again", COLD[0].version))
    assert len(run_to_end(engine)["again"].token_ids) == 2
    engine.close()
