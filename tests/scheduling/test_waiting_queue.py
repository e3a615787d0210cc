"""The waiting queue: the decisions of a plain queue that looks at everybody, without looking at everybody."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from itertools import islice

import pytest
from examples import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.adapter_pins import AdapterPins
from loraplex.scheduling.admission import Admission
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import Memory, SeparateMemory
from loraplex.scheduling.memory_pressure import MemoryPressure
from loraplex.scheduling.plan import Chunk, StepPlan
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.waiting_queue import WaitingQueue
from loraplex.scheduling.work import StepWork

PAGE = 4096


# ---- the plain rule: every step takes every waiting request up and puts it back


class PlainQueue(WaitingQueue):
    """A deque, and answers that are found by going through it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: deque[RequestState] = deque()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self.requests)

    def __contains__(self, request: object) -> bool:
        return request in self.requests

    def append(self, request: RequestState) -> None:
        self.requests.append(request)

    def append_front(self, request: RequestState) -> None:
        self.requests.appendleft(request)

    def remove(self, request: RequestState) -> None:
        self.requests.remove(request)

    def set_pinned(self, request: RequestState, *, pinned: bool) -> None:
        request.pinned = pinned

    def first(self, count: int) -> Iterator[RequestState]:
        return islice(self.requests, count)

    @property
    def versions(self):  # type: ignore[no-untyped-def]
        return {request.adapter: None for request in self.requests}.keys()

    def check_integrity(self) -> None:
        pass


class PlainPins(AdapterPins):
    def unpin_youngest(self, waiting: WaitingQueue, behind: RequestState | None = None) -> bool:
        if not self._memory.shared:
            return False
        for sequence in reversed(list(waiting)):
            if sequence is behind:
                return False
            version = sequence.adapter
            if sequence.pinned and version is not None and version in self._table.serving.resident:
                self._table.unpin(version)
                sequence.pinned = False
                return True
        return False

    def only_reads(self, waiting: WaitingQueue) -> bool:
        return all(
            sequence.adapter is not None and not sequence.pinned and self._awaits_read(sequence.adapter)
            for sequence in waiting
        )

    def _awaits_read(self, version: str) -> bool:
        table = self._table
        if not table.is_absent(version):
            return False
        return not table.can_load(version) and (table.host.num_loading >= 2 or version in table.host.loading)


class PlainAdmission(Admission):
    def admit(self, chunks: list[Chunk], budget: float, preempted: list[RequestState]) -> None:
        waiting = self._waiting.requests  # type: ignore[attr-defined]
        passed_over: list[RequestState] = []
        self._pins.short = None
        while waiting and budget >= 1 and len(self._running) < self._config.max_running:
            sequence = waiting.popleft()
            if not self._pins.is_ready(sequence) or sequence.num_unknown > 0:
                passed_over.append(sequence)
                if self._memory.shared and sequence is self._pins.refused:
                    break
                continue
            if self._pins.is_arriving(sequence) and not self._adapters.may_join(sequence, chunks):
                passed_over.append(sequence)
                continue
            if not self._slots.has_room_for(sequence.adapter):
                passed_over.append(sequence)
                continue
            num_promised = sum(map(self._promised_blocks, self._running))
            num_tokens = self._start(sequence, budget, num_promised)
            if num_tokens == 0:
                passed_over.append(sequence)
                self._pins.short = sequence
                break
            self._queues.run(sequence)
            chunks.append(sequence.next_chunk(num_tokens))
            budget -= self._config.work.cost(sequence.num_computed, num_tokens)
        waiting.extendleft(reversed(passed_over))


class PlainScheduler(Scheduler):
    def __init__(self, config: SchedulerConfig, memory: Memory) -> None:
        super().__init__(config, memory)
        self._waiting = self._queues.waiting = PlainQueue()
        self._pins = self.adapters.pins = PlainPins(
            memory, prefetch_depth=config.prefetch_depth, step_tokens=config.work.max_tokens
        )
        self.adapters.choose_cold_start(config.cold_start)
        self._pressure = MemoryPressure(memory, self.batcher, self._pins, self._queues, None)
        self._admission = PlainAdmission(
            config,
            memory,
            self.batcher,
            self.adapters,
            self._queues,
            self._pressure,
            None,
            self._borrowing,
        )


# ---- both of them under the same traffic

