"""Layers of adapters that are on their way, computed by real CPU workers; GPU kernels are interpreted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from cuda_engines import greedy, interpreted
from driving import run_to_end

from loraplex.bench.random_engine import random_specs
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.core import Engine
from loraplex.engine.cuda.adapter_store import cuts_of
from loraplex.engine.cuda.cpu_assist import AssistedStep, CpuAssist
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.streams import Moment

pytestmark = pytest.mark.slow

SPECS = [
    *random_specs("q", "tiny", num_adapters=1, ranks=[5], modules="q"),
    *random_specs("many", "tiny", num_adapters=1, ranks=[8], modules="q,v,down"),
]


class Spy:
    """What the workers were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_products = 0
        self.before_first: Callable[[], None] = lambda: None
        send = CpuAssist.send

        def counted(assist: CpuAssist, *args: object) -> int | None:
            if self.num_products == 0:
                self.before_first()
            self.num_products += 1
            return send(assist, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(CpuAssist, "send", counted)
        # Without a device every copy is complete at once; here no layer is, before its turn is over.
        monkeypatch.setattr(AssistedStep, "_is_there", lambda step, layer: layer >= step.rows.num_layers)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def engine_of(cold_start: ColdStart) -> Engine:
    engine = interpreted(cold_start=cold_start, cpu_workers=int(cold_start is ColdStart.CPU_ASSIST))
    for spec in SPECS:
        engine.add_adapter(spec)
        engine.stage_adapter(spec.version)
    run_to_end(engine)
    if cold_start is ColdStart.CPU_ASSIST:
        assert pool_of(engine).wait_ready(60) == 1
    return engine


def pool_of(engine: Engine) -> AssistPool:
    pool: AssistPool = engine._executor._assist._pool  # type: ignore[attr-defined]
    return pool


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    engine = engine_of(ColdStart.OVERLAP)
    found = texts(engine)
    engine.close()
    return found


@pytest.fixture
def assisted(spy: Spy) -> Iterator[Engine]:
    engine = engine_of(ColdStart.CPU_ASSIST)
    yield engine
    engine.close()


def add_all(engine: Engine) -> None:
    for spec in SPECS:
        engine.add_request(greedy(spec.version, spec.version))
    engine.add_request(greedy("base"))


def texts(engine: Engine) -> dict[str, list[int]]:
    add_all(engine)
    return {name: found.token_ids for name, found in run_to_end(engine).items()}


def test_texts_are_those_of_the_device(assisted: Engine, spy: Spy, expected: dict[str, list[int]]) -> None:
    assert texts(assisted) == expected
    # Groups of linears in the first layer: one of the first adapter, and two of the second.
    assert spy.num_products == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_is_not_noticed(
    assisted: Engine, spy: Spy, expected: dict[str, list[int]], how: signal.Signals
) -> None:
    (pid,) = pool_of(assisted).pids.values()
    spy.before_first = lambda: os.kill(pid, how)
    assert texts(assisted) == expected
    assert spy.num_products == 3
    assert pool_of(assisted).wait_ready(60) == 1
    assert pid not in pool_of(assisted).pids.values()


def test_what_workers_have_no_time_for_is_done_on_the_device(
    assisted: Engine, spy: Spy, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pool: AssistPool, task: object) -> int:
        raise CapacityError("too many tasks")

    monkeypatch.setattr(AssistPool, "submit", full)
    assert texts(assisted) == expected
    assert spy.num_products == 3


def test_the_hosts_copy_is_held_until_the_step_that_workers_help_with_is_over(
    assisted: Engine, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, is_over = assisted._executor._assisted_steps, False  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Moment,
        "passed",
        property(lambda moment: is_over or all(moment is not each for each in steps.values())),
    )
    version = SPECS[0].version
    assisted.add_request(greedy("a", version, tokens=1))
    while assisted.stats().num_running + assisted.stats().num_waiting > 0:
        assisted.step()
    assert spy.num_products > 0
    assisted.remove_adapter(version)
    assisted.take_removed_adapters()
    held = assisted.stats().host_adapter_bytes
    for _ in range(3):
        assisted.step()
    assert assisted.stats().host_adapter_bytes == held
    is_over = True
    run_to_end(assisted)
    assert assisted.stats().host_adapter_bytes < held


def test_a_decoding_row_waits_for_the_adapter_that_workers_help_a_prompt_with(
    assisted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, runs = StepRunner.run, list[tuple[object, int]]()

    def noted(runner, built, seats, copies=None, rows=()):
        runs.append((copies, len(rows)))
        return run(runner, built, seats, copies, rows)

    monkeypatch.setattr(StepRunner, "run", noted)
    version = SPECS[0].version
    assisted.add_request(greedy("one", version, prompt=1, tokens=1))
    assisted.add_request(greedy("many", version, tokens=1))
    run_to_end(assisted)
    copies, num_assisted = runs[0]
    assert num_assisted == 1
    assert copies is not None


def test_an_engine_that_cannot_be_built_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(**options: object) -> AssistPool:
        raise CapacityError("no shared memory is left")

    monkeypatch.setattr("loraplex.engine.cuda.cpu_assist.AssistPool", exhausted)

    threads, open_files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match="shared memory"):
        interpreted(cold_start=ColdStart.CPU_ASSIST, cpu_workers=1, read=None)
    for thread in set(threading.enumerate()) - threads:  # told to end, and nobody waited for them
        thread.join(60)
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_layers_are_copied_in_groups_and_those_that_workers_compute_last() -> None:
    ends = [10, 30, 60, 100, 150]  # a table and four layers
    planned: list[list[int]] = []

    def plan_groups(layer_bytes: Sequence[int]) -> Sequence[int]:
        planned.append(list(layer_bytes))
        return [1, len(layer_bytes) - 1]

    def cuts(assisted_layers: int) -> list[tuple[int, int, list[int]]]:
        found = cuts_of(ends, assisted_layers, plan_groups)
        return [(cut.begin, cut.end, list(cut.parts)) for cut in found]

    assert cuts(0) == [(0, 10, [0]), (10, 30, [1]), (30, 150, [2, 3, 4])]
    assert cuts(2) == [(0, 10, [0]), (60, 100, [3]), (100, 150, [4]), (10, 60, [1, 2])]
    assert planned == [[20, 30, 40, 50], [40, 50]]


def logprobs(cold_start: ColdStart) -> list[float]:
    """Of the likeliest tokens after one prompt, on an adapter that is not on the device."""
    engine = engine_of(cold_start)
    request = greedy("a", SPECS[1].version, tokens=2)
    engine.add_request(replace(request, params=replace(request.params, logprobs=5)))
    found = run_to_end(engine)["a"].logprobs
    engine.close()
    return [value for at in found for _, value in (*at.top, (0, at.logprob))]


def test_every_way_to_start_has_the_same_logits(spy: Spy) -> None:
    warm = logprobs(ColdStart.CACHED)
    for same in (ColdStart.ON_DEMAND, ColdStart.OVERLAP, ColdStart.PIPELINED, ColdStart.AUTO):
        assert logprobs(same) == warm
    assert logprobs(ColdStart.CPU_ASSIST) == pytest.approx(warm, abs=1e-5)
    assert spy.num_products == 2


def test_without_workers_nothing_is_assisted(spy: Spy, expected: dict[str, list[int]]) -> None:
    engine = interpreted(cold_start=ColdStart.CPU_ASSIST, cpu_workers=0)
    for spec in SPECS:
        engine.add_adapter(spec)
    assert texts(engine) == expected
    assert spy.num_products == 0
    engine.close()
