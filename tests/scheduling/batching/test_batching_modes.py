"""Whatever the batching policy: every request runs to its end, and nothing leaks."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core.batching import Batching, DelayBound
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.core.shape import ModelShape
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.drift import DriftWatch
from loraplex.perf.line import Line
from loraplex.perf.subject import Subject, shape_key
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.batching.credits import CreditLimits
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.memory import Memory, SeparateMemory
from loraplex.scheduling.plan import BlockCopy, StepPlan
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.work import StepWork

BLOCK = 4
UNIT = 256
SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position=64,
)
GUESSED = default_cost_model(
    Subject(machine="one", device="cpu", model=shape_key(SHAPE), dtype="float32", num_layers=2),
    SHAPE,
    num_cores=2,
)
LORA_S = 0.1
COSTS = replace(
    GUESSED,
    merge=Line(latency_s=1e-4, unit_s=0.0),
    step=replace(GUESSED.step, terms=replace(GUESSED.step.terms, lora_s=LORA_S)),
)
"""Costs by which adapters take longer than anything else in a step, so that merging gains much."""
CREDITS = CreditLimits(initial=0.5, normal=0.505, starving=0.52)
"""An adapter that merges may displace four requests, and one starves after ten merged steps."""
ROOMY = DelayBound(share=0.0, seconds=10.0)
MODES = list(Batching)


class Bench:
    """An engine without a model: tokens are made up, loads end when the test says so."""

    def __init__(
        self,
        seed: int,
        batching: Batching,
        *,
        shared: bool,
        max_running: int = 4,
        max_delay: DelayBound | None = None,
        num_blocks: int = 24,
    ) -> None:
        self.random = random.Random(seed)
        swaps = HostKV(12, 8 * UNIT) if self.random.random() < 0.5 else None
        self.memory: Memory = (
            Arena(num_pages=16, page_bytes=8 * UNIT, block_size=BLOCK, host_kv=swaps)
            if shared
            else SeparateMemory(num_blocks=num_blocks, block_size=BLOCK, adapter_bytes=24 * UNIT)
        )
        config = SchedulerConfig(
            max_model_len=48,
            work=StepWork(max_tokens=16),
            max_running=max_running,
            batching=batching,
            max_delay=max_delay or DelayBound(share=0.25, seconds=self.random.choice([0.0, 0.01, 10.0])),
            credits=CREDITS,
        )
        self.scheduler = Scheduler(config, self.memory, DriftWatch(COSTS))
        self.ahead = self.random.randint(0, 1)
        self.flights: deque[StepPlan] = deque()
        self.loading: list[str] = []
        self.versions = list("abcdef")
        for version in self.versions:
            self.register(version)
        self.ended: set[str] = set()
        self.num_added = 0
        self.merged: str | None = None
        self.num_dropped = 0  # merged weights that were given back
        self.modes: set[str | None] = set()
        self.copies: list[tuple[BlockCopy, bool]] = []
        self.num_seats = 2 * max_running

    def register(self, version: str) -> None:
        self.scheduler.adapters.add(version, UNIT * self.random.randint(1, 4))
        self.scheduler.batcher.merged.know(version, 6 * UNIT)

    def add(self, adapter: str | None, num_output: int | None = None) -> str:
        request_id, self.num_added = str(self.num_added), self.num_added + 1
        tokens = [self.random.randrange(90) for _ in range(self.random.randint(1, 20))]
        params = SamplingParams(max_tokens=num_output or self.random.randint(1, 12), ignore_eos=True)
        self.scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tokens,
                params=params,
                adapter=adapter,
                eos_token_ids=(0,),
            )
        )
        return request_id

    def step(self) -> StepPlan:
        while self.loading and self.random.random() < 0.7:
            self.scheduler.adapter_loaded(self.loading.pop(0))
        while self.copies and self.random.random() < 0.6:
            copy, out = self.copies.pop(self.random.randrange(len(self.copies)))
            self.scheduler.swap_ended([copy], out=out)
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.copies += [(copy, True) for copy in plan.swap_outs]
        self.copies += [(copy, False) for copy in plan.swap_ins]
        assert len(self.scheduler._running) <= self.num_seats
        self.loading += [load.version for load in plan.adapter_loads]
        if plan.drops_merged:
            self.merged = None
            self.num_dropped += 1
        if plan.merge is not None:
            self.merged = plan.merge
        if plan.merged is not None:
            assert plan.merged == self.merged, "a step on weights that were not written"
            assert {chunk.adapter for chunk in plan.chunks} == {plan.merged}
        self.modes.add(plan.merged)
        if plan.chunks:
            self.flights.append(plan)
        while len(self.flights) > (self.ahead if plan.chunks else 0):
            self.land()
        assert self.scheduler.take_failures() == [], "there is memory for every request"
        return plan

    def land(self) -> None:
        plan = self.flights.popleft()
        sampled = {c.request_id: self.random.randint(0, 20) for c in plan.chunks if c.samples}
        for update in self.scheduler.update(plan, sampled):
            if update.finish_reason is not None:
                self.ended.add(update.request_id)
        self.scheduler.check_integrity()

    def run_all(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work() and not self.flights:
                return
            self.step()
        raise AssertionError(f"{self.scheduler.request_ids} are still there")

    def check_nothing_is_left(self) -> None:
        while self.copies:
            copy, out = self.copies.pop()
            self.scheduler.swap_ended([copy], out=out)
        pool, table = self.memory.pool, self.memory.table
        assert pool.num_free == pool.num_blocks
        assert len(table.serving.idle) == len(table.serving.resident)


@settings(max_examples=examples(30, 60), deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    batching=st.sampled_from(MODES),
    shared=st.booleans(),
    skew=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_every_request_ends_and_nothing_is_left(
    seed: int, batching: Batching, shared: bool, skew: float
) -> None:
    bench = Bench(seed, batching, shared=shared)
    rng = bench.random
    for _ in range(rng.randint(1, 40)):
        for _ in range(rng.choice([0, 0, 1, 4])):
            bench.add("a" if rng.random() < skew else rng.choice([None, *bench.versions]))
        bench.step()
        if rng.random() < 0.1 and bench.scheduler.request_ids:
            cancelled = rng.choice(sorted(bench.scheduler.request_ids))
            bench.scheduler.cancel(cancelled)
            bench.ended.add(cancelled)
            bench.scheduler.check_integrity()
    bench.run_all()
    assert bench.ended == set(map(str, range(bench.num_added)))
    bench.check_nothing_is_left()


@pytest.mark.parametrize("batching", [mode for mode in MODES if mode.merges])
def test_an_engine_with_requests_for_one_adapter_merges_it(batching: Batching) -> None:
    bench = Bench(1, batching, shared=False)
    for _ in range(12):
        bench.add("a")
    bench.run_all()
    assert "a" in bench.modes
    stats = bench.scheduler.stats(0)
    assert stats.num_merges == 1
    assert stats.num_merged_steps > 0


@pytest.mark.parametrize("batching", [mode for mode in MODES if not mode.merges])
def test_the_other_policies_never_merge(batching: Batching) -> None:
    bench = Bench(1, batching, shared=False)
    for _ in range(12):
        bench.add("a")
    bench.run_all()
    assert bench.modes == {None}


def test_merged_only_runs_the_adapter_of_the_oldest_request_alone() -> None:
    bench = Bench(3, Batching.MERGED, shared=False)
    bench.ahead = 0
    adapter_of = {bench.add(adapter): adapter for adapter in "abcabc"}
    while not bench.memory.table.serving.resident >= set("abc"):
        bench.step()
    num_merged = 0
    while bench.scheduler.has_work():
        oldest = adapter_of[min(bench.scheduler.request_ids, key=int)]
        plan = bench.step()
        if plan.chunks:
            assert plan.merged == oldest
            num_merged += 1
    assert num_merged > 3
    bench.check_nothing_is_left()


def test_a_request_that_finds_the_engine_idle_runs_on_what_is_merged_at_once() -> None:
    bench = Bench(2, Batching.MERGED, shared=False)
    for _ in range(2):
        bench.add("a")
        bench.run_all()
    bench.add("a")
    assert bench.step().merged == "a"
    bench.run_all()
    assert bench.scheduler.stats(0).num_merges == 1


def test_a_paused_request_keeps_its_keys_and_values_and_goes_on() -> None:
    bench = Bench(5, Batching.MERGED, shared=False)
    bench.ahead = 0
    first = bench.add("a", num_output=40)
    while not any(chunk.request_id == first for chunk in bench.step().chunks):
        pass
    running = next(each for each in bench.scheduler._running if each.request_id == first)
    held = list(running.block_ids)
    running.arrival = 100  # a request on another adapter is older now
    bench.add("b")
    plan = bench.step()
    while plan.merged != "b":
        plan = bench.step()
    assert running in bench.scheduler._running
    assert running.block_ids[: len(held)] == held
    assert bench.scheduler.stats(0).num_pauses > 0
    bench.run_all()
    assert bench.scheduler.stats(0).num_preemptions == 0


def test_auto_pauses_others_while_one_adapter_is_merged() -> None:
    bench = Bench(1, Batching.AUTO, shared=False, max_delay=ROOMY)
    for adapter in "aaab":
        bench.add(adapter, num_output=25)
    bench.run_all()
    stats = bench.scheduler.stats(0)
    assert stats.num_merged_steps > 0
    assert stats.num_pauses > 0
    assert bench.ended == set("0123")


def test_an_adapter_that_waited_for_long_runs_first_under_dynamic() -> None:
    bench = Bench(1, Batching.DYNAMIC, shared=False, num_blocks=100)
    bench.ahead = 0
    for adapter in "ab" + "a" * 30:
        bench.add(adapter, num_output=25)
    num_first = 0
    while bench.scheduler.has_work():
        plan = bench.step()
        if bench.scheduler.batcher.batch.first and plan.chunks:
            assert bench.scheduler.batcher.batch.first == {"b"}
            assert "b" in {chunk.adapter for chunk in plan.chunks}
            num_first += 1
    assert num_first > 0, "nothing starved"
    assert bench.scheduler.stats(0).num_pauses > 0


@pytest.mark.parametrize("shared", [False, True])
def test_an_adapter_that_is_removed_while_merged_is_forgotten(shared: bool) -> None:
    bench = Bench(7, Batching.AUTO, shared=shared)
    for _ in range(8):
        bench.add("a")
    while bench.merged != "a":
        bench.step()
    bench.scheduler.adapters.remove("a")
    bench.run_all()
    assert bench.scheduler.take_removed_adapters() == ["a"]
    assert bench.scheduler.batcher.merged.version is None
    assert bench.memory.merged_bytes == 0
    bench.register("a")
    bench.add("a")
    bench.run_all()
    bench.scheduler.check_integrity()


def test_merged_weights_give_way_to_requests_that_need_their_memory() -> None:
    bench = Bench(9, Batching.AUTO, shared=True)
    for _ in range(8):
        bench.add("a")
    while bench.merged != "a":
        bench.step()
    for _ in range(30):
        bench.add(bench.random.choice("bcdef"))
    while not bench.num_dropped:
        bench.step()
    assert bench.memory.merged_bytes == 0
    bench.run_all()
    assert bench.ended == set(map(str, range(bench.num_added)))


def test_a_buffer_that_does_not_fit_leaves_requests_unmerged() -> None:
    bench = Bench(11, Batching.MERGED, shared=False)
    for version in bench.versions:
        bench.scheduler.batcher.merged.know(version, 1000 * UNIT)
    for adapter in "aabb":
        bench.add(adapter)
    bench.run_all()
    assert bench.modes == {None}
    assert bench.memory.merged_bytes == 0


def test_nobody_pays_for_merged_steps_that_find_no_memory() -> None:
    bench = Bench(2, Batching.DYNAMIC, shared=False, max_running=8)
    refused = []
    held = bench.memory.take_merged
    bench.memory.take_merged = lambda num_bytes: refused.append(num_bytes) or held(1 << 30)  # type: ignore[method-assign, func-returns-value]
    for adapter in "aaaaaaabaaaaaa":
        bench.add(adapter, num_output=12)
    bench.run_all()
    assert refused, "an adapter was to be merged"
    stats = bench.scheduler.stats(0)
    assert (stats.num_merged_steps, stats.num_pauses, stats.owed_credit_s) == (0, 0, 0)