ENGINES = st.fixed_dictionaries(
    {
        "memory": st.sampled_from(["separate", "arena", "staged arena"]),
        "num_pages": st.integers(13, 40),
        "max_running": st.integers(1, 8),
        "prefetch_depth": st.integers(1, 8),
        "max_tokens": st.sampled_from([4, 16, 64]),
        "cold_start": st.sampled_from([ColdStart.OVERLAP, ColdStart.ON_DEMAND, ColdStart.PIPELINED]),
        "prompts_first": st.booleans(),
        "max_adapters": st.sampled_from([None, 1, 2]),
        "ahead": st.integers(0, 1),
        "tenant": st.sampled_from(["", "acme"]),
    }
)
QUICK = settings(
    max_examples=examples(25, 80), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
SIZES = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 5, "too large to stage": 6}


def memory_of(engine: dict[str, object]) -> Memory:
    num_pages = engine["num_pages"]
    assert isinstance(num_pages, int)
    if engine["memory"] == "separate":
        return SeparateMemory(num_blocks=num_pages, block_size=4, adapter_bytes=7 * PAGE)
    host_bytes = 5 * PAGE if engine["memory"] == "staged arena" else 0
    return Arena(num_pages=num_pages, page_bytes=PAGE, block_size=4, host_bytes=host_bytes)


def scheduler_of(kind: type[Scheduler], engine: dict[str, object]) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=24,
        work=StepWork(max_tokens=engine["max_tokens"]),  # type: ignore[arg-type]
        **{  # type: ignore[arg-type]
            name: engine[name]
            for name in ("max_running", "prefetch_depth", "cold_start", "prompts_first", "max_adapters")
        },
    )
    scheduler = kind(config, memory_of(engine))
    for version, size in SIZES.items():
        scheduler.adapters.add(version, size * PAGE)
    return scheduler


class Traffic:
    """Random events, each given to both schedulers, whose plans have to be equal."""

    def __init__(self, engine: dict[str, object], seed: int) -> None:
        self.rng = random.Random(seed)
        self.both = [scheduler_of(Scheduler, engine), scheduler_of(PlainScheduler, engine)]
        self.ahead = engine["ahead"]
        self.tenant = str(engine.get("tenant", ""))
        self.under_way: deque[StepPlan] = deque()
        self.reading: list[str] = []
        self.loading: list[str] = []
        self.num_asked = 0
        self.seen: set[str] = set()

    def act(self) -> None:
        self.rng.choices(
            [self.ask, self.step, self.end_read, self.end_load, self.cancel], weights=[6, 8, 2, 3, 1]
        )[0]()
        one, other = self.both
        one.check_integrity()
        assert [s.request_id for s in one._waiting] == [s.request_id for s in other._waiting]
        assert [s.pinned for s in one._waiting] == [s.pinned for s in other._waiting]
        assert one._pins.only_reads(one._waiting) == other._pins.only_reads(other._waiting)
        assert one.take_failures() == other.take_failures()

    def ask(self) -> None:
        self.num_asked += 1
        request = EngineRequest(
            request_id=f"r{self.num_asked}",
            prompt_token_ids=[self.rng.randrange(2) for _ in range(self.rng.randint(1, 12))],
            params=SamplingParams(max_tokens=self.rng.randint(1, 8), ignore_eos=True),
            adapter=self.rng.choice([None, None, *SIZES]),
            tenant=self.tenant,
        )
        for scheduler in self.both:
            scheduler.add(request)

    def step(self) -> None:
        plan, same = [scheduler.schedule() for scheduler in self.both]
        assert plan == same
        self.reading += [read.version for read in plan.adapter_reads]
        self.loading += [load.version for load in plan.adapter_loads]
        if plan.chunks:
            self.under_way.append(plan)
        self.seen |= {name for name in ("chunks", "preempted", "adapter_evictions") if getattr(plan, name)}
        while len(self.under_way) > (self.ahead if plan.chunks else 0):
            landed = self.under_way.popleft()
            tokens = {c.request_id: 7 for c in landed.chunks if c.samples}
            one, other = [scheduler.update(landed, tokens) for scheduler in self.both]
            assert one == other

    def end_read(self) -> None:
        if self.reading:
            version = self.reading.pop(self.rng.randrange(len(self.reading)))
            error = "its file is gone" if self.rng.random() < 0.1 else None
            for scheduler in self.both:
                scheduler.adapter_read(version, error)

    def end_load(self) -> None:
        if self.loading:
            version = self.loading.pop(0)
            fails = self.rng.random() < 0.1
            for scheduler in self.both:
                if fails:
                    scheduler.adapter_failed(version, "its file is gone")
                else:
                    scheduler.adapter_loaded(version)

    def cancel(self) -> None:
        ids = sorted(self.both[0].request_ids)
        if ids:
            request_id = self.rng.choice(ids)
            for scheduler in self.both:
                scheduler.cancel(request_id)


