"""Keys and values on the host: what is copied out and back, and that nothing is lost, mixed up or leaked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_arena import BLOCK_SIZE, PAGE, UNIT, World

from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.named_profiles import named_profiles
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import BlockCopy, StepPlan
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.work import StepWork

EOS = 2


class Bench:
    """A scheduler with a little memory of each kind; the test says when copies end."""

    def __init__(
        self,
        *,
        num_blocks: int = 8,
        num_host_blocks: int = 8,
        block_bytes: int = 100,
        costs: DriftWatch | None = None,
        max_running: int = 8,
    ) -> None:
        self.host = HostKV(num_host_blocks, block_bytes)
        memory = SeparateMemory(num_blocks=num_blocks, block_size=4, adapter_bytes=100, host_kv=self.host)
        self.pool = memory.pool
        config = SchedulerConfig(max_model_len=64, work=StepWork(max_tokens=64), max_running=max_running)
        self.scheduler = Scheduler(config, memory, costs)
        self.outs: list[BlockCopy] = []
        self.ins: list[BlockCopy] = []

    def add(self, request_id: str, num_prompt: int, adapter: str | None = None, **params: object) -> None:
        tokens = [1000 * (ord(request_id[0]) + 1) + index for index in range(num_prompt)]
        self.add_tokens(request_id, tokens, adapter, **params)

    def add_tokens(
        self, request_id: str, tokens: Sequence[int], adapter: str | None = None, **params: object
    ) -> None:
        self.scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=list(tokens),
                params=SamplingParams(**{"max_tokens": 20, **params}),  # type: ignore[arg-type]
                adapter=adapter,
                eos_token_ids=(EOS,),
            )
        )

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.outs += plan.swap_outs
        self.ins += plan.swap_ins
        self.scheduler.check_integrity()
        if plan.chunks:
            self.scheduler.update(plan, {c.request_id: 7 for c in plan.chunks if c.samples})
        assert not self.scheduler.take_failures()
        self.scheduler.check_integrity()
        return plan

    def end_copies(self, error: str | None = None) -> None:
        outs, ins, self.outs, self.ins = self.outs, self.ins, [], []
        self.scheduler.swap_ended(outs, out=True, error=error)
        self.scheduler.swap_ended(ins, out=False, error=error)
        self.scheduler.check_integrity()

    def step_until_preempted(self) -> StepPlan:
        for _ in range(40):
            plan = self.step()
            if plan.preempted:
                return plan
        raise AssertionError("memory was enough")


def steps_of(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {chunk.request_id: (chunk.start, chunk.end) for chunk in plan.chunks}


def two_that_do_not_fit(**options: object) -> Bench:
    """b is preempted, with two full blocks and a part of a third."""
    bench = Bench(**options)  # type: ignore[arg-type]
    bench.add("a", 15, max_tokens=12)
    bench.add("b", 9, max_tokens=12)
    return bench


def test_the_full_blocks_of_a_preempted_request_go_to_the_host() -> None:
    bench = two_that_do_not_fit(num_blocks=7)
    plan = bench.step_until_preempted()
    assert plan.preempted == ("b",)
    assert len(plan.swap_outs) == 2
    assert bench.pool.num_locked == 2
    bench.end_copies()
    assert bench.host.num_used == 2
    assert bench.pool.num_locked == 0


def test_the_block_released_at_once_is_enough_to_go_on() -> None:
    bench = two_that_do_not_fit(num_blocks=7)
    assert "a" in steps_of(bench.step_until_preempted())


def test_who_needs_a_block_that_is_being_copied_gets_no_token_and_preempts_nobody() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", 11)
    bench.add("b", 11)
    bench.add("c", 8)  # two full blocks, and no token in a third yet when memory runs out
    bench.step()
    plans = [bench.step() for _ in range(4)]
    assert [plan.preempted for plan in plans if plan.preempted] == [("c",)]
    assert any(not plan.chunks or len(plan.chunks) < 2 for plan in plans)
    bench.end_copies()
    assert list(steps_of(bench.step())) == ["a", "b"]


def test_a_preempted_request_comes_back_by_a_copy_and_computes_only_the_rest() -> None:
    bench = two_that_do_not_fit(num_blocks=7)
    bench.step_until_preempted()
    bench.end_copies()
    while not bench.ins:
        plan = bench.step()  # a takes b's blocks, and ends
    assert not plan.chunks
    assert not bench.step().chunks  # it waits for the copies
    bench.end_copies()
    plan = bench.step()
    assert bench.host.num_hits > 0
    assert steps_of(plan)["b"][0] >= 8


def test_a_failed_copy_is_no_copy() -> None:
    bench = two_that_do_not_fit(num_blocks=7)
    bench.step_until_preempted()
    bench.end_copies("the bus is broken")
    assert bench.host.num_used == 0
    for _ in range(60):
        bench.step()
        bench.end_copies("the bus is broken")
    assert not bench.scheduler.has_work()


def test_of_a_request_that_the_host_does_not_hold_whole_what_fits_is_copied() -> None:
    bench = two_that_do_not_fit(num_blocks=7, num_host_blocks=1)
    assert len(bench.step_until_preempted().swap_outs) == 1


def test_a_full_host_evicts_of_the_oldest_request_first_what_is_found_last() -> None:
    """Without its first block the second could not be found."""
    bench = Bench(num_blocks=7, num_host_blocks=3)
    held = []
    for pair in ("ab", "cd"):  # of each pair the second request is preempted, with two full blocks
        for name, num_prompt in zip(pair, (15, 9), strict=True):
            bench.add(name, num_prompt, max_tokens=12)
        copies = bench.step_until_preempted().swap_outs
        assert len(copies) == 2
        bench.end_copies()
        held.append([block.node for block in bench.host._blocks.values()])
        while bench.scheduler.has_work():
            bench.step()
            bench.end_copies()
    first, second = held
    assert len(first) == 2
    assert len(second) == 3, "there is room for one of the three"
    assert first[0] in second
    assert first[1] not in second


def test_what_is_cheaper_to_compute_is_not_copied() -> None:
    slow = two_that_do_not_fit(num_blocks=7, block_bytes=1 << 50, costs=DriftWatch(a_gpu()))
    assert not slow.step_until_preempted().swap_outs
    fast = two_that_do_not_fit(num_blocks=7, block_bytes=1, costs=DriftWatch(a_gpu()))
    assert fast.step_until_preempted().swap_outs


def a_gpu() -> CostModel:
    profile = named_profiles()["h200-llama-2-7b"]
    assert isinstance(profile, CostModel)
    return profile


def test_a_shared_prefix_goes_to_the_host_before_it_is_evicted_and_is_found_there() -> None:
    bench = Bench(num_blocks=16)
    shared = [5] * 9
    for name in "ab":
        bench.add_tokens(name, [*shared, ord(name)], max_tokens=1)
        bench.step()
    for name in "cdefg":  # nothing of these is shared, and they are evicted first
        bench.add(name, 14, max_tokens=1)
        bench.step()
        bench.end_copies()
    assert bench.host.num_copied_out == 2
    bench.add("h", 61, max_tokens=1)  # it needs all blocks
    bench.step()
    bench.add_tokens("z", [*shared, 1, 2], max_tokens=1)
    assert not bench.step().chunks
    assert len(bench.ins) == 2
    bench.end_copies()
    assert steps_of(bench.step()) == {"z": (8, 11)}


def test_of_many_behind_one_copy_a_step_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(num_blocks=32, max_running=64)
    prefix = [5] * 9
    number = bench.host.reserve(99, (bench.pool._root(None), (5, 5, 5, 5)), None, ())
    assert number is not None
    bench.host.copied_out(number)
    looks = []
    find = bench.pool.find
    monkeypatch.setattr(bench.pool, "find", lambda *args: looks.append(0) or find(*args))  # type: ignore[func-returns-value]
    for index in range(200):
        bench.scheduler.add(
            EngineRequest(
                request_id=str(index), prompt_token_ids=[*prefix, index], params=SamplingParams(max_tokens=1)
            )
        )
    assert not bench.step().chunks
    assert len(bench.ins) == 1
    assert len(looks) < 20
    bench.end_copies()
    assert len(bench.step().chunks) > 0


def test_a_request_cancelled_while_its_keys_are_copied_leaks_nothing() -> None:
    bench = two_that_do_not_fit(num_blocks=7)
    bench.step_until_preempted()
    for name in "ab":
        bench.scheduler.cancel(name)
        bench.scheduler.check_integrity()
    bench.end_copies()
    assert bench.pool.num_free == bench.pool.num_blocks
    assert not bench.scheduler.has_work()


def test_an_adapter_that_is_forgotten_takes_its_blocks_with_it() -> None:
    host = HostKV(4, 1)
    numbers = [host.reserve(node, (node - 1, (1,)), "a", ()) for node in (1, 2)]
    assert numbers == [0, 1]
    host.copied_out(0)
    host.forget_adapter("a")
    host.check_integrity()
    assert host.num_used == 1  # it is still being copied to
    host.copied_out(1)
    host.check_integrity()
    assert host.num_used == 0


def test_the_border_does_not_pass_a_block_that_is_being_copied() -> None:
    arena = Arena(num_pages=4, page_bytes=PAGE, block_size=BLOCK_SIZE, host_kv=HostKV(4, PAGE))
    blocks = arena.pool.allocate(4)
    assert blocks is not None
    arena.pool.release(blocks[:3])
    arena.pool.lock(3)
    arena.table.add("v", PAGE)
    arena.table.enter("v")
    assert not arena.table.acquire("v")
    arena.pool.unlock(3)
    assert arena.table.acquire("v")
    assert arena.take_block_moves() == {3: 0}


class SwapWorld(World):
    """A world whose KV blocks have a host tier; copies take any time, and some fail."""

    def __init__(
        self,
        num_pages: int,
        sizes: list[int],
        max_running: int,
        seed: int,
        *,
        num_host: int,
        **options: object,
    ) -> None:
        super().__init__(num_pages, sizes, max_running, seed, **options)  # type: ignore[arg-type]
        host_units = options.get("host_units") or 0
        assert isinstance(host_units, int)
        self.tier = HostKV(num_host, PAGE)
        self.arena = Arena(
            num_pages=num_pages,
            page_bytes=PAGE,
            block_size=BLOCK_SIZE,
            host_bytes=host_units * 4096,
            host_kv=self.tier,
        )
        config = self.scheduler._config
        self.scheduler = Scheduler(config, self.arena)
        for version, size in self.sizes.items():
            self.scheduler.adapters.add(version, size * UNIT)
        self.host_kv: dict[int, object] = {}
        self.copies: list[tuple[bool, BlockCopy]] = []
        self._decide, self.scheduler.schedule = self.scheduler.schedule, self._schedule  # type: ignore[method-assign]

    def _schedule(self) -> StepPlan:
        self.plan = self._decide()
        return self.plan

    def step(self) -> None:
        copies, self.copies = self.copies, []
        for out, copy in copies:
            self._end(copy, out=out) if self.random.random() < 0.5 else self.copies.append((out, copy))
        self.scheduler.check_integrity()
        super().step()
        for copy in self.plan.swap_ins:
            self.memory.units[copy.device_block * 8] = "half of a block"
        self.copies += [(True, copy) for copy in self.plan.swap_outs]
        self.copies += [(False, copy) for copy in self.plan.swap_ins]

    def _end(self, copy: BlockCopy, *, out: bool) -> None:
        failed = self.random.random() < 0.1
        if not failed and out:
            self.host_kv[copy.host_block] = self.memory.units[copy.device_block * 8]
        elif not failed:
            self.memory.units[copy.device_block * 8] = self.host_kv[copy.host_block]
        self.scheduler.swap_ended([copy], out=out, error="the bus is broken" if failed else None)


@settings(max_examples=examples(30, 300), deadline=None)
@given(
    num_pages=st.integers(6, 20),
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    max_running=st.integers(1, 6),
    num_requests=st.integers(1, 16),
    num_host=st.integers(1, 40),
    seed=st.integers(0, 1 << 16),
    host_units=st.none() | st.integers(0, 12),
    cold_start=st.sampled_from([ColdStart.OVERLAP, ColdStart.PIPELINED]),
    cancels=st.booleans(),
)
def test_whatever_is_swapped_everybody_finds_what_they_left(
    num_pages: int,
    sizes: list[int],
    max_running: int,
    num_requests: int,
    num_host: int,
    seed: int,
    host_units: int | None,
    cold_start: ColdStart,
    cancels: bool,
) -> None:
    world = SwapWorld(
        num_pages, sizes, max_running, seed, num_host=num_host, host_units=host_units, cold_start=cold_start
    )
    cancelled = set()
    for index in range(num_requests):
        world.add(str(index))
        for _ in range(world.random.randint(0, 3)):
            world.step()
            if cancels and world.random.random() < 0.1:
                request_id = str(world.random.randint(0, index))
                world.scheduler.cancel(request_id)
                cancelled.add(request_id)
    for _ in range(5000):
        if not world.scheduler.has_work() and not world.flights and not world.copies:
            break
        world.step()
    assert world.ended.keys() | cancelled == {str(index) for index in range(num_requests)}, "lost"
    assert set(world.ended.values()) <= {None}, "failed for want of memory"
    pool, host = world.arena.pool, world.tier
    assert (pool.num_free, pool.num_locked, host.num_copying) == (pool.num_blocks, 0, 0)
    for version in world.versions:
        world.scheduler.adapters.remove(version)
    world.scheduler.adapters.take_removed()
    assert all(block.adapter is None for block in host._blocks.values()), "blocks of a forgotten adapter"
    world.scheduler.check_integrity()
