"""Layers of adapters that are on their way, computed by real CPU workers; GPU kernels are interpreted."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from cuda_engines import RunAgain, greedy, interpreted
from driving import run_to_end

from loraplex.bench.random_engine import random_specs
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.engine.assist.crew import Patience
from loraplex.engine.assist.pool import AssistPool
from loraplex.engine.core import Engine
from loraplex.engine.cuda.adapter_store import cuts_of
from loraplex.engine.cuda.bus import Bus, Copy
from loraplex.engine.cuda.cpu_assist import AssistedSpan, AssistedTasks, CpuAssist
from loraplex.engine.cuda.executor import CudaExecutor
from loraplex.engine.cuda.step_runner import StepRunner
from loraplex.engine.cuda.streams import Moment
from loraplex.engine.executor import LoadOrder
from loraplex.perf.layer_pipeline import AssistPlan
from loraplex.scheduling.start_policy import StartPolicy

SPECS = [
    *random_specs("q", "tiny", num_adapters=1, ranks=[5], modules="q"),
    *random_specs("many", "tiny", num_adapters=1, ranks=[8], modules="q,v,down"),
]


class Submissions:
    """The tasks that an engine submitted to its workers, and when copies go on."""

    def __init__(self) -> None:
        self.found: list[tuple[CpuAssist, AssistedTasks]] = []
        self.before_first: Callable[[], None] = lambda: None
        self.tasks_before_copies: int | None = 1
        """Number of groups of a submission that workers do before the copies that it does not wait for go on;
        None for copies that do not wait for workers."""

    @property
    def num_tasks(self) -> int:
        return sum(tasks.last_ticket - tasks.first_ticket + 1 for _, tasks in self.found)

    @property
    def num_computed(self) -> int:
        return sum(assist.num_computed(tasks) for assist, tasks in self.found)

    def may_copy(self, num_before: int) -> bool:
        """Return whether copies that were begun before that submission may be carried out."""
        if self.tasks_before_copies is None:
            return True
        if len(self.found) <= num_before:
            return False
        assist, tasks = self.found[num_before]
        ticket = tasks.first_ticket - 1 + self.tasks_before_copies * len(tasks.spans)
        return assist._pool.control.wait_done(min(ticket, tasks.last_ticket), 1)


class HeldBus(Bus):
    """Copies in a thread of their own. Tables are copied at once, layers when `submissions` says so."""

    submissions: Submissions

    def __init__(self, device: torch.device, max_bytes_per_s: float | None) -> None:
        super().__init__(device, max_bytes_per_s)
        self._carried: queue.SimpleQueue[tuple[list[Copy], int, int | None]] = queue.SimpleQueue()
        self._is_table = False
        threading.Thread(target=self._copy_all, daemon=True).start()

    def wait_for(self, moments: Iterable[Moment]) -> None:
        self._is_table = True

    def carry(self, copies: Iterable[Copy]) -> int:
        self._last += 1
        num_before = None if self._is_table else len(self.submissions.found)
        self._is_table = False
        self._carried.put((list(copies), self._last, num_before))
        return self._last

    def moment(self) -> Moment:
        return HeldMoment(self.ticket_1, self._last)

    def _copy_all(self) -> None:
        while True:
            copies, number, num_before = self._carried.get()
            while num_before is not None and not self.submissions.may_copy(num_before):
                os.sched_yield()
            for target, source in copies:
                ctypes.memmove(target, source.address, source.num_bytes)
            self.ticket_1.fill_(number)


class HeldMoment(Moment):
    """The moment when a copy is complete."""

    def __init__(self, ticket_1: torch.Tensor, number: int) -> None:
        super().__init__(torch.device("cpu"))
        self._ticket_1, self._number = ticket_1, number

    @property
    def passed(self) -> bool:
        return int(self._ticket_1) >= self._number

    def hold_back(self) -> None:
        while not self.passed:
            os.sched_yield()


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> Submissions:
    noted, submit = Submissions(), CpuAssist.submit

    def noting(assist: CpuAssist, spans: Sequence[AssistedSpan]) -> AssistedTasks | None:
        if not noted.found:
            noted.before_first()
        tasks = submit(assist, spans)
        if tasks is not None:
            noted.found.append((assist, tasks))
        return tasks

    monkeypatch.setattr(CpuAssist, "submit", noting)
    monkeypatch.setattr(HeldBus, "submissions", noted, raising=False)
    monkeypatch.setattr("loraplex.engine.cuda.adapter_store.Bus", HeldBus)
    # On a busy machine a slice may take long; copies wait for workers, who must not be taken for hung.
    monkeypatch.setattr("loraplex.engine.assist.pool.Patience", partial(Patience, slice_s=60.0))
    plan_layers(monkeypatch, 1)
    return noted


def plan_layers(monkeypatch: pytest.MonkeyPatch, num_layers: int) -> None:
    """Have workers, if any are ready, assist with so many layers: here, where nothing is copied over a bus,
    none would pay."""
    plan = AssistPlan(num_layers=num_layers)
    monkeypatch.setattr(
        StartPolicy,
        "assist_plan",
        lambda policy, *args, **options: plan if policy.assists else AssistPlan(),
    )


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
def assisted(submissions: Submissions) -> Iterator[Engine]:
    engine = engine_of(ColdStart.CPU_ASSIST)
    yield engine
    engine.close()


def texts(engine: Engine) -> dict[str, list[int]]:
    """Run one adapter after the other, each beside the base model: workers assist with one at a time."""
    found: dict[str, list[int]] = {}
    for spec in SPECS:
        engine.add_request(greedy(spec.version, spec.version))
        engine.add_request(greedy(f"base of {spec.version}"))
        found |= {name: output.token_ids for name, output in run_to_end(engine).items()}
    return found


def test_texts_are_those_of_the_device(
    assisted: Engine, submissions: Submissions, expected: dict[str, list[int]]
) -> None:
    submissions.tasks_before_copies = 2
    assert texts(assisted) == expected
    # In the first layer, one adapter touches one group of linears and the other two.
    assert submissions.num_tasks == 3
    assert submissions.num_computed == 3


@pytest.mark.parametrize(
    ("tasks_before_copies", "num_computed"),
    [
        # Everything has arrived when the first layer is reached.
        pytest.param(None, 0, marks=pytest.mark.slow),
        # The second group of the first layer has.
        pytest.param(1, 1, marks=pytest.mark.slow),
        (2, 2),  # the second layer has
        pytest.param(3, 3, marks=pytest.mark.slow),
        # Nothing has before the last task is done.
        pytest.param(4, 4, marks=pytest.mark.slow),
    ],
)
def test_each_layer_is_computed_where_its_weights_are_when_it_is_reached(
    assisted: Engine,
    submissions: Submissions,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tasks_before_copies: int | None,
    num_computed: int,
) -> None:
    plan_layers(monkeypatch, 2)
    submissions.tasks_before_copies = tasks_before_copies
    version = SPECS[1].version  # of two groups in each of two layers
    assisted.add_request(greedy(version, version))
    if tasks_before_copies is None:
        submissions.before_first = lambda: all_copied(assisted)
    assert run_to_end(assisted)[version].token_ids == expected[version]
    assert submissions.num_tasks == 4
    assert submissions.num_computed == num_computed


@pytest.mark.slow
def test_two_prompts_of_one_step_have_tasks_of_their_own(
    assisted: Engine, submissions: Submissions, expected: dict[str, list[int]]
) -> None:
    submissions.tasks_before_copies = 2
    version = SPECS[1].version
    names = version, version[::-1]  # a prompt depends on the length of its request's name
    for name in names:
        assisted.add_request(greedy(name, version))
    found = run_to_end(assisted)
    assert [found[name].token_ids for name in names] == [expected[version]] * 2
    assert len(submissions.found[0][1].spans) == 2
    assert submissions.num_computed == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is in padding rows may overflow
def test_graphs_are_replayed_with_workers_as_without(
    recorder: RunAgain, submissions: Submissions, expected: dict[str, list[int]]
) -> None:
    engine = engine_of(ColdStart.CPU_ASSIST)
    while engine.num_required > 0:
        assert engine.prepare()
    num_recorded = recorder.num_recorded
    submissions.tasks_before_copies = 2
    assert texts(engine) == expected
    assert submissions.num_computed == 3
    assert (recorder.num_recorded, recorder.num_replayed > 0) == (num_recorded, True)
    engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_workers_assist_with_no_step_that_would_run_kernel_by_kernel(
    recorder: RunAgain, submissions: Submissions, expected: dict[str, list[int]]
) -> None:
    submissions.tasks_before_copies = None
    engine = engine_of(ColdStart.CPU_ASSIST)  # no graph is captured yet
    assert texts(engine) == expected
    assert not submissions.found
    required = engine._executor._runner._graphs._required()  # type: ignore[attr-defined]
    assert any(key.sizes.assists > 0 for key in required), "one is captured before the engine is ready"
    engine.close()


@pytest.mark.slow
def test_no_layers_are_planned_for_workers_that_are_still_starting(
    submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[LoadOrder] = []
    load_adapters = CudaExecutor.load_adapters

    def noted(executor: CudaExecutor, loads: Sequence[LoadOrder]) -> None:
        orders.extend(loads)
        load_adapters(executor, loads)

    monkeypatch.setattr(CudaExecutor, "load_adapters", noted)
    monkeypatch.setattr(AssistPool, "num_workers", property(lambda pool: 0))
    submissions.tasks_before_copies = None
    engine = interpreted(cold_start=ColdStart.CPU_ASSIST, cpu_workers=1)
    for spec in SPECS:
        engine.add_adapter(spec)
        engine.stage_adapter(spec.version)
    run_to_end(engine)
    texts(engine)
    engine.close()
    assert [order.load.assisted_layers for order in orders] == [0] * len(SPECS)


def all_copied(engine: Engine) -> None:
    store = engine._executor._store  # type: ignore[attr-defined]
    store._bus.moment().hold_back()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_is_not_noticed(
    assisted: Engine, submissions: Submissions, expected: dict[str, list[int]], how: signal.Signals
) -> None:
    (pid,) = pool_of(assisted).pids.values()
    submissions.before_first = lambda: os.kill(pid, how)
    submissions.tasks_before_copies = 2
    version = SPECS[1].version
    assisted.add_request(greedy(version, version))
    assert run_to_end(assisted)[version].token_ids == expected[version]
    assert submissions.num_computed == 2
    assert pool_of(assisted).wait_ready(60) == 1
    assert pid not in pool_of(assisted).pids.values()


@pytest.mark.slow
def test_what_workers_have_no_time_for_is_done_on_the_device(
    assisted: Engine,
    submissions: Submissions,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(pool: AssistPool, records: object) -> int:
        raise CapacityError("too many tasks")

    monkeypatch.setattr(AssistPool, "submit_records", full)
    submissions.tasks_before_copies = None
    assert texts(assisted) == expected
    assert not submissions.found


@pytest.mark.slow
def test_the_hosts_copy_is_held_until_the_step_that_workers_help_with_is_over(
    assisted: Engine, submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, is_over = assisted._executor._arrivals._assisted_steps, False  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Moment,
        "passed",
        property(lambda moment: is_over or all(moment is not each for each in steps.values())),
    )
    version = SPECS[0].version
    assisted.add_request(greedy("a", version, tokens=1))
    while assisted.stats().num_running + assisted.stats().num_waiting > 0:
        assisted.step()
    assert submissions.num_computed > 0
    assisted.remove_adapter(version)
    assisted.take_removed_adapters()
    held = assisted.stats().host_adapter_bytes
    for _ in range(3):
        assisted.step()
    assert assisted.stats().host_adapter_bytes == held
    is_over = True
    run_to_end(assisted)
    assert assisted.stats().host_adapter_bytes < held


@pytest.mark.slow
def test_a_decoding_row_waits_for_the_adapter_that_workers_help_a_prompt_with(
    assisted: Engine, submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions.tasks_before_copies = None
    run, runs = StepRunner.run, list[tuple[object, int]]()

    def noted(runner, built, seats, copies, tasks):
        runs.append((copies, 0 if tasks is None else len(tasks.spans)))
        return run(runner, built, seats, copies, tasks)

    monkeypatch.setattr(StepRunner, "run", noted)
    version = SPECS[0].version
    assisted.add_request(greedy("many", version, tokens=1))
    assisted.add_request(greedy("one", version, prompt=1, tokens=1))
    run_to_end(assisted)
    copies, num_assisted = runs[0]
    assert num_assisted == 1
    assert (copies > 0).all()  # type: ignore[operator]
    assert submissions.num_computed == 0


@pytest.mark.slow
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


def answer(cold_start: ColdStart) -> tuple[list[int], list[float]]:
    """Return an answer's tokens, and the log-probabilities of the likeliest ones, on an adapter that is not
    on the device."""
    engine = engine_of(cold_start)
    request = greedy("a", SPECS[1].version, tokens=2)
    engine.add_request(replace(request, params=replace(request.params, logprobs=5)))
    found = run_to_end(engine)["a"]
    engine.close()
    return found.token_ids, [value for at in found.logprobs for _, value in (*at.top, (0, at.logprob))]


def test_every_way_to_start_has_the_same_text_and_logits(submissions: Submissions) -> None:
    submissions.tasks_before_copies = None
    warm = answer(ColdStart.CACHED)
    others = [each for each in ColdStart if each not in (ColdStart.CACHED, ColdStart.CPU_ASSIST)]
    assert [answer(each) for each in others] == [warm] * len(others)
    submissions.tasks_before_copies = 2
    token_ids, logprobs = answer(ColdStart.CPU_ASSIST)
    assert token_ids == warm[0]
    assert logprobs == pytest.approx(warm[1], abs=1e-5)
    assert submissions.num_computed == 2


@pytest.mark.slow
def test_without_workers_nothing_is_assisted(
    submissions: Submissions, expected: dict[str, list[int]]
) -> None:
    submissions.tasks_before_copies = None
    engine = interpreted(cold_start=ColdStart.CPU_ASSIST, cpu_workers=0)
    for spec in SPECS:
        engine.add_adapter(spec)
    assert texts(engine) == expected
    assert not submissions.found
    engine.close()