@QUICK
@given(engine=ENGINES, seed=st.integers(0, 1_000_000))
def test_decisions_are_those_of_a_queue_that_looks_at_every_request(
    engine: dict[str, object], seed: int
) -> None:
    traffic = Traffic(engine, seed)
    for _ in range(150):
        traffic.act()


def test_the_random_traffic_reaches_preemptions_and_evictions() -> None:
    engine: dict[str, object] = {
        "memory": "staged arena",
        "num_pages": 13,
        "max_running": 8,
        "prefetch_depth": 8,
        "max_tokens": 64,
        "cold_start": ColdStart.OVERLAP,
        "prompts_first": False,
        "max_adapters": None,
        "ahead": 1,
    }
    traffic = Traffic(engine, seed=1)
    for _ in range(1000):
        traffic.act()
    assert traffic.seen == {"chunks", "preempted", "adapter_evictions"}


# ---- how many of those who wait are looked at


class Watched(RequestState):
    """Counts how often it is asked whether its adapter is pinned, which everybody asks first."""

    num_looks = 0
    __slots__ = ("_is_pinned",)

    @property
    def pinned(self) -> bool:  # type: ignore[override]
        Watched.num_looks += 1
        return self._is_pinned

    @pinned.setter
    def pinned(self, value: bool) -> None:
        self._is_pinned = value


def crowd(
    monkeypatch: pytest.MonkeyPatch, num_cold: int, *, cold_start: ColdStart = ColdStart.OVERLAP
) -> Scheduler:
    """A request that decodes, and as many as wanted that wait for an adapter each, of which two are being
    read and none ever comes."""
    monkeypatch.setattr("loraplex.scheduling.scheduler.RequestState", Watched)
    arena = Arena(num_pages=100, page_bytes=PAGE, block_size=4, host_bytes=50 * PAGE)
    config = SchedulerConfig(max_model_len=100, cold_start=cold_start, prefetch_depth=16)
    scheduler = Scheduler(config, arena)
    ask(scheduler, "runs", None)
    step(scheduler)
    for number in range(num_cold):
        scheduler.adapters.add(f"v{number}", PAGE)
        ask(scheduler, f"r{number}", f"v{number}")
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, num_cold)
    return scheduler


def ask(scheduler: Scheduler, request_id: str, adapter: str | None) -> None:
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    scheduler.add(
        EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], params=params, adapter=adapter)
    )


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    scheduler.update(plan, {chunk.request_id: 5 for chunk in plan.chunks})
    return plan


@pytest.mark.parametrize("cold_start", [ColdStart.OVERLAP, ColdStart.ON_DEMAND])
def test_a_step_looks_at_no_more_requests_when_more_of_them_wait(
    monkeypatch: pytest.MonkeyPatch, cold_start: ColdStart
) -> None:
    looks = []
    for num_cold in (100, 4000):
        scheduler = crowd(monkeypatch, num_cold, cold_start=cold_start)
        Watched.num_looks = 0
        for _ in range(10):
            step(scheduler)
        looks.append(Watched.num_looks)
    assert 0 < looks[0] <= 10 * (16 + 1), "more than the prefetch depth and who runs were looked at"
    assert looks[1] == looks[0]


def test_a_request_that_is_cancelled_has_no_other_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = crowd(monkeypatch, 1000)
    Watched.num_looks = 0
    for number in (999, 500, 0, 7):
        scheduler.cancel(f"r{number}")
    assert Watched.num_looks <= 4 * 3
    assert scheduler.num_waiting == 996
    scheduler.check_integrity()


def test_a_read_that_fails_looks_only_at_the_requests_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = crowd(monkeypatch, 1000)
    ask(scheduler, "second on v0", "v0")
    Watched.num_looks = 0
    scheduler.adapter_read("v0", "its file is gone")
    assert [failure.request_id for failure in scheduler.take_failures()] == ["r0", "second on v0"]
    assert Watched.num_looks <= 2 * 4
    scheduler.check_integrity()
